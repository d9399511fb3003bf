"""Split-KV decoding: one to a few queries over a long cache, split along the keys to occupy every multiprocessor.

A program takes one key/value head of one batch entry, the rows of all query heads that share it (up to 16), and one
split of the keys. It reads K1, K2 and V once, for both maps and all of these rows, and writes each map's row maximum,
row sum and unnormalised output to one fp32 buffer. A second kernel combines the splits and subtracts. The number of
splits depends on the size of the cache alone, and lengths are read on the device, so that a captured CUDA graph stays
valid as the cache fills. Tile sizes are derived from bytes in flight and shared memory, the number of splits from the
programs that run at once; docs/performance.md says what an H200 measured.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from diff_transformer.ops.arguments import active_transform
from diff_transformer.ops.call import SCHEMA, Call
from diff_transformer.ops.triton.decode_kernels import ROWS, decode_combine_kernel, decode_split_kernel
from diff_transformer.ops.triton.launching import INTERPRETED, Launch, inputs_of, launched, strides
from diff_transformer.ops.triton.tile_sizes import chunks
from diff_transformer.ops.triton.tiles import LOG2_E

MAX_QUERIES = 8
MAX_SPLITS = 128  # the combining kernel holds all of them at once
MIN_KEYS_PER_SPLIT = 64  # below, the second kernel costs more than the first one gains
FULL_WAVE = 0.9  # an H200 read at 77 to 81 % of a copy's speed with 0.73 of its places taken, at 93 % or more above 0.9
COLUMNS = 64  # of the output, in a program of the combining kernel
STAGE_BYTES = 32 * 1024  # of one tile of K1, K2 and V; three of them let two programs share a Hopper multiprocessor


class DecodeTile(NamedTuple):
    """Keys in a step of ``decode_split_kernel``, and the compiler's options."""

    keys: int
    num_warps: int
    num_stages: int = 3
    maxnreg: int | None = None  # without it ptxas, with 8 warps, spills rather than use more than half the registers


def tile(D: int, Dv: int, element_size: int, mask_rows: bool) -> DecodeTile:
    """The tile for these widths and bytes an element: the most keys that compile without spills.

    A mask that differs between rows (mask_rows) needs registers for a pointer and a flag of each value. So do rows
    whose width is no multiple of 16, which are read value by value. Then 8 warps share the tile.
    """
    if element_size == 4:  # fp32 products without tensor cores hold whole rows and columns of both factors
        return DecodeTile(16, 8, maxnreg=255)
    keys = STAGE_BYTES // ((2 * sum(chunks(D)) + sum(chunks(Dv))) * element_size)
    keys = max(16, min(64, 1 << (keys.bit_length() - 1)))
    return DecodeTile(keys, 8, maxnreg=255) if mask_rows or D % 16 or Dv % 16 else DecodeTile(keys, 4)


