"""Differential attention as a layer, and the softmax attention that it is compared with.

Both are one module, ``Attention``: projections, rotary embedding, cache and output are shared, and only the ``core``
between them differs. Legend: B batch, T queries, S keys, d head width, dv width of a value head.
``count_heads`` in ``model/heads.py`` defines how many heads queries, keys, values and outputs have.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.checks import require_positive
from diff_transformer.errors import UserError
from diff_transformer.model.caches import is_static, update_cache
from diff_transformer.model.cores import AttentionCore
from diff_transformer.model.dint import DintCore
from diff_transformer.model.heads import HeadCounts, Variant, count_heads, default_key_value_heads, variant_of
from diff_transformer.model.implementations import attention_backend
from diff_transformer.model.inputs import Visible
from diff_transformer.model.layers import RMSNorm, apply_rotary, clip_rms, rotary_tables
from diff_transformer.ops.reference import DiffMaps


class Attention(nn.Module):
    """Multi-head attention around a ``core``: W_Q, W_K, W_V, rotary embedding, cache, W_O; biases only if ``bias``.

    ``qk_norm``: epsilon of an RMSNorm of each query and key head before the rotary embedding; none if None.
    ``qk_clip``: largest RMS of a query or key head; larger ones are scaled down to it.
    """

    in_model = False  # a model computes the rotary embedding once for all of its layers

    def __init__(
        self,
        hidden_size: int,
        heads: HeadCounts,
        core: AttentionCore,
        *,
        context_size: int | None = None,
        is_causal: bool = True,
        rope_theta: float | None = None,
        layer_idx: int = 0,
        bias: bool = False,
        qk_norm: float | None = None,
        qk_clip: float | None = None,
    ):
        super().__init__()
        context_size, d, dv = context_size or hidden_size, heads.head_dim, heads.value_dim
        self.is_causal, self.rope_theta, self.layer_idx, self.qk_clip = is_causal, rope_theta, layer_idx, qk_clip
        self.heads, self.head_dim, self.value_dim = heads, d, dv
        self.q_proj = nn.Linear(hidden_size, heads.queries * d, bias=bias)
        self.k_proj = nn.Linear(context_size, heads.keys * d, bias=bias)
        self.v_proj = nn.Linear(context_size, heads.values * dv, bias=bias)
        self.o_proj = nn.Linear(heads.outputs * dv, hidden_size, bias=bias)
        self.q_norm = None if qk_norm is None else RMSNorm(d, qk_norm)
        self.k_norm = None if qk_norm is None else RMSNorm(d, qk_norm)
        self.core = core

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "Attention":
        """The attention of layer ``layer_idx`` of a model; the models of a pair differ only in the core."""
        core = core_of(
            config.variant, config.hidden_size, config.heads, layer_idx, backend=attention_backend(config),
            window=config.sliding_window, norm_eps=config.head_norm_eps or config.rms_norm_eps,
        )  # fmt: skip
        layer = Attention(config.hidden_size, config.heads, core, layer_idx=layer_idx, qk_clip=config.qk_clip)
        layer.in_model = True
        return layer

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache=None,
        is_causal: bool | None = None,
        visible: Visible | None = None,
        output_attentions: bool = False,
        output_attention_parts: bool = False,
        past_key_values=None,
    ) -> tuple[Tensor, Tensor | DiffMaps | None]:
        """Attend from ``hidden_states [B, T, hidden_size]`` to itself, or to ``context [B, S, context_size]``.

        Args:
            attention_mask: bool (True = attend) or additive, broadcastable to ``[B, heads, T, S]``, where heads are
                those of the output (``heads.outputs``: half of ``num_heads`` for ``"diff"``): both maps of a head share
                its mask. For keys ``[B, S]`` give ``keys[:, None, None]``. A learned bias, such as a table of relative
                positions, has that many heads; give it as it is, and ``backend="auto"`` computes its gradient.
            position_ids: integer positions ``[B, T]`` for the rotary embedding; None counts from 0, or from the
                cache's length.
            position_embeddings: precomputed ``(cos, sin)``, each ``[B, T, d]``, instead of ``position_ids``. A layer of
                a model needs those of the model's ``rotary_emb``.
            cache: a transformers ``Cache`` that receives the new keys and values. A static cache needs the whole mask,
                with a column for each of its slots, as ``create_causal_mask`` of transformers makes it.
            is_causal: overrides the module's own setting.
            visible: all of the above about masks, or packed documents, in one record, as a model builds it.
            output_attentions: also return the attention map (for differential attention the difference).
            output_attention_parts: return ``DiffMaps`` (both maps and their difference) instead.
            past_key_values: the older name of ``cache``.

        Returns:
            ``(out [B, T, hidden_size], weights or None)``; a fully masked row gives 0.

        Raises:
            UserError: for inputs that are not a batch of sequences, and for arguments that exclude one another.
        """
        cache = past_key_values if cache is None else cache
        if cache is not None and self.core.variant.means:
            raise UserError("attention='dint' takes means over whole rows; call it without a cache (use_cache=False)")
        q, k, v = self._project(hidden_states, context, position_ids, position_embeddings, cache)
        with_maps = output_attentions or output_attention_parts
        if visible is None:
            causal = self.is_causal if is_causal is None else is_causal
            visible = self._visible(attention_mask, causal, cache)
        if visible.documents is not None and with_maps:
            raise UserError("attention maps are not computed for packed documents; leave output_attentions out")
        if cache is not None:
            k, v = update_cache(cache, k, v, self.layer_idx)
        out = self.o_proj(self.core(q, k, v, visible, hidden_states=hidden_states).flatten(2))
        if not with_maps:
            return out, None
        maps = self.core.maps(q, k, visible, hidden_states=hidden_states)
        return out, maps if output_attention_parts else maps.difference

    def lambdas(self, hidden_states: Tensor | None = None) -> Tensor | None:
        """Lambda of this layer without gradient, in fp32: a scalar, or ``[B, h, T, 1]`` for each token and head.

        Args:
            hidden_states: the layer's input ``[B, T, hidden_size]``, for variants whose lambda depends on the token.

        It is the weight of the second map; None for one map.
        """
        kind = self.core.variant.lam
        if kind is None:
            return None
        if kind == "token" and hidden_states is None:
            raise UserError(
                "lambdas was called without hidden_states, but lambda of this layer is computed from each token; give "
                "the layer's input [batch, length, hidden_size]"
            )
        with torch.no_grad():
            lam = self.core.lambda_and_gate(hidden_states)[0] if kind == "token" else self.core.lam()
            return torch.as_tensor(lam, dtype=torch.float32)

    def attention_maps(self, hidden_states: Tensor, context: Tensor | None = None, **options) -> DiffMaps:
        """Both softmax maps of this layer and the map that multiplies V: ``(first, second, difference)``.

        Each is fp32 ``[B, h, T, S]``; with one map (``"softmax"``, ``"gated"``) the second is 0. ``options`` are those
        of ``forward``: masks, positions, a cache.
        """
        return self(hidden_states, context, output_attention_parts=True, **options)[1]

    def _project(self, hidden_states, context, position_ids, position_embeddings, cache) -> tuple[Tensor, ...]:
        """Queries, keys and values with their positions, each [B, heads, length, width]."""
        source = hidden_states if context is None else context
        for name, x in (("hidden_states", hidden_states), ("the context", source)):
            if x.dim() != 3:
                raise UserError(f"{name} has the shape {list(x.shape)}; give [batch, length, width]")
        q = _by_head(self.q_proj(hidden_states), self.head_dim)  # [B, T, query heads, d]
        k = _by_head(self.k_proj(source), self.head_dim)  # [B, S, key heads, d]
        v = _by_head(self.v_proj(source), self.value_dim)  # [B, S, value heads, dv]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.qk_clip is not None:
            q, k = clip_rms(q, self.qk_clip), clip_rms(k, self.qk_clip)
        tables = position_embeddings or self._rotary_tables(position_ids, q.shape[1], cache, q.device)
        if tables is not None:
            if context is not None:
                raise UserError("a context has no positions among the queries'; leave out rope_theta for it")
            q, k = apply_rotary(q, *tables), apply_rotary(k, *tables)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _rotary_tables(self, position_ids, queries: int, cache, device):
        if self.in_model:
            raise UserError(
                "a layer of a model was called without position_embeddings; give those of the model, "
                "rotary_emb(hidden_states, position_ids=position_ids)"
            )
        if self.rope_theta is None:
            if position_ids is not None:
                raise UserError("position_ids was given to a layer without rotary embedding; build it with rope_theta")
            return None
        if position_ids is None:
            start = cache.get_seq_length(self.layer_idx) if cache is not None else 0
            position_ids = torch.arange(queries, device=device)[None] + start
        if position_ids.dim() != 2:
            raise UserError(f"position_ids has the shape {list(position_ids.shape)}; give [B, T] or [1, T]")
        return rotary_tables(position_ids, self.head_dim, self.rope_theta)

    def _visible(self, mask: Tensor | None, causal: bool, cache) -> Visible:
        """The record of a call, with the layer's window."""
        if is_static(cache):  # slots that are not in use lie behind the newest key
            if mask is None:
                raise UserError("a static cache has slots that are not in use; give attention_mask, which hides them")
            causal = False
        window = self.core.window
        if window is not None and not causal and mask is None:
            raise UserError(f"window={window} without is_causal=True; give the band as attention_mask instead")
        return Visible(mask, causal, window if causal else None)


