"""Differential attention as a layer, and the softmax attention that it is compared with.

Both are one module, ``Attention``: projections, rotary embedding, cache and output are shared, and only the ``core``
between them differs (``make_core``). Legend: B batch, T queries, S keys, d head width, dv width of a value head.
``count_heads`` in ``model/heads.py`` defines how many heads queries, keys, values and outputs have.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from diff_transformer.checks import refuse_keywords, require_positive
from diff_transformer.model.caches import is_paged, mask_unused_slots, slots_in_use, update_cache, update_paged_cache
from diff_transformer.model.cores import Core, DiffCore, DiffV2Core, GroupedDiffCore
from diff_transformer.model.dint import DintCore
from diff_transformer.model.heads import (
    ATTENTIONS,
    AttentionSettings,
    HeadCounts,
    check_attention,
    check_head_norm,
    check_rotary_width,
    check_variant,
    count_heads,
    default_key_value_heads,
)
from diff_transformer.model.implementations import attention_backend, check_backend
from diff_transformer.model.inputs import Packing, Visible, newest_columns, with_key_padding
from diff_transformer.model.lambdas import FixedLambda, LearnedLambda, TokenLambda, check_lambda_init, lambda_init
from diff_transformer.model.layers import ResidualLinear, RMSNorm, apply_rotary, rotary_tables
from diff_transformer.model.softmax import SoftmaxCore
from diff_transformer.ops.arguments import flag


def make_core(settings: AttentionSettings, layer_index: int, backend: str, *, is_causal: bool = True) -> Core:
    """The core of layer ``layer_index``: the few lines in which the models of this package differ.

    Raises:
        ValueError: for an unknown attention or head norm, or a ``lambda_init`` that is neither ``"depth"`` nor a number
            below 1.
    """
    check_attention(settings.attention)
    heads, norm_init, norm_eps = settings.heads, settings.head_norm_init, settings.head_norm_eps
    if settings.attention == "softmax":
        norm = RMSNorm(heads.value_dim, norm_eps, norm_init) if settings.softmax_head_norm else None
        core = SoftmaxCore(norm, backend)
    elif settings.attention == "diff_v2":
        core = DiffV2Core(TokenLambda(settings.hidden_size, heads.outputs), backend=backend)
    else:
        check_head_norm(settings.head_norm, norm_init)
        check_lambda_init(settings.lambda_init)
        depth = settings.lambda_init == "depth"
        start = lambda_init(layer_index, settings.lambda_depth_offset) if depth else float(settings.lambda_init)
        learned = settings.lambda_learned
        lam = LearnedLambda(heads.head_dim, start, settings.lambda_std) if learned else FixedLambda(start)
        weight = settings.head_norm is True
        norm = RMSNorm(heads.value_dim, norm_eps, norm_init, weight) if settings.head_norm else None
        if settings.attention == "grouped_diff":
            core = GroupedDiffCore(lam, norm, backend, signal=heads.outputs // (heads.queries - heads.outputs))
        elif settings.attention == "dint":
            core = DintCore(lam, norm, backend, is_causal=is_causal)
        else:
            core = DiffCore(lam, norm, backend)
    core.window = settings.sliding_window
    return core


class Attention(nn.Module):
    """Multi-head attention around a ``core``: W_Q, W_K, W_V, rotary embedding, cache, W_O; biases only if ``bias``.

    ``qk_norm``: epsilon of an RMSNorm of each query and key head before the rotary embedding; none if None.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: HeadCounts,
        core: Core,
        *,
        context_size: int | None = None,
        is_causal: bool = True,
        rope_theta: float | None = None,
        layer_idx: int = 0,
        bias: bool = False,
        qk_norm: float | None = None,
    ):
        super().__init__()
        context_size, d, dv = context_size or hidden_size, heads.head_dim, heads.value_dim
        self.is_causal, self.rope_theta, self.layer_idx = is_causal, rope_theta, layer_idx
        self.heads, self.head_dim, self.value_dim = heads, d, dv
        self.q_proj = nn.Linear(hidden_size, heads.queries * d, bias=bias)
        self.k_proj = nn.Linear(context_size, heads.keys * d, bias=bias)
        self.v_proj = nn.Linear(context_size, heads.values * dv, bias=bias)
        self.o_proj = ResidualLinear(heads.outputs * dv, hidden_size, bias)
        self.q_norm = None if qk_norm is None else RMSNorm(d, qk_norm)
        self.k_norm = None if qk_norm is None else RMSNorm(d, qk_norm)
        self.core = core

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "Attention":
        """The attention of layer ``layer_idx`` of a model; the models of a pair differ only in the core."""
        core = make_core(AttentionSettings.of_layer(config, layer_idx), layer_idx, attention_backend(config))
        return Attention(config.hidden_size, config.heads, core, layer_idx=layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor | None = None,
        *others: Tensor,
        attention_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache=None,
        is_causal: bool | None = None,
        documents: Packing | None = None,
        output_attentions: bool = False,
        output_attention_parts: bool = False,
        past_key_values=None,
        **options,
    ):
        """Attend from ``hidden_states [B, T, hidden_size]`` to itself, or to ``context [B, S, context_size]``.

        Args:
            attention_mask: bool (True = attend) or additive, broadcastable to ``[B, heads, T, S]``, where heads are
                those of the output (``heads.outputs``: half of ``num_heads`` for ``"diff"``): both maps of a head share
                its mask. So a learned bias, such as a table of relative positions, has that many heads; give it as it
                is, and ``backend="auto"`` computes its gradient.
            key_padding_mask: bool ``[B, S]``, True where a key may be attended to.
            query_padding_mask: bool ``[B, T]``, True where a query is not padding. Only ``"dint"`` uses it: its means
                leave padding out. In self-attention None takes the newest positions of ``key_padding_mask``.
            position_ids: integer positions ``[B, T]`` for the rotary embedding; None counts from 0, or from the
                cache's length.
            position_embeddings: precomputed ``(cos, sin)``, each ``[B, T, d]``, instead of ``position_ids``.
            cache: a transformers ``Cache`` that receives the new keys and values. With a static cache, masks have one
                column for each of its slots. Or the paged cache of continuous batching, with its arguments as
                ``options``.
            is_causal: overrides the module's own setting.
            documents: packed documents, none of which attends to another; excludes masks, cache and maps.
            output_attentions: also return the attention map (for differential attention the difference).
            output_attention_parts: return ``DiffMaps`` (both maps and their difference) instead.
            past_key_values: the older name of ``cache``.

        Returns:
            ``(out [B, T, hidden_size], weights or None)``; a fully masked row gives 0.

        Raises:
            TypeError: for an unknown argument, such as ``attn_mask``, for (query, key, value), or an ``is_causal`` that
                is not a bool.
            ValueError: for inputs that are not a batch of sequences, and for arguments that exclude one another.
        """
        cache = past_key_values if cache is None else cache
        if options and not is_paged(cache):
            refuse_keywords(type(self).__name__, options, _arguments(self.forward))
        if others:
            raise TypeError(
                f"{type(self).__name__} was called with {2 + len(others)} tensors; it projects q, k and v "
                "itself: call it with (x) for self-attention, or with (x, context) for cross-attention"
            )
        q, k, v = self._project(hidden_states, context, position_ids, position_embeddings, cache)
        visible = Visible(attention_mask, self.is_causal if is_causal is None else flag("is_causal", is_causal))
        visible = visible._replace(documents=documents)
        newest = None if context is not None else newest_columns(key_padding_mask, q.shape[2], cache, self.layer_idx)
        if cache is not None:
            k, v, visible = self._with_cached(q.shape[2], k, v, visible, cache, key_padding_mask is not None, options)
        with_maps = output_attentions or output_attention_parts
        visible = self._complete(visible, key_padding_mask, k, cache, context, with_maps)
        state = self.core.call_state(
            cache, self.layer_idx, newest if query_padding_mask is None else query_padding_mask
        )
        if with_maps:
            out, weights = self.core.forward_with_maps(q, k, v, visible, hidden_states=hidden_states, **state)
        else:
            out, weights = self.core(q, k, v, visible, hidden_states=hidden_states, **state), None
        if not output_attention_parts:
            weights = getattr(weights, "difference", weights)
        return self.o_proj(out.flatten(2)), weights

    def _project(self, hidden_states, context, position_ids, position_embeddings, cache) -> tuple[Tensor, ...]:
        """Queries, keys and values with their positions, each [B, heads, length, width].

        Raises:
            ValueError: for inputs that are not a batch of sequences, or a context together with a rotary embedding.
        """
        _check_sequences("hidden_states", hidden_states, "hidden_size")
        if context is not None:
            _check_sequences("context", context, "context_size")
        source = hidden_states if context is None else context
        q = _by_head(self.q_proj(hidden_states), self.head_dim)  # [B, T, query heads, d]
        k = _by_head(self.k_proj(source), self.head_dim)  # [B, S, key heads, d]
        v = _by_head(self.v_proj(source), self.value_dim)  # [B, S, value heads, dv]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        tables = position_embeddings or self._rotary_tables(position_ids, q.shape[1], cache, q.device)
        if tables is not None:
            if context is not None:
                raise ValueError(
                    "a context came to attention with a rotary embedding, but its keys have no positions among the "
                    "queries'; leave out rope_theta (or position_embeddings) for cross-attention"
                )
            q, k = self.rotate(q, k, *tables)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the rotary embedding to queries and keys, [B, length, heads, d]."""
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)

    def _rotary_tables(self, position_ids, queries: int, cache, device):
        if self.rope_theta is None:
            if position_ids is not None:
                raise ValueError("position_ids came to a layer without rotary embedding; build it with rope_theta")
            return None
        if position_ids is None:
            start = cache.get_seq_length(self.layer_idx) if cache is not None else 0
            position_ids = torch.arange(queries, device=device)[None] + start
        if position_ids.dim() != 2:
            raise ValueError(f"position_ids has the shape {list(position_ids.shape)}; give [B, T] or [1, T]")
        return rotary_tables(position_ids, self.head_dim, self.rope_theta)

    def _with_cached(
        self, queries: int, k: Tensor, v: Tensor, visible: Visible, cache, padded: bool, options: dict
    ) -> tuple[Tensor, Tensor, Visible]:
        """Add ``k`` and ``v`` to ``cache``: all keys and values, and what ``queries`` new queries see of them."""
        if is_paged(cache):
            return *update_paged_cache(cache, k, v, self.layer_idx, visible.mask, options), visible
        of_call = (cache, self.layer_idx, queries)
        in_use = slots_in_use(*of_call, self.core.window)
        if not visible.is_causal or padded or (visible.mask is not None and visible.mask.shape[-1] != in_use):
            in_use = None  # the masks have a column for each slot
        if in_use is None:
            mask, causal = mask_unused_slots(*of_call, visible.mask, visible.is_causal, self.core.window, k.device)
            return *update_cache(cache, k, v, self.layer_idx), visible._replace(mask=mask, is_causal=causal)
        k, v = update_cache(cache, k, v, self.layer_idx)
        return k[:, :, :in_use], v[:, :, :in_use], visible

    def _complete(
        self, visible: Visible, key_padding_mask: Tensor | None, k: Tensor, cache, context, with_maps: bool
    ) -> Visible:
        """``visible`` with padding and the window; ValueError for arguments that exclude one another."""
        mask, causal, _, documents = visible
        if not causal and mask is None and self.core.window is not None:
            raise ValueError(
                f"window={self.core.window} without is_causal=True; a window counts back from the query's own "
                "position. Give a band as attention_mask instead"
            )
        alone = cache is None and k.shape[2] > 1
        if alone and not causal and mask is None and self.core.is_causal:
            raise ValueError(
                "attention='dint' was built with is_causal=True and takes running means; build it with is_causal=False"
            )
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"attention_mask is {mask.dtype}; give bool (True = attend) or an additive mask")
        mask = with_key_padding(mask, key_padding_mask, k)
        visible = Visible(mask, causal, self.core.window if causal else None, documents)
        if documents is None:
            return visible
        excluded = {"a mask": mask is not None, "a cache": cache is not None, "a context": context is not None}
        wrong = [name for name, given in {**excluded, "attention maps as output": with_maps}.items() if given]
        if wrong:
            raise ValueError(
                f"packed documents came with {' and '.join(wrong)}; they say themselves what may be attended to"
            )
        return visible


class DiffAttention(Attention):
    """Differential attention for any model, as self- or cross-attention; True in a mask means "may be attended to".

    It replaces multi-head attention with ``num_heads`` heads, with the same parameters (6 ``head_dim`` more) and FLOPs.
    Two things differ from ``torch.nn.MultiheadAttention``: there True in a mask *hides* a key, so invert such masks;
    and ``forward`` takes ``(x)`` or ``(x, context)`` instead of query, key and value.

    Args:
        hidden_size: width of the input and the output.
        num_heads: heads of the softmax attention that it replaces: even; h = ``num_heads // 2`` differential heads.
            The authors advise h >= 8.
        attention: ``"diff"``, ``"diff_v2"``, ``"grouped_diff"`` or ``"dint"``; ``DiffTransformerConfig`` documents the
            meaning of ``num_heads`` and ``num_key_value_heads`` for each.
        num_key_value_heads: for grouped-query attention: even, divides ``num_heads``; ``num_heads`` if None.
        head_dim: width d of queries and keys (values have 2d); ``hidden_size // num_heads`` if None.
        value_head_dim: width of a value head, if not 2d.
        context_size: width of the context in cross-attention; ``hidden_size`` if None.
        is_causal: whether a query sees only keys up to its own position, aligned to the lower right corner.
        rope_theta: base of the rotary embedding, above 0; None for no rotary embedding (vision, cross-attention).
        layer_index: depth, counted from 0, for ``lambda_init="depth"``; also the layer's index in a cache.
        lambda_init: ``"depth"`` or a constant below 1.
        window: with ``is_causal``, each query sees its last ``window`` keys, its own included; all if None.
        bias: whether the four projections have biases (the paper's have none).
        qk_norm: whether each query and key head passes an RMSNorm over ``head_dim`` before the rotary embedding, with
            one weight for all query heads and one for all key heads (the paper has none).
        lambda_learned, signal_heads_per_noise_head, head_norm, head_norm_init, lambda_std, norm_eps, backend: as in
            ``DiffTransformerConfig``.

    ``forward`` returns ``(out, weights or None)``, as ``torch.nn.MultiheadAttention`` does; ``torch.nn.Sequential``
    needs a wrapper that returns the first.

    Raises:
        TypeError: for a size that is not a number, a backend that is not a name, an ``is_causal`` that is not a bool.
        ValueError: for sizes that are not positive, head counts that are odd or do not divide, unknown values, and
            arguments that exclude one another.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        attention: str = "diff",
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        signal_heads_per_noise_head: int = 3,
        context_size: int | None = None,
        is_causal: bool = False,
        rope_theta: float | None = None,
        layer_index: int = 0,
        lambda_init: str | float = "depth",
        lambda_learned: bool = True,
        lambda_std: float = 0.1,
        head_norm: bool | str = True,
        head_norm_init: float = 1.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
        window: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        **unknown,
    ):
        if "dropout" in unknown:
            raise TypeError(
                "DiffAttention has no argument 'dropout': the paper trains without attention dropout; apply "
                "torch.nn.Dropout to the layer's output"
            )
        refuse_keywords(type(self).__name__, unknown, _arguments(type(self).__init__)[1:])
        require_positive(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            signal_heads_per_noise_head=signal_heads_per_noise_head,
            context_size=context_size,
            window=window,
            rope_theta=rope_theta,
        )
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by num_heads {num_heads}; give head_dim")
        head_dim = head_dim or hidden_size // num_heads
        if rope_theta is not None and context_size is not None:
            raise ValueError("rope_theta and context_size exclude each other: cross-attention has no shared positions")
        if attention == "softmax":
            raise ValueError("attention is 'softmax'; for softmax attention take torch.nn.MultiheadAttention")
        check_attention(attention, ATTENTIONS[:-1])
        check_variant(attention, lambda_learned=lambda_learned, window=window)
        check_backend(backend)
        is_causal = flag("is_causal", is_causal)
        if rope_theta is not None:
            check_rotary_width(head_dim)
        if window is not None and not is_causal:
            raise ValueError(
                f"window={window} without is_causal=True; a window counts back from the query's own position. "
                "Set is_causal=True, or give another band as attention_mask"
            )
        signal = signal_heads_per_noise_head
        key_value_heads = num_key_value_heads or default_key_value_heads(attention, num_heads, signal)
        heads = count_heads(attention, num_heads, key_value_heads, head_dim, value_head_dim, signal)
        check_head_norm(head_norm, head_norm_init)
        check_lambda_init(lambda_init)
        settings = AttentionSettings(
            attention=attention, hidden_size=hidden_size, heads=heads, lambda_init=lambda_init,
            lambda_learned=lambda_learned, lambda_std=lambda_std, head_norm=head_norm, head_norm_init=head_norm_init,
            head_norm_eps=norm_eps, sliding_window=window,
        )  # fmt: skip
        super().__init__(
            hidden_size,
            heads,
            make_core(settings, layer_index, backend, is_causal=is_causal),
            context_size=context_size,
            is_causal=is_causal,
            rope_theta=rope_theta,
            layer_idx=layer_index,
            bias=bias,
            qk_norm=norm_eps if flag("qk_norm", qk_norm) else None,
        )


