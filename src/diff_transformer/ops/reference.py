"""The specification: differential attention as the paper writes it (arXiv 2410.05258, section 2.1), with N x N maps.

Every other backend is tested against this file. Shapes: B batch, H signal heads, Hn noise heads, G key/value heads,
T queries, S keys, D query width, Dv value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.masking import apply_masks, position_mask


class DiffMaps(NamedTuple):
    """Both attention maps and their difference, weighted by the arguments ``first`` and ``lam``.

    Each is [B, H, T, S], fp32 (fp64 for fp64 inputs).
    """

    first: Tensor
    second: Tensor
    difference: Tensor


def attention_map(q: Tensor, k: Tensor, seen: Tensor | None, attn_mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T scale) over the keys a query may see, [B, H, T, S], in fp32 (fp64 for fp64 inputs).

    A fully masked row is 0.
    """
    scores = apply_masks(q @ k.mT * scale, seen, attn_mask)
    fully_masked = scores.amax(-1, keepdim=True) == float("-inf")
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.masked_fill(fully_masked, 0).softmax(-1, dtype=wide).masked_fill(fully_masked, 0)


def maps(call: Call) -> DiffMaps:
    """Both maps and their difference, in fp32 or, for fp64 inputs, fp64."""
    k2 = call.k1 if call.k2 is None else call.k2
    q1, q2, k1, k2 = (x.to(call.lam.dtype) for x in (call.q1, call.q2, call.k1, k2))
    H, T, S = q1.shape[1], q1.shape[2], k1.shape[2]
    q2, k1, k2 = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (q2, k1, k2))
    seen = position_mask(T, S, call.is_causal, call.window, q1.device)
    first = attention_map(q1, k1, seen, call.attn_mask, call.scale)
    second = attention_map(q2, k2, seen, call.attn_mask, call.scale)
    weighted = first if call.first is None else call.first * first
    return DiffMaps(first, second, weighted - call.lam * second)


def unsupported_reason(call: Call) -> str | None:
    """Why the backend cannot compute this call, or None: it takes one document at a time."""
    return None if call.documents is None else "the reference takes no packed documents"


def attend(call: Call) -> Tensor:
    """(first A1 - lam A2) v, [B, H, T, Dv] in the dtype of v."""
    difference, v = maps(call).difference, call.v
    values = v.to(difference.dtype).repeat_interleave(call.q1.shape[1] // v.shape[1], dim=1)
    return (difference @ values).to(v.dtype)
