"""The public operator for decoding: a few queries over a cache whose used lengths may differ in a batch."""

import torch
from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.ops import triton
from diff_transformer.ops.api import compute
from diff_transformer.ops.arguments import described
from diff_transformer.ops.call import OPERANDS, Call, check, is_empty, replace, with_keys
from diff_transformer.ops.masking import one_mask


def diff_attention_decode(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: float | Tensor,
    *,
    first: float | Tensor | None = None,
    lengths: Tensor | None = None,
    attn_mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention of the newest T queries over a cache of S keys, causal among the queries.

    Equal to ``diff_attention(..., is_causal=True)`` if the cache is full; so without lengths it is that call. With
    lengths, on CUDA, one kernel, split along the keys, reads k1, k2 and v once, and a second one combines the splits.
    The host reads no lengths and no allocation depends on them, so a step can be captured in a CUDA graph. Where that
    kernel does not support the call, and on the CPU, the lengths become a mask.

    Args:
        q1, q2, k1, k2, v, lam, first, attn_mask, scale: as in ``diff_attention``; k1, k2 and v [B, G, S, width] may be
            views of a static cache.
        lengths: integers [B] on the device of q1: how many keys of each batch entry are in use. The other keys have no
            influence, even if they hold NaN. The last query is aligned to the last key in use. Values outside 0 to S
            count as 0 and S. S if None.
        window: each query sees the last ``window`` keys up to its own position.
        backend: with lengths, "auto" takes the decoding kernel on CUDA where it can (at most 8 queries, no gradients,
            no additive mask, widths up to 128 and 256), otherwise what ``diff_attention`` takes. Or a name as there;
            "triton" includes the decoding kernel.

    Returns:
        [B, H, T, Dv] in the dtype of v; a fully masked row is 0.

    Raises:
        UserError: as ``diff_attention``; lengths of another type, shape or device.
    """
    call = check(q1, q2, k1, k2, v, lam, attn_mask, True, window, scale, backend, first)
    _check_lengths(lengths, call.q1)
    if lengths is None or is_empty(call):
        return compute(call)
    by_kernel = backend == "triton" or (backend == "auto" and call.q1.device.type == "cuda")
    if by_kernel and triton.unsupported_reason(call) is None:
        from diff_transformer.ops.triton import decode

        if decode.takes(call):
            return decode.attend_decode(*call[:OPERANDS], lengths)
    unused = (torch.arange(call.k1.shape[2], device=lengths.device) >= lengths[:, None])[:, None, :, None]
    used = with_keys(call, lambda x: x.masked_fill(unused, 0))  # 0 times NaN would be NaN
    return compute(replace(used, attn_mask=_mask(lengths, call), is_causal=False, window=None))


def _mask(lengths: Tensor, call: Call) -> Tensor | None:
    """lengths, the causal limit, the window and the mask of a call in one mask, [B, 1|H, T, S]."""
    T, S = call.q1.shape[2], call.k1.shape[2]
    own = lengths.clamp(0, S)[:, None] - T + torch.arange(T, device=lengths.device)  # [B, T]
    key = torch.arange(S, device=lengths.device)
    seen = key <= own[..., None]  # [B, T, S]
    if call.window is not None:
        seen = seen & (key > own[..., None] - call.window)
    return one_mask(seen[:, None], call.attn_mask)


def _check_lengths(lengths: Tensor | None, q1: Tensor) -> None:
    if lengths is not None and not (
        isinstance(lengths, Tensor)
        and lengths.dtype in (torch.int32, torch.int64)
        and lengths.shape == q1.shape[:1]
        and lengths.device == q1.device
    ):
        raise UserError(
            f"lengths is {described(lengths)}; give None, or int32 or int64 [{q1.shape[0]}], on {q1.device}"
        )
