"""The public operator for decoding: a few queries at the end of a cache, whose used lengths may differ in a batch."""

import logging
from functools import cache

import torch
from torch import Tensor

from diff_transformer.ops import transforms, triton
from diff_transformer.ops.arguments import check
from diff_transformer.ops.diff_attention import _autocast, diff_attention
from diff_transformer.ops.empty import is_empty

log = logging.getLogger("diff_transformer")


def diff_attention_decode(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: float | Tensor,
    *,
    lengths: Tensor | None = None,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention of the newest T queries over a cache of S keys, causal among the queries.

    The same as ``diff_attention(..., is_causal=True)`` where the cache is full. On CUDA one kernel reads k1, k2 and v
    once, cut along the keys (and a second one combines the parts); nothing is read on the host and nothing allocated
    by content, so that a step can be captured in a CUDA graph. On the CPU the lengths become a mask.

    Args:
        q1, q2, k1, k2, v, lam, attn_mask, scale: as in ``diff_attention``; k1, k2 and v [B, G, S, width] may be views
            of a static cache.
        lengths: integers [B] on the device of q1: how many keys of each batch entry are in use. The rest is not
            read, and the last query stands at the last key in use. Values outside 0 to S count as 0 and S. S if None.
        window: each query sees the last ``window`` keys up to its own position.
        backend: "auto" takes the decoding kernel on CUDA where it can (at most 8 queries, no gradients, no additive
            mask, widths up to 128 and 256), else what ``diff_attention`` takes; a name as there, where "triton"
            includes the decoding kernel.

    Returns:
        [B, H, T, Dv] in the dtype of v; a row that may attend to nothing is 0.

    Raises:
        As ``diff_attention``; TypeError or ValueError for lengths of another type, shape or device.
    """
    q1, q2, k1, k2, v = _autocast(q1, q2, k1, k2, v)
    arguments = check(q1, q2, k1, k2, v, lam, attn_mask, True, window, scale)
    _check_lengths(lengths, q1)
    empty = is_empty(q1, k1)
    if not empty and (backend == "triton" or (backend == "auto" and q1.device.type == "cuda")):
        reason = _why_not_kernel(q1, q2, k1, k2, v, arguments.lam, arguments.attn_mask, window)
        if backend == "auto" and not torch.compiler.is_compiling():
            _announce(q1.device.type, q1.dtype, reason)
        if reason is None:
            from diff_transformer.ops.triton.decode import attend_decode

            return attend_decode(q1, q2, k1, k2, v, *arguments, lengths=lengths)
    if lengths is None or empty:
        return diff_attention(
            q1, q2, k1, k2, v, lam, attn_mask=attn_mask, is_causal=True, window=window, scale=scale, backend=backend
        )
    mask = _mask(lengths, arguments.attn_mask, q1.shape[2], k1.shape[2], window)
    return diff_attention(q1, q2, k1, k2, v, lam, attn_mask=mask, scale=scale, backend=backend)


def _mask(lengths: Tensor, attn_mask: Tensor | None, T: int, S: int, window: int | None) -> Tensor:
    """lengths, the causal limit and the window in one mask with attn_mask, [B, 1|H, T, S]."""
    own = lengths.clamp(0, S)[:, None] - T + torch.arange(T, device=lengths.device)  # [B, T]
    key = torch.arange(S, device=lengths.device)
    seen = key <= own[..., None]  # [B, T, S]
    if window is not None:
        seen = seen & (key > own[..., None] - window)
    if attn_mask is None:
        return seen[:, None]
    if attn_mask.dtype == torch.bool:
        return attn_mask & seen[:, None]
    return attn_mask.masked_fill(~seen[:, None], float("-inf"))


def _check_lengths(lengths: Tensor | None, q1: Tensor) -> None:
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        given = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths is {given}; give an int32 tensor of shape [{q1.shape[0]}], or None")
    if lengths.shape != q1.shape[:1]:
        raise ValueError(f"lengths has shape {list(lengths.shape)}; give one length a batch entry, [{q1.shape[0]}]")
    if lengths.device != q1.device:
        raise ValueError(f"q1 is on {q1.device} and lengths on {lengths.device}; move them to one device")


def _why_not_kernel(q1, q2, k1, k2, v, lam, attn_mask, window) -> str | None:
    """Why the decoding kernel does not take the call, or None."""
    reason = triton.why_not(q1.device, q1.dtype)
    if reason is not None:
        return reason
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q1, q2, k1, k2, v, lam)):
        return "gradients are needed"
    transform = transforms.active()
    if transform is not None:
        return f"it does not follow {transform}"
    from diff_transformer.ops.triton.decode import fits

    return fits(q1, q2, k1, k2, v, attn_mask, True, window)


@cache
def _announce(device: str, dtype: torch.dtype, reason: str | None) -> None:
    chosen = "the decoding kernel" if reason is None else f"diff_attention's own choice, since {reason}"
    log.info("diff_attention_decode on %s, %s: %s", device, str(dtype).removeprefix("torch."), chosen)
