"""Differential attention as a layer, and the softmax attention that it is compared with.

Both are one module, ``Attention``: projections, rotary embedding, cache and output are shared, and only the ``core``
between them differs. Legend: B batch, T queries, S keys, n query heads of the matched Transformer (h = n / 2
differential heads), m its key/value heads (g = m / 2), d head width.
"""

import torch
from torch import Tensor, nn

from diff_transformer.checks import require_positive
from diff_transformer.model.cores import DiffCore, SoftmaxCore
from diff_transformer.model.documents import Documents
from diff_transformer.model.heads import check_heads
from diff_transformer.model.lambdas import lambda_init
from diff_transformer.model.layers import ResidualLinear, RMSNorm, apply_rotary, rotary_tables


class Attention(nn.Module):
    """Multi-head attention around a ``core``: W_Q, W_K, W_V, rotary embedding, cache, W_O; no bias anywhere.

    Heads are counted as in the matched softmax attention. ``values_paired`` makes value heads 2i and 2i+1 one head of
    twice the width, as differential attention needs.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        core: "DiffCore | SoftmaxCore",
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        context_size: int | None = None,
        is_causal: bool = True,
        rope_theta: float | None = None,
        layer_idx: int = 0,
    ):
        super().__init__()
        num_key_value_heads = num_key_value_heads or num_heads
        head_dim = head_dim or hidden_size // num_heads
        context_size = context_size or hidden_size
        self.head_dim, self.is_causal, self.rope_theta, self.layer_idx = head_dim, is_causal, rope_theta, layer_idx
        self.value_dim = 2 * head_dim if isinstance(core, DiffCore) else head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(context_size, num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(context_size, num_key_value_heads * head_dim, bias=False)
        self.o_proj = ResidualLinear(num_heads * head_dim, hidden_size)
        self.core = core

    @classmethod
    def from_config(cls, config, layer_idx: int) -> "Attention":
        """The attention of layer ``layer_idx`` of a model: the only line in which the two models of a pair differ."""
        core = _softmax_core(config) if config.attention == "softmax" else _diff_core(config, layer_idx)
        return Attention(
            config.hidden_size,
            config.num_attention_heads,
            core,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            layer_idx=layer_idx,
        )

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values=None,
        is_causal: bool | None = None,
        documents: Documents | None = None,
        output_attentions: bool = False,
        output_attention_parts: bool = False,
        **_: object,
    ):
        """Attend from ``hidden_states [B, T, hidden_size]`` to itself, or to ``context [B, S, context_size]``.

        Args:
            attention_mask: bool (True = attend) or additive, broadcastable to ``[B, heads, T, S]``.
            key_padding_mask: bool ``[B, S]``, True where a key may be attended to.
            position_ids: integer positions ``[B, T]`` for the rotary embedding; 0..T-1 (after the cache) if None.
            position_embeddings: ready ``(cos, sin)``, each ``[B, T, d]``, instead of ``position_ids``.
            past_key_values: a transformers ``Cache``, which receives the new keys and values.
            is_causal: overrides the module's own setting.
            documents: packed documents, none of which attends to another; excludes masks, cache and maps.
            output_attentions: also return the attention map (of differential attention: the difference).
            output_attention_parts: return ``DiffMaps`` (both maps and their difference) instead.

        Returns:
            ``(out [B, T, hidden_size], weights or None)``; a row that may attend to nothing gives 0.
        """
        batch, queries = hidden_states.shape[:2]
        source = hidden_states if context is None else context
        q = self.q_proj(hidden_states).view(batch, queries, -1, self.head_dim)  # [B, T, n, d]
        k = self.k_proj(source).view(batch, source.shape[1], -1, self.head_dim)  # [B, S, m, d]
        v = self.v_proj(source).view(batch, source.shape[1], -1, self.value_dim)  # [B, S, g, 2d] or [B, S, m, d]
        tables = position_embeddings or self._tables(position_ids, queries, past_key_values, q.device)
        if tables is not None:
            q, k = apply_rotary(q, *tables), apply_rotary(k, *tables)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if past_key_values is not None:
            k, v = self._update_cache(past_key_values, k, v)
        mask = _with_padding(attention_mask, key_padding_mask, k)
        causal = self.is_causal if is_causal is None else is_causal
        if documents is not None:
            self._check_documents(mask, past_key_values, context, output_attentions or output_attention_parts)
        packed = {} if documents is None else {"documents": documents}
        out = self.core(q, k, v, mask, causal, **packed).reshape(batch, queries, -1)
        weights = None
        if output_attentions or output_attention_parts:
            weights = self.core.maps(q, k, mask, causal)
            if not output_attention_parts:
                weights = getattr(weights, "difference", weights)
        return self.o_proj(out), weights

    @staticmethod
    def _check_documents(mask, cache, context, maps: bool):
        excluded = {"a mask": mask is not None, "a cache": cache is not None, "a context": context is not None}
        wrong = [name for name, given in {**excluded, "attention maps as output": maps}.items() if given]
        if wrong:
            raise ValueError(
                f"packed documents came with {' and '.join(wrong)}; they say themselves what may be attended to"
            )

    def _tables(self, position_ids, queries: int, cache, device):
        if self.rope_theta is None:
            return None
        if position_ids is None:
            start = cache.get_seq_length(self.layer_idx) if cache is not None else 0
            position_ids = torch.arange(queries, device=device)[None] + start
        return rotary_tables(position_ids, self.head_dim, self.rope_theta)

    def _update_cache(self, cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A static cache gives keys and values equally many heads: there, two keys lie side by side, [B, g, S, 2d].

        One that was laid out before it saw any (``early_initialization``) has m heads of width d for both: then values
        travel as such, and every step copies them.
        """
        if v.shape[1] == k.shape[1] or not getattr(cache, "is_compileable", False):
            return cache.update(k, v, self.layer_idx)
        layer = cache.layers[self.layer_idx]
        if layer.is_initialized and layer.keys.shape[1] == k.shape[1]:
            narrow = v.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)  # [B, m, T, d]
            k, narrow = cache.update(k, narrow, self.layer_idx)
            return k, narrow.unflatten(1, (-1, 2)).transpose(2, 3).flatten(-2)
        pairs = k.unflatten(1, (-1, 2)).transpose(2, 3).flatten(-2)  # [B, g, T, 2d]
        return cache.update(pairs, v, self.layer_idx)


