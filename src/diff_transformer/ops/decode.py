"""The public operator for decoding: a few queries over a cache whose used lengths may differ in a batch."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.ops import triton
from diff_transformer.ops.arguments import active_transform, autocast_off, exporting, traced
from diff_transformer.ops.backends import BACKENDS, resolve
from diff_transformer.ops.call import OPERANDS, Call, check, is_empty, replace, with_keys, zeros
from diff_transformer.ops.masking import one_mask

MAX_COPIED_VALUES = 2**17  # in a batch entry: up to here "blockwise" copies and masks faster than in a second call


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

    Equal to ``diff_attention(..., is_causal=True)`` if the cache is full; so without lengths it is that call, with its
    choice of the fastest form. With lengths, on CUDA, one kernel, split along the keys, reads k1, k2 and v once, and a
    second one combines the splits. The host reads no lengths and no allocation depends on them, so a step can be
    captured in a CUDA graph. On the CPU, the keys in use are sliced out if lengths are equal or long. In all other
    cases (short lengths, a CUDA call that the kernel does not support) the lengths become a mask.

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
    q1 = call.q1
    _check_lengths(lengths, q1)
    by_kernel = backend == "triton" or (backend == "auto" and q1.device.type == "cuda" and not exporting())
    if lengths is not None and by_kernel and not is_empty(call) and triton.unsupported_reason(call) is None:
        from diff_transformer.ops.triton import decode

        if decode.unsupported_reason(call) is None:
            return decode.attend_decode(*call[:OPERANDS], lengths=lengths)
    resolved = resolve(call)
    if lengths is None or is_empty(call):
        return _attend(resolved)
    S = call.k1.shape[2]
    if _can_be_read(lengths):
        used = [min(max(0, n), S) for n in lengths.tolist()]
        if (
            min(used) == max(used)
            or resolved.backend != "blockwise"
            or call.v[0].numel() > MAX_COPIED_VALUES
            or torch.is_grad_enabled()
            or (call.attn_mask is not None and call.attn_mask.dtype != torch.bool)  # NaN - inf would be NaN
        ):
            return _attend_to_used_keys(used, resolved)
        changed = replace(call, v=call.v.clone())
        for entry, n in zip(changed.v.unbind(), used, strict=True):
            entry[:, n:] = 0
    else:
        unused = (torch.arange(S, device=lengths.device) >= lengths[:, None])[:, None, :, None]
        changed = with_keys(call, lambda x: x.masked_fill(unused, 0))  # 0 times NaN would be NaN
    mask = _mask(lengths, call.attn_mask, q1.shape[2], S, window)
    return _attend(resolve(replace(changed, attn_mask=mask, is_causal=False, window=None)))


def _attend(call: Call) -> Tensor:
    """[B, H, T, Dv] of a resolved call."""
    if is_empty(call):
        return zeros(call)
    with autocast_off(call.q1.device.type):
        return BACKENDS[call.backend].attend(call)


def _can_be_read(lengths: Tensor) -> bool:
    """True if the values can be read at no cost: on the CPU, outside tracing and transforms."""
    return lengths.device.type == "cpu" and not traced() and active_transform() is None


def _attend_to_used_keys(used: list[int], call: Call) -> Tensor:
    """Attend to the keys in use: one call for each batch entry, or a single call if all lengths are equal."""
    B, S = call.v.shape[0], call.v.shape[2]
    size = B if min(used) == max(used) else 1  # batch entries in a call
    by_entry: list[Any] = [[None] * B if x is None else x.split(size) for x in call[:7]]
    mask, outs = call.attn_mask, []
    for i, (n, tensors) in enumerate(zip(used, zip(*by_entry, strict=False), strict=False)):
        part = replace(call, **dict(zip(Call._fields, tensors, strict=False)))
        part = part if n == S else with_keys(part, lambda x, n=n: x[:, :, :n])
        if mask is not None:
            rows = mask if mask.shape[0] == 1 else mask[i : i + size]
            part = replace(part, attn_mask=rows if mask.shape[3] == 1 else rows[..., :n])
        outs.append(_attend(part))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _mask(lengths: Tensor, attn_mask: Tensor | None, T: int, S: int, window: int | None) -> Tensor | None:
    """lengths, the causal limit, the window and attn_mask in one mask, [B, 1|H, T, S]."""
    own = lengths.clamp(0, S)[:, None] - T + torch.arange(T, device=lengths.device)  # [B, T]
    key = torch.arange(S, device=lengths.device)
    seen = key <= own[..., None]  # [B, T, S]
    if window is not None:
        seen = seen & (key > own[..., None] - window)
    return one_mask(seen[:, None], attn_mask)


def _check_lengths(lengths: Tensor | None, q1: Tensor) -> None:
    if lengths is None:
        return
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        given = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise UserError(f"lengths is {given}; give an int32 tensor of shape [{q1.shape[0]}], or None")
    if lengths.shape != q1.shape[:1]:
        raise UserError(f"lengths has shape {list(lengths.shape)}; give one length a batch entry, [{q1.shape[0]}]")
    if lengths.device != q1.device:
        raise UserError(f"q1 is on {q1.device} and lengths on {lengths.device}; move them to one device")
