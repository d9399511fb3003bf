"""The backend "sdpa": differential attention by PyTorch's scaled_dot_product_attention; and the baseline's attention.

Each map is attended with its values in parts as wide as the queries, which every kernel of PyTorch takes:
FlashDiffAttn_2 (arXiv 2410.05258, appendix A). Where k2 is k1 one call computes both maps, whose queries are simply
more heads. PyTorch chooses the kernel.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import inspect
from collections.abc import Callable
from functools import cache
from operator import index as concrete
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from diff_transformer.ops.arguments import four_dimensional_mask
from diff_transformer.ops.call import Call, in_dtype, normalized
from diff_transformer.ops.masking import cast_mask, fully_masked_rows, one_mask, position_mask

_HALF = (torch.bfloat16, torch.float16)
FLASH_WIDTH = 256  # of queries and values, at most


def unsupported_reason(call: Call) -> str | None:
    """Why the backend cannot compute this call, or None: it takes one document at a time."""
    return None if call.cu_seqlens_q is None else "it takes no packed documents"


def attend(call: Call) -> Tensor:
    """(first A1 - lam A2) V, [B, H, T, Dv] in the dtype of v.

    On the CPU all calls compute in fp32: the bf16 kernel accumulates gradients in bf16, which misses the numerics
    budget of dv at lengths of some hundreds.
    """
    dtype, call = call.v.dtype, normalized(call)
    if call.q1.device.type == "cpu":
        call = in_dtype(call, call.lam.dtype)
    q1, q2, k1, k2, v, lam = call[:6]
    visible = q1.shape[2], k1.shape[2], call.is_causal, call.window, call.attn_mask
    fully_masked = fully_masked_rows(*visible, q1.device)
    mask, is_causal = mask_and_flag(*visible, fully_masked, q1)
    G, D, Dv = k1.shape[1], concrete(q1.shape[3]), concrete(v.shape[3])
    in_place = mask is None and D <= FLASH_WIDTH and takes_flash(q1)  # reads shared keys in place
    values = (pad(v, (0, -Dv % D)) if Dv % D else v).split(D, dim=-1)

    def one_map(q: Tensor, k: Tensor) -> Tensor:
        outs, shared = [], q.shape[1] != k.shape[1]
        if shared and not in_place:  # SDPA would materialise the maps
            k = k.repeat_interleave(q.shape[1] // G, dim=1)
        options: dict[str, Any] = {"enable_gqa": True} if shared and in_place else {}
        for part in values:
            if shared and not in_place:
                part = part.repeat_interleave(q.shape[1] // G, dim=1)
            outs.append(scaled_dot_product_attention(q, k, part, mask, 0.0, is_causal, scale=call.scale, **options))
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)).narrow(-1, 0, Dv).to(lam.dtype)

    mask_by_head = call.attn_mask is not None and call.attn_mask.shape[1] > 1  # would have to be copied for both maps
    if k2 is None and not mask_by_head:  # one call for both maps
        by_group = [x.unflatten(1, (G, -1)) for x in (q1, q2)]  # [B, G, heads of the map / G, T, D]
        out = one_map(torch.cat(by_group, dim=2).flatten(1, 2), k1).unflatten(1, (G, -1))
        first, second = (x.flatten(1, 2) for x in out.split([x.shape[2] for x in by_group], dim=2))
    else:
        first, second = one_map(q1, k1), one_map(q2, k1 if k2 is None else k2)
    if call.first is not None:
        first = call.first * first
    out = first - lam * second.repeat_interleave(q1.shape[1] // q2.shape[1], dim=1)
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0)).to(dtype)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    *,
    window: int | None = None,
) -> Tensor:
    """``softmax(q k^T / sqrt(d)) v`` of ``q [B, n, T, d]`` and ``k``, ``v [B, m, S, d]``: ``[B, n, T, d]``.

    Args:
        attn_mask: bool (True = attend) or additive, broadcastable to ``[B, n, T, S]``.
        is_causal: hide later keys, aligned to the lower right corner, as ``diff_attention`` does.
        window: each query sees its last ``window`` keys; needs ``is_causal``.
    """
    T, S = q.shape[2], k.shape[2]
    attn_mask = four_dimensional_mask(attn_mask, q, S)
    mask, is_causal = mask_and_flag(T, S, is_causal, window, attn_mask, None, q)
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210  (symbolic when traced or compiled)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def needs_mask(call: Call) -> bool:
    """True if SDPA needs a mask: its causal corner is the upper left one, unless one query sees all keys."""
    if call.attn_mask is not None or call.window is not None:
        return True
    if call.is_causal and 1 != call.q1.shape[2] != call.k1.shape[2]:  # noqa: SIM103 (symbolic under torch.compile)
        return True
    return False


def mask_and_flag(
    T: int, S: int, is_causal: bool, window: int | None, attn_mask: Tensor | None, masked_rows: Tensor | None, q: Tensor
) -> tuple[Tensor | None, bool]:
    """SDPA's mask, boolean or additive, which unmasks ``masked_rows``, the fully masked ones, and its flag is_causal.

    That aligns to the upper left corner and excludes a mask.
    """
    if is_causal and attn_mask is None and (window is None or window >= S) and 1 < T == S:
        return None, True
    mask = one_mask(position_mask(T, S, is_causal, window, q.device), attn_mask)
    if mask is not None and mask.dtype != torch.bool:
        mask = cast_mask(mask, q.dtype)
    if mask is not None and masked_rows is not None:
        mask = mask | masked_rows if mask.dtype == torch.bool else mask.masked_fill(masked_rows, 0)
    return mask, False


def takes_flash(x: Tensor) -> bool:
    """True if PyTorch has its flash kernel for tensors of this dtype and device."""
    return x.dtype in _HALF and _has_flash(x.device.type, x.device.index)


@cache
def _has_flash(device: str, index: int | None) -> bool:
    if device != "cuda" or not torch.cuda.is_available():
        return device == "cuda"  # fake tensors
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


def packs(x: Tensor) -> bool:
    """True if ``packed_attention`` takes tensors like x here."""
    return takes_flash(x) and torch.version.hip is None


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    is_causal: bool, window: int | None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(D)) v within each document by PyTorch's ``varlen_attn``, [total_q, heads, D]."""
    from torch.nn.attention.varlen import varlen_attn

    window = None if window is None else min(window, len(k))
    options: dict[str, Any] = {"window_size": (window - 1 if window else -1, 0 if is_causal else -1)}
    if q.shape[1] != k.shape[1]:
        if varlen_takes_groups():
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    documents = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return cast(Callable[..., Tensor], varlen_attn)(q, k, v, *documents, **options)


@cache
def varlen_takes_groups() -> bool:
    """True if the installed PyTorch's ``varlen_attn`` reads shared keys in place."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# Constants for torch.compile, as in triton/__init__.py.
for _function in (_has_flash, varlen_takes_groups):
    _function._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
