"""FlashDiffAttn (arXiv 2410.05258, appendix A) on PyTorch's scaled_dot_product_attention: one call for each map.

``_1``, where the device's kernels take values wider than the queries (CUDA), passes v whole; ``_2`` passes it in parts
as wide as the queries (two halves for the paper's 2 d): the CPU's flash kernel takes no other width, and the math path
it would fall back to materialises the maps. On the CPU both calls compute in fp32: the bf16 kernel adds up gradients in
bf16, with which dv misses the numerics budget at lengths of some hundreds.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from diff_transformer.ops.masking import apply_masks, position_mask, rows_that_see_nothing


def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v."""
    T, S, repeat = q1.shape[2], k1.shape[2], q1.shape[1] // q2.shape[1]
    if attn_mask is not None and attn_mask.shape[1] > 1:
        q2, repeat = q2.repeat_interleave(repeat, dim=1), 1  # each signal head masks its own second map
    blind = rows_that_see_nothing(T, S, is_causal, window, attn_mask, q1.device)
    out_dtype = v.dtype
    if q1.device.type == "cpu":
        q1, q2, k1, k2, v = (x.to(lam.dtype) for x in (q1, q2, k1, k2, v))
    mask = None
    negative = scale <= 0 and q1.device.type == "cpu"  # there the -inf of is_causal is multiplied by it
    if attn_mask is not None or window is not None or T != S or (is_causal and negative):
        mask = one_mask(position_mask(T, S, is_causal, window, q1.device), attn_mask, blind, q1.dtype)
        is_causal = False

    def softmax_attention(q, k):
        return whole_or_in_parts(q, k, v, mask, is_causal, scale).to(lam.dtype)

    second = softmax_attention(q2, k2).repeat_interleave(repeat, dim=1)
    out = softmax_attention(q1, k1) - lam * second
    return (out if blind is None else out.masked_fill(blind, 0)).to(out_dtype)


def one_mask(seen: Tensor | None, attn_mask: Tensor | None, blind: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Positions and attn_mask in one mask, boolean or additive; rows that see nothing are let see everything."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        mask = apply_masks(attn_mask.to(dtype), seen, None)
        return mask if blind is None else mask.masked_fill(blind, 0)
    mask = attn_mask if seen is None else seen if attn_mask is None else seen & attn_mask
    return mask if mask is None or blind is None else mask | blind


def whole_or_in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(q k^T scale) v, [B, heads, T, Dv]."""
    D, Dv = q.shape[-1], v.shape[-1]
    grouped = q.shape[1] != k.shape[1]
    if grouped and not shares_keys(q, v, mask):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    if q.device.type == "cuda":
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    parts = pad(v, (0, -Dv % D)).split(D, dim=-1)
    outs = [
        scaled_dot_product_attention(q, k, part, attn_mask=mask, is_causal=is_causal, scale=scale) for part in parts
    ]
    return torch.cat(outs, dim=-1)[..., :Dv]


def shares_keys(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel takes heads of queries that share keys; else SDPA would materialise the maps.

    On CUDA that is FlashAttention, which takes one width, no mask and no fp32; the memory-efficient kernel, which takes
    all of these, refuses ``enable_gqa``.
    """
    return q.device.type == "cuda" and q.shape[-1] == v.shape[-1] and mask is None and q.dtype != torch.float32


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    return None
