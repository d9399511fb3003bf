"""Decoding: one to a few queries over a long cache, cut along the keys so that every multiprocessor has work.

A program takes one key/value head of one batch entry, the rows of all query heads that share it (up to 16), and one
slice of the keys: K1, K2 and V are read once, for both maps and all of these rows. It leaves each map's row maximum,
row sum and unnormalised output in one fp32 buffer; a second kernel combines the slices and subtracts. The number of
slices follows from the size of the cache alone and lengths are read on the device, so that a captured CUDA graph stays
right as the cache fills. Tile sizes and the number of slices are derived from bytes in flight and shared memory and
have not been timed.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diff_transformer.ops.triton.decode_kernels import ROWS, attend_slice, combine_slices
from diff_transformer.ops.triton.launching import INTERPRETED, on_device, strides
from diff_transformer.ops.triton.tiles import LOG2_E

MOST_QUERIES = 8
WIDEST_QUERY, WIDEST_VALUE = 128, 256
MOST_SLICES = 128  # what the combining kernel holds at once
FEWEST_KEYS = 64  # of a slice: below, the second kernel costs more than the first one gains
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 64  # of the output, that a program of the combining kernel writes
STAGE_BYTES = 32 * 1024  # of one tile of K1, K2 and V; three of them let two programs share a Hopper multiprocessor


class Tile(NamedTuple):
    """Keys a step of ``attend_slice``, and the compiler's options."""

    keys: int
    num_warps: int
    num_stages: int = 3
    maxnreg: int | None = None  # with 8 warps ptxas would rather spill than use more than half the registers


def tile(D: int, Dv: int, element_size: int, mask_rows: bool) -> Tile:
    """The tile for these widths and this many bytes an element: as many keys as need no spilled registers.

    A mask that differs from row to row (mask_rows) takes registers for a pointer and a flag each, and so do rows of a
    width that 16 does not divide, which are read value by value: 8 warps then share them.
    """
    if element_size == 4:  # exact products hold whole rows and columns of both factors
        return Tile(16, 8, maxnreg=255)
    keys = STAGE_BYTES // ((2 * room(D) + room(Dv)) * element_size)
    keys = max(16, min(64, 1 << (keys.bit_length() - 1)))
    return Tile(keys, 8, maxnreg=255) if mask_rows or D % 16 or Dv % 16 else Tile(keys, 4)


def room(width: int) -> int:
    """The power of two, at least 16, that holds a width; what lies beyond the width is masked and costs no bytes."""
    return max(16, triton.next_power_of_2(width))


def slices_of(S: int, programs: int, multiprocessors: int) -> int:
    """Into how many slices ``programs`` key/value heads with S keys are cut: two programs a multiprocessor, or one."""
    return max(1, min(MOST_SLICES, 2 * multiprocessors // programs, S // FEWEST_KEYS))


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def fits(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
) -> str | None:
    """Why ``attend_decode`` does not take these checked arguments, with what would work; None if it does."""
    if q1.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {q1.device}; the decoding kernel runs on CUDA devices"
    if INTERPRETED and q1.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies the bit patterns of bfloat16; give float32"
    if q1.dtype not in DTYPES:
        return f"the tensors are {q1.dtype}; the decoding kernel takes float32, bfloat16 and float16"
    if q1.shape[2] > MOST_QUERIES:
        return f"there are {q1.shape[2]} queries; the decoding kernel takes at most {MOST_QUERIES}"
    if q1.shape[3] > WIDEST_QUERY or v.shape[3] > WIDEST_VALUE:
        return (
            f"queries are {q1.shape[3]} and values {v.shape[3]} wide; "
            f"the decoding kernel takes at most {WIDEST_QUERY} and {WIDEST_VALUE}"
        )
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        return f"attn_mask is {attn_mask.dtype}; the decoding kernel takes boolean masks (True = attend)"
    for name, x in {"q1": q1, "q2": q2, "k1": k1, "k2": k2, "v": v}.items():
        if x.stride(3) != 1 and x.shape[3] > 1:
            return f"{name} has stride {x.stride(3)} in its last dimension; give it stride 1, as .contiguous() does"
    return None


def launch_decode(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    lengths: Tensor | None = None,
) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments that ``fits`` accepts, no gradients.

    lengths: integers [B] on the same device, or None; keys from lengths[b] on are not read, and the last query of batch
    entry b stands at key lengths[b] - 1. Values outside 0 to S count as 0 and S. Returns [B, H, T, Dv], contiguous.
    """
    B, H, T, D = q1.shape
    G, S, Dv = k1.shape[1], k1.shape[2], v.shape[3]
    rows = B * H * T
    mask_rows = attn_mask is not None and (attn_mask.shape[1] > 1 or attn_mask.shape[2] > 1)
    cut = tile(D, Dv, q1.element_size(), mask_rows)
    programs = B * G * triton.cdiv(T * H // G, ROWS.value)
    slices = slices_of(S, programs, multiprocessors(q1.device))
    out = torch.empty(B, H, T, Dv, dtype=v.dtype, device=v.device)
    partial = torch.empty(slices * 2 * rows * (Dv + 2) if slices > 1 else 0, dtype=torch.float32, device=v.device)
    mask = None if attn_mask is None else attn_mask.expand(B, H, T, S)
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    lengths = None if lengths is None else lengths.to(torch.int32).contiguous()
    arguments: list[Any] = [q1, q2, k1, k2, v, lam, mask, lengths, out, partial]
    arguments += [scale * LOG2_E.value, T, S, window or 0, H, q2.shape[1], G, rows]
    arguments += [*strides(q1, q2, k1, k2, v, lam), *mask_strides]
    constants: dict[str, Any] = {
        "D": D,
        "DV": Dv,
        "D_ROOM": room(D),
        "DV_ROOM": room(Dv),
        "BLOCK_N": cut.keys,
        "SHARED_KEYS": k1.data_ptr() == k2.data_ptr() and k1.stride() == k2.stride(),
        "CAUSAL": is_causal and T > 1,
        "WINDOW": window is not None,
        "MASKED": mask is not None,
        "MASK_ROWS": mask_rows,
        "RAGGED": lengths is not None,
        "WHOLE": slices == 1,
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
        "maxnreg": cut.maxnreg,
    }
    with on_device(q1):
        attend_slice[(programs, slices)](*arguments, **constants)
        if slices > 1:
            columns = min(COLUMNS, room(Dv))
            constants = {"DV": Dv, "COLUMNS": columns, "ROOM": triton.next_power_of_2(slices), "num_warps": 4}
            arguments = [partial, lam, out, slices, rows, H, T, *strides(lam)]
            combine_slices[(rows, triton.cdiv(Dv, columns))](*arguments, **constants)
    return out


attend_decode = torch.library.custom_op("diff_transformer::triton_decode", launch_decode, mutates_args=())


@attend_decode.register_fake
def _(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, lengths=None):
    return v.new_empty(q1.shape[0], q1.shape[1], q1.shape[2], v.shape[3])