@lru_cache(1024)
def split_count(S: int, programs: int, multiprocessors: int) -> int:
    """The number of splits of S keys for ``programs`` key/value heads: the fewest that leave few places idle.

    Two programs run on a multiprocessor at once. Programs beyond that wait for the next wave; a last wave that takes
    few places leaves the others idle while it runs.
    """
    places = 2 * multiprocessors
    most = max(1, min(MAX_SPLITS, S // MIN_KEYS_PER_SPLIT))
    counts = range(min(most, max(1, places // programs)), most + 1)
    taken = {n: programs * n / (-(-programs * n // places) * places) for n in counts}  # shares of the waves' places
    return next((n for n, share in taken.items() if share >= FULL_WAVE), max(taken, key=taken.__getitem__))


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def takes(call: Call) -> bool:
    """True if ``attend_decode`` supports a call that the backend supports: at most ``MAX_QUERIES``, no gradients, no
    additive mask, rows contiguous. Triton's interpreter would multiply the bit patterns of bfloat16."""
    q1, mask = call.q1, call.attn_mask
    strided = [x for x in call[:5] if x is not None and x.stride(3) != 1 and x.shape[3] > 1]
    return (
        not strided
        and q1.shape[2] <= MAX_QUERIES
        and not call.gradients
        and active_transform() is None
        and not (INTERPRETED and q1.dtype == torch.bfloat16)
        and (mask is None or mask.dtype == torch.bool)
    )


@torch.library.custom_op(
    "diff_transformer::triton_decode", mutates_args=(), schema=f"({SCHEMA}, Tensor? lengths) -> Tensor"
)
def attend_decode(*arguments: Any) -> Tensor:
    """(first softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of supported arguments, without gradients.

    lengths: integers [B] on the same device, or None. Keys from lengths[b] on are not read, and the last query of batch
    entry b is aligned to key lengths[b] - 1. Values outside 0 to S count as 0 and S. There are no packed documents.
    Returns [B, H, T, Dv], contiguous.
    """
    call, lengths = Call(*arguments[:-1]), arguments[-1]
    return launched(*plan_decode(call, lengths, multiprocessors(call.q1.device)))[0]


@attend_decode.register_fake
def _(q1, q2, k1, k2, v, *_):
    return v.new_empty(q1.shape[0], q1.shape[1], q1.shape[2], v.shape[3])


def plan_decode(call: Call, lengths: Tensor | None, multiprocessors: int) -> tuple[tuple[Tensor], list[Launch]]:
    """The result of ``attend_decode`` on a GPU with so many multiprocessors, not yet computed, and what computes it."""
    inputs, attn_mask, window = inputs_of(call), call.attn_mask, call.window
    q1, q2, k1, _, v, lam, first = inputs
    B, H, T, D = q1.shape
    G, S, Dv = k1.shape[1], k1.shape[2], v.shape[3]
    rows = B * H * T
    mask_rows = attn_mask is not None and (attn_mask.shape[1] > 1 or attn_mask.shape[2] > 1)
    cut = tile(D, Dv, q1.element_size(), mask_rows)
    programs = B * G * -(-(T * H // G) // ROWS.value)  # triton.cdiv takes microseconds of the host
    splits = split_count(S, programs, multiprocessors)
    out = torch.empty(B, H, T, Dv, dtype=v.dtype, device=v.device)
    partial = torch.empty(splits * 2 * rows * (Dv + 2) if splits > 1 else 0, dtype=torch.float32, device=v.device)
    mask = None if attn_mask is None else attn_mask.expand(B, H, T, S)
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    DA, DB = chunks(D)
    VA, VB = chunks(Dv)
    arguments = {
        "inputs": inputs, "mask": mask,
        "lengths": None if lengths is None else lengths.to(torch.int32).contiguous(), "out": out, "partial": partial,
        "factor": call.scale * LOG2_E.value, "T": T, "S": S, "window": window or 0, "heads": (H, q2.shape[1], G),
        "all_rows": rows, "input_strides": strides(*inputs), "mask_strides": mask_strides[:3],
        "mask_step": mask_strides[3], "D": D, "DV": Dv, "DA": DA, "DB": DB, "VA": VA, "VB": VB, "BLOCK_N": cut.keys,
        "SHARED_KEYS": call.k2 is None,
        "CAUSAL": call.is_causal and T > 1, "WINDOW": window is not None, "MASKED": mask is not None,
        "MASK_ROWS": mask_rows, "RAGGED": lengths is not None, "SINGLE_SPLIT": splits == 1,
        "WEIGHTED": call.first is not None, "num_warps": cut.num_warps,
        "num_stages": cut.num_stages, "maxnreg": cut.maxnreg,
    }  # fmt: skip
    launches = [Launch(decode_split_kernel, (programs, splits), arguments)]
    if splits > 1:
        columns = min(COLUMNS, triton.next_power_of_2(Dv))
        arguments = {
            "partial": partial, "lam_at": lam, "first_at": first, "out": out, "splits": splits, "all_rows": rows,
            "H": H, "T": T, "lam_strides": strides(lam)[0], "first_strides": strides(first)[0], "DV": Dv,
            "COLUMNS": columns, "SPLITS_PAD": triton.next_power_of_2(splits), "WEIGHTED": call.first is not None,
            "num_warps": 4,
        }  # fmt: skip
        launches.append(Launch(decode_combine_kernel, (rows, -(-Dv // columns)), arguments))
    return (out,), launches