class DiffAttention(Attention):
    """Differential attention for any model: language, vision, time series; self- or cross-attention.

    A drop-in for multi-head attention with ``num_heads`` heads: the same parameters (6 ``head_dim`` more) and FLOPs.

    Args:
        hidden_size: width of the input and the output.
        num_heads: heads of the softmax attention it stands for: even; h = ``num_heads // 2`` differential heads.
            The authors advise h >= 8.
        num_key_value_heads: for grouped-query attention: even, divides ``num_heads``; ``num_heads`` if None.
        head_dim: width d of queries and keys (values have 2d); ``hidden_size // num_heads`` if None.
        context_size: width of the context in cross-attention; ``hidden_size`` if None.
        is_causal: whether a query sees only keys up to its own position, aligned to the lower right corner.
        rope_theta: base of the rotary embedding; None for none (vision, cross-attention, positions of your own).
        layer_index: depth, counted from 0, for ``lambda_init="depth"``; also the layer's place in a cache.
        lambda_init: ``"depth"`` or a constant.
        head_norm, head_norm_init, lambda_std, norm_eps, backend: as in ``DiffTransformerConfig``.

    ``forward`` returns ``(out, weights or None)``, as ``torch.nn.MultiheadAttention`` does.

    Raises:
        ValueError: for head counts that are odd or do not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        context_size: int | None = None,
        is_causal: bool = False,
        rope_theta: float | None = None,
        layer_index: int = 0,
        lambda_init: str | float = "depth",
        lambda_std: float = 0.1,
        head_norm: bool | str = True,
        head_norm_init: float = 1.0,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ):
        require_positive(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            context_size=context_size,
        )
        check_heads(num_heads, num_key_value_heads or num_heads, paired=True)
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"hidden_size {hidden_size} is not divisible by num_heads {num_heads}; give head_dim")
        head_dim = head_dim or hidden_size // num_heads
        if rope_theta is not None and context_size is not None:
            raise ValueError("rope_theta and context_size exclude each other: cross-attention has no shared positions")
        core = DiffCore(
            head_dim,
            _lambda_start(lambda_init, layer_index),
            lambda_std=lambda_std,
            head_norm=head_norm,
            head_norm_init=head_norm_init,
            norm_eps=norm_eps,
            backend=backend,
        )
        super().__init__(
            hidden_size,
            num_heads,
            core,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            context_size=context_size,
            is_causal=is_causal,
            rope_theta=rope_theta,
            layer_idx=layer_index,
        )


def _softmax_core(config) -> SoftmaxCore:
    if not config.softmax_head_norm:
        return SoftmaxCore()
    return SoftmaxCore(RMSNorm(config.head_dim, config.rms_norm_eps, config.head_norm_init))


def _diff_core(config, layer_idx: int) -> DiffCore:
    return DiffCore(
        config.head_dim,
        _lambda_start(config.lambda_init, layer_idx),
        lambda_std=config.lambda_std,
        head_norm=config.head_norm,
        head_norm_init=config.head_norm_init,
        norm_eps=config.rms_norm_eps,
        backend=config.backend,
    )


def _lambda_start(setting: str | float, layer_index: int) -> float:
    if setting == "depth":
        return lambda_init(layer_index)
    if isinstance(setting, str):
        raise ValueError(f"lambda_init is {setting!r}; accepted: 'depth' or a number")
    return float(setting)


def _with_padding(mask: Tensor | None, key_padding_mask: Tensor | None, k: Tensor) -> Tensor | None:
    if key_padding_mask is None:
        return mask
    if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"key_padding_mask is {key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}; accepted: bool "
            f"of shape [B, S] = {(k.shape[0], k.shape[2])}, True where a key may be attended to"
        )
    allowed = key_padding_mask[:, None, None, :]
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))
