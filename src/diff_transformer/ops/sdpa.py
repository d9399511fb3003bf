"""FlashDiffAttn (arXiv 2410.05258, appendix A) on PyTorch's scaled_dot_product_attention: one call for each map.

Where the device's kernels take values wider than the queries (CUDA), v is passed whole (FlashDiffAttn_1). Elsewhere it
is passed in parts as wide as the queries, two for the paper's Dv = 2 D (FlashDiffAttn_2): the CPU's flash kernel takes
no other width, and its math fallback would materialise the maps. On the CPU both calls compute in fp32: the bf16 kernel
accumulates gradients in bf16, which misses the numerics budget of dv at lengths of some hundreds.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from diff_transformer.ops.masking import apply_masks, fully_masked_rows, position_mask


def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v."""
    T, S, repeat = q1.shape[2], k1.shape[2], q1.shape[1] // q2.shape[1]
    if attn_mask is not None and attn_mask.shape[1] > 1:
        q2, repeat = q2.repeat_interleave(repeat, dim=1), 1  # each signal head then has its own second map
    fully_masked = fully_masked_rows(T, S, is_causal, window, attn_mask, q1.device)
    out_dtype = v.dtype
    if q1.device.type == "cpu":
        q1, q2, k1, k2, v = (x.to(lam.dtype) for x in (q1, q2, k1, k2, v))
    mask = None
    negative = scale <= 0 and q1.device.type == "cpu"  # the CPU kernel multiplies the -inf of is_causal by the scale
    if attn_mask is not None or window is not None or T != S or (is_causal and negative):
        mask = one_mask(position_mask(T, S, is_causal, window, q1.device), attn_mask, fully_masked, q1.dtype)
        is_causal = False

    def softmax_attention(q, k):
        return softmax_attention_of(q, k, v, mask, is_causal, scale).to(lam.dtype)

    second = softmax_attention(q2, k2).repeat_interleave(repeat, dim=1)
    out = softmax_attention(q1, k1) - lam * second
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0)).to(out_dtype)


def one_mask(
    seen: Tensor | None, attn_mask: Tensor | None, fully_masked: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Positions and attn_mask in one mask, boolean or additive, which unmasks the fully masked rows."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        mask = apply_masks(attn_mask.to(dtype), seen, None)
        return mask if fully_masked is None else mask.masked_fill(fully_masked, 0)
    mask = attn_mask if seen is None else seen if attn_mask is None else seen & attn_mask
    return mask if mask is None or fully_masked is None else mask | fully_masked


def softmax_attention_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(q k^T scale) v, [B, heads, T, Dv]."""
    D, Dv = q.shape[-1], v.shape[-1]
    grouped = q.shape[1] != k.shape[1]
    if grouped and not supports_gqa(q, v, mask):
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


def supports_gqa(q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a kernel supports ``enable_gqa`` for this call; otherwise SDPA would materialise the maps.

    On CUDA only FlashAttention does, which takes equal widths, no mask and no fp32. The memory-efficient kernel takes
    all of these, but not ``enable_gqa``.
    """
    return q.device.type == "cuda" and q.shape[-1] == v.shape[-1] and mask is None and q.dtype != torch.float32


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    return None