def _arguments(function: Callable) -> list[str]:
    named = inspect.signature(function).parameters.values()
    return [x.name for x in named if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]


def _check_sequences(name: str, x: Tensor, width: str):
    if not isinstance(x, Tensor):
        hint = (
            "; a layer of attention returns (out, weights): in torch.nn.Sequential, wrap it in a module that returns "
            "out alone"
            if isinstance(x, tuple)
            else ""
        )
        raise TypeError(f"{name} is a {type(x).__name__}; give a tensor [batch, length, {width}]{hint}")
    if x.dim() != 3:
        hint = "; for one sequence x give x[None]" if x.dim() == 2 else ""
        raise ValueError(f"{name} has shape {list(x.shape)}; accepted: [batch, length, {width}]{hint}")


def _by_head(x: Tensor, width: int) -> Tensor:
    """``[B, length, heads * width]`` as ``[B, length, heads, width]``, also of no rows.

    Raises:
        ValueError: for a part of a head, where tensor parallel has split one.
    """
    if x.shape[2] % width:
        raise ValueError(
            f"a projection gives {x.shape[2]} channels, which are no whole heads of width {width}: tensor parallel has "
            "split a head between processes; take a number of processes that divides the value heads "
            "(config.heads.values)"
        )
    return x.view(*x.shape[:2], x.shape[2] // width, width)
