"""Softmax attention of the matched Transformer, in the forms that differential attention has as backends.

Shapes: B batch, n query heads, m key/value heads, T queries, S keys, d head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops import flash, flex
from diff_transformer.ops.masking import position_mask, rows_that_see_nothing
from diff_transformer.ops.reference import attention_map

SOFTMAX = ("sdpa", "eager", "flex", "flash")


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    *,
    window: int | None = None,
    backend: str = "sdpa",
) -> Tensor:
    """``softmax(q k^T / sqrt(d)) v`` of ``q [B, n, T, d]`` and ``k``, ``v [B, m, S, d]``: ``[B, n, T, d]``.

    Args:
        attn_mask: bool (True = attend) or additive, broadcastable to ``[B, n, T, S]``.
        is_causal: hide later keys, aligned to the lower right corner, as ``diff_attention`` does.
        window: each query sees its last ``window`` keys; needs ``is_causal``.
        backend: ``"sdpa"`` (PyTorch's choice of kernel), ``"eager"`` (the map as a tensor), ``"flex"`` or ``"flash"``.

    Raises:
        RuntimeError: if the backend cannot compute this call.
    """
    if backend == "sdpa":
        mask, is_causal = sdpa_mask(q, k, attn_mask, is_causal, window)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return {"eager": _eager, "flex": _flex, "flash": _flash}[backend](q, k, v, attn_mask, is_causal, window)


def sdpa_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: int | None = None
) -> tuple[Tensor | None, bool]:
    """SDPA's flag aligns to the upper left corner and excludes a mask: express both here, to the lower right."""
    queries, keys = q.shape[2], k.shape[2]
    if is_causal and attn_mask is None and 1 < queries == keys and (window is None or window >= keys):
        return None, True
    seen = position_mask(queries, keys, is_causal, window, q.device)
    if seen is None or attn_mask is None:
        return (attn_mask if seen is None else seen), False
    if attn_mask.dtype == torch.bool:
        return attn_mask & seen, False
    return attn_mask.masked_fill(~seen, float("-inf")), False


def _eager(q: Tensor, k: Tensor, v: Tensor, attn_mask, is_causal: bool, window) -> Tensor:
    repeat, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    seen = position_mask(q.shape[2], k.shape[2], is_causal, window, q.device)
    weights = attention_map(q, k.repeat_interleave(repeat, dim=1), seen, attn_mask, scale)  # [B, n, T, S], fp32
    return (weights @ v.repeat_interleave(repeat, dim=1).to(weights.dtype)).to(v.dtype)


def _flex(q: Tensor, k: Tensor, v: Tensor, attn_mask, is_causal: bool, window) -> Tensor:
    _require(flex.why_not(q.device, q.dtype), "flex")
    reason = flex.why_no_gradients(q.device)
    if reason and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(reason)
    T, S = q.shape[2], k.shape[2]
    blind = rows_that_see_nothing(T, S, is_causal, window, attn_mask, q.device)
    if attn_mask is None or blind is None:
        mask, bias = flex.position_block_mask(T, S, is_causal, window, q.device), None
    else:
        mask = flex.dense_block_mask(T, S, is_causal, window, attn_mask, blind)
        bias = None if attn_mask.dtype == torch.bool else flex.additive(attn_mask, blind)
    # Without gradients the CPU still refuses tensors that require them.
    q, k, v = (x.contiguous() if torch.is_grad_enabled() else x.detach().contiguous() for x in (q, k, v))
    out = flex.flex_attention(q, k, v, bias, mask, enable_gqa=q.shape[1] != k.shape[1])
    return out if blind is None else out.masked_fill(blind, 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, attn_mask, is_causal: bool, window) -> Tensor:
    _require(flash.why_not(q.device, q.dtype), "flash")
    if attn_mask is not None:
        _require("flash-attn takes no attn_mask; pack sequences instead of padding them", "flash")
    found = flash.installed()
    assert found is not None  # why_not has asked
    options = {"softmax_scale": q.shape[3] ** -0.5, "causal": is_causal}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    out = found[1](*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def _require(reason: str | None, name: str) -> None:
    if reason is not None:
        raise RuntimeError(f"softmax attention on {name!r} is not available: {reason}")