class DiffAttention(Attention):
    """Differential attention for any model, as self- or cross-attention; True in a mask means "may be attended to".

    It replaces multi-head attention with ``num_heads`` heads, with the same parameters (6 ``head_dim`` more) and FLOPs.
    Two things differ from ``torch.nn.MultiheadAttention``: there True in a mask *hides* a key, so invert such masks;
    and ``forward`` takes ``(x)`` or ``(x, context)`` instead of query, key and value.

    Args:
        hidden_size: width of the input and the output.
        num_heads: heads of the softmax attention that it replaces: even; h = ``num_heads // 2`` differential heads.
            The authors advise h >= 8.
        attention: ``"diff"``, ``"diff_v2"``, ``"diff_v3"``, ``"gated"``, ``"grouped_diff"`` or ``"dint"``;
            ``DiffTransformerConfig`` documents the meaning of ``num_heads`` and ``num_key_value_heads`` for each. Or a
            ``Variant`` (``model/heads.py``), for ablations; the arguments that choose one then have no effect.
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
        lambda_learned, signal_heads_per_noise_head, head_norm, head_norm_init, lambda_std, norm_eps, qk_clip, backend:
            as in ``DiffTransformerConfig``. Those of a part that the variant lacks are ignored.

    ``forward`` returns ``(out, weights or None)``, as ``torch.nn.MultiheadAttention`` does; ``torch.nn.Sequential``
    needs a wrapper that returns the first.

    Raises:
        UserError: for sizes that are not positive, head counts that are odd or do not divide, and unknown values.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        attention: str | Variant = "diff",
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
        qk_clip: float | None = None,
    ):
        require_positive(
            hidden_size=hidden_size, num_heads=num_heads, num_key_value_heads=num_key_value_heads, head_dim=head_dim,
            value_head_dim=value_head_dim, signal_heads_per_noise_head=signal_heads_per_noise_head,
            context_size=context_size, window=window, rope_theta=rope_theta, qk_clip=qk_clip,
        )  # fmt: skip
        if head_dim is None and hidden_size % num_heads:
            raise UserError(f"hidden_size {hidden_size} is not divisible by num_heads {num_heads}; give head_dim")
        head_dim = head_dim or hidden_size // num_heads
        if rope_theta is not None and head_dim % 2:
            raise UserError(f"head_dim is {head_dim}; rotary embedding needs an even width")
        if isinstance(attention, Variant):
            variant = attention
        else:
            variant = variant_of(
                SimpleNamespace(
                    attention=attention, lambda_init=lambda_init, lambda_depth_offset=0, lambda_std=lambda_std,
                    lambda_learned=lambda_learned, head_norm=head_norm, head_norm_init=head_norm_init,
                    softmax_head_norm=False, head_scale=1.0, core=None, sliding_window=window,
                    signal_heads_per_noise_head=signal_heads_per_noise_head,
                )
            )  # fmt: skip
        key_value_heads = num_key_value_heads or default_key_value_heads(variant, num_heads)
        heads = count_heads(variant, num_heads, key_value_heads, head_dim, value_head_dim)
        core = core_of(variant, hidden_size, heads, layer_index, backend=backend, window=window, norm_eps=norm_eps)
        core.is_causal = is_causal
        super().__init__(
            hidden_size, heads, core, context_size=context_size, is_causal=is_causal, rope_theta=rope_theta,
            layer_idx=layer_index, bias=bias, qk_norm=norm_eps if qk_norm else None, qk_clip=qk_clip,
        )  # fmt: skip


def core_of(variant: Variant, *arguments: Any, **options: Any) -> AttentionCore:
    """The core of a variant; arguments are those of ``AttentionCore``."""
    return (DintCore if variant.means else AttentionCore)(variant, *arguments, **options)


def _by_head(x: Tensor, width: int) -> Tensor:
    """``[B, length, heads * width]`` as ``[B, length, heads, width]``, also of no rows."""
    return x.view(*x.shape[:2], x.shape[2] // width, width)
