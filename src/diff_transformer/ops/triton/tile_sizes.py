"""Tile sizes, by the kernel, the chip, the widths and what a call needs.

Hopper's at the paper's widths were timed (``HOPPER_TIMED``); none of the others. Causal calls at the main widths spill
no registers otherwise, but for some in fp32. There are too many kinds of calls to compile all:
tests/ops/triton/test_compiled_attention.py compiles each feature alone, and the heaviest combinations of features that
take registers (window, documents, mask, shared heads, shared keys). Some of them spill, but none uses a spilled
register in a loop of products; none serialises wgmma, and all fit the shared memory of their chips.

Registers are the limit. A thread has 255; the fp32 accumulators of 128 rows x 256 columns with 8 warps take 128 of
them. Hopper multiplies 64 rows with 4 warps (wgmma), other chips 16 rows and 8 columns with each warp (mma.sync). There
the warps share a tile's rows, or its columns if it has more of those: then a gradient of 32 keys keeps all its
accumulators in registers with 8 warps (see ``accumulate``), and no scores are computed twice. Smaller tiles read more
shared memory for a product, and fewer stages hide less of the loading. Gradients that do not fit into one launch cost
recomputing the maps: 16 products instead of 14 if dK and dV are computed in two launches, 18 if dQ1 and dQ2 are as
well.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.triton.launching import INTERPRETED


class TileSize(NamedTuple):
    """Queries and keys of a tile, and the compiler's options."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    fused: bool = True  # both maps, or all gradients, in one loop; otherwise one after the other

    def options(self) -> dict[str, int]:
        """Options of a launch; ``fused`` is read by the launcher."""
        return {name: value for name, value in self._asdict().items() if name != "fused"}


C = TileSize
NARROW_KEYS = C(16, 64, 4, 1, False)  # with 8 warps, several would compute the same part of the keys' gradient

# Tables: by kernel and by the largest widths (D, Dv) that an entry is for. An entry has a configuration for plain
# calls, one for calls with a window, documents, shared heads or a mask, and one for masks that differ between queries,
# of the forward for any mask and for a negative scale; where it is shorter, the last one serves the rest.
Table = dict[str, dict[tuple[int, int], tuple[TileSize, ...]]]

MMA_SYNC: Table = {  # with at least 163 KiB of shared memory
    "forward": {
        (32, 64): (C(128, 32, 8, 3),),
        (64, 64): (C(128, 32, 8, 3),),
        (64, 128): (C(128, 32, 8, 2), C(128, 32, 8, 2), C(128, 32, 8, 2, False)),
        (96, 192): (C(128, 16, 8, 3, False),),
        (128, 128): (C(128, 32, 8, 2, False),),
        (128, 256): (C(128, 16, 8, 2, False),),
    },
    "dkdv": {
        (48, 96): (C(16, 64, 4, 2),),
        (48, 192): (NARROW_KEYS,),
        (48, 256): (NARROW_KEYS, NARROW_KEYS._replace(num_warps=8)),
        (64, 128): (C(64, 32, 8, 2), C(64, 32, 8, 2), C(64, 32, 8, 1)),
        (96, 192): (C(32, 32, 4, 2),),
        (128, 256): (C(64, 32, 8, 2),),
    },
    "dq": {
        (48, 256): (C(64, 32, 4, 2),),
        (64, 128): (C(128, 32, 8, 2),),
        (96, 192): (C(32, 64, 4, 2),),
        (128, 128): (C(32, 64, 8, 2),),
        (128, 256): (C(64, 64, 8, 1), C(32, 64, 8, 2)),
    },
}
MMA_SYNC_SMALL: Table = MMA_SYNC | {  # with 99 KiB
    "forward": MMA_SYNC["forward"] | {(128, 128): (C(128, 16, 8, 2, False),), (128, 256): (C(128, 16, 8, 1, False),)},
    "dkdv": MMA_SYNC["dkdv"] | {(128, 256): (C(64, 32, 8, 1),)},
    "dq": MMA_SYNC["dq"] | {(128, 256): (C(32, 64, 8, 1), C(32, 64, 8, 1, False), C(32, 64, 8, 2, False))},
}
BLACKWELL_SMALL: Table = MMA_SYNC_SMALL | {  # sm_120, whose compiler takes more registers
    "forward": MMA_SYNC_SMALL["forward"]
    | {
        (64, 128): (C(128, 32, 8, 2, False),),
        (96, 192): (C(128, 16, 8, 2, False), C(128, 16, 8, 2, False), C(128, 16, 8, 1, False)),
    },
    "dkdv": MMA_SYNC_SMALL["dkdv"]
    | {
        (96, 192): (C(32, 32, 4, 2), C(32, 32, 4, 2, False)),
        (128, 256): (C(64, 32, 8, 1), C(64, 32, 8, 1), C(64, 32, 8, 1, False)),
    },
    "dq": MMA_SYNC_SMALL["dq"]
    | {(64, 128): (C(128, 32, 8, 2), C(32, 64, 4, 2)), (96, 192): (C(32, 64, 4, 2), C(32, 64, 4, 2, False))},
}
BLACKWELL: Table = MMA_SYNC | {  # sm_100: tcgen05.mma where a tile has 64 rows or more and its registers suffice
    "forward": {
        (64, 128): (C(128, 64, 8, 2, False), C(128, 32, 8, 2, False)),
        (96, 192): (C(128, 32, 8, 2, False),),
        (128, 128): (C(128, 32, 8, 2, False),),
        (128, 256): (C(128, 64, 8, 1, False),),
    },
    "dkdv": MMA_SYNC["dkdv"]
    | {
        (64, 128): (C(32, 128, 8, 2), C(64, 32, 8, 2)),
        (96, 192): (C(32, 32, 4, 2), C(32, 32, 4, 2, False)),
        (128, 256): (C(64, 32, 8, 2), C(64, 32, 8, 1), C(64, 32, 8, 2, False)),
    },
    "dq": {
        (48, 96): (C(64, 32, 4, 2),),
        (48, 256): (C(64, 32, 4, 2), C(64, 32, 4, 1)),
        (64, 128): (C(128, 64, 8, 2), C(32, 64, 4, 2)),
        (96, 192): (C(128, 32, 8, 2), C(128, 32, 8, 1)),
        (128, 256): (C(128, 64, 8, 1), C(32, 64, 8, 2)),
    },
}
HOPPER: Table = {
    "forward": {
        (31, 63): (C(128, 64, 8, 3), C(128, 64, 8, 3), C(128, 32, 8, 3)),
        (32, 64): (C(128, 64, 8, 3),),
        (64, 128): (C(128, 32, 8, 3),),
        (96, 192): (C(128, 64, 8, 2, False), C(128, 64, 8, 2, False), C(128, 32, 8, 2, False)),
        (128, 256): (C(128, 32, 8, 2, False),),
    },
    "dkdv": {
        (32, 64): (C(32, 128, 8, 2, False), C(32, 128, 8, 2, False), C(32, 128, 8, 1, False)),
        (63, 127): (C(32, 128, 8, 2, False), C(32, 128, 8, 2, False), C(16, 128, 8, 1, False)),
        (64, 128): (C(32, 128, 8, 2, False), C(32, 128, 8, 2, False), C(32, 128, 8, 1, False)),
        (128, 256): (C(16, 128, 8, 1, False),),
    },
    "dq": {
        (32, 64): (C(128, 32, 8, 2), C(128, 32, 8, 2), C(128, 64, 8, 1)),
        (63, 127): (C(128, 32, 8, 2),),  # such as (40, 80), two chunks each
        (64, 128): (C(128, 64, 8, 2), C(128, 64, 8, 2), C(128, 32, 8, 1)),
        (96, 192): (C(128, 64, 8, 1, False), C(128, 64, 8, 1, False), C(128, 32, 8, 1, False)),
        (128, 256): (C(128, 64, 8, 1, False),),
    },
}
# For these widths exactly, where a mask does not need an entry of its own: the fastest on an H200 of those in
# benchmarks/results/sweep_gpu.json. Some spill up to 224 bytes a thread, in loops as well, and win all the same.
HOPPER_TIMED: Table = {
    "forward": {
        (64, 128): (C(64, 64, 4, 3),),
        (96, 192): (C(128, 64, 8, 3, False),),
        (128, 256): (C(128, 64, 8, 3, False),),
    },
    "dkdv": {
        (64, 128): (C(32, 64, 4, 2),),
        (96, 192): (C(32, 64, 4, 2, False),),
        (128, 256): (C(32, 128, 8, 3, False),),
    },
    "dq": {
        (64, 128): (C(64, 64, 4, 2),),
        (96, 192): (C(64, 32, 4, 2),),
        (128, 256): (C(128, 64, 8, 2, False),),
    },
}
# fp32 products use no tensor cores, for exactness; some of these spill a few registers.
FP32: Table = {
    "forward": {(64, 128): (C(32, 32, 8, 1, False),), (128, 256): (C(16, 16, 8, 1, False),)},
    **{kernel: {(128, 256): (C(16, 16, 8, 1, False),)} for kernel in ("dkdv", "dq")},
}
INTERPRETER: Table = {
    kernel: {(64, 256): (C(32, 32, 4, 1),), (128, 256): (C(32, 32, 4, 1, False),)} for kernel in HOPPER
}
LARGE_SHARED = 163 * 1024  # bytes


def tile_size(kernel: str, call: Call, mask_by_query: bool, table: Table) -> TileSize:
    """The tile of "forward", "dkdv" or "dq"; mask_by_query: ``attn_mask`` differs between queries."""
    D, Dv = call.q1.shape[3], call.v.shape[3]
    entry = next(entry for (width, value), entry in table[kernel].items() if width >= D and Dv <= value)
    shared_heads = call.q1.shape[1] != call.k1.shape[1]
    asked = (call.window, call.documents, call.attn_mask)
    features = shared_heads or any(feature is not None for feature in asked)
    masked = mask_by_query or (kernel == "forward" and (call.attn_mask is not None or call.scale < 0))
    if table is HOPPER and not masked and (D, Dv) in HOPPER_TIMED[kernel]:
        return HOPPER_TIMED[kernel][D, Dv][0]
    return entry[min(2 if masked else int(features), len(entry) - 1)]


def table_of(x: Tensor) -> Table:
    """The table for the device and dtype of x."""
    if INTERPRETED and x.device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(x.device)
    return table_for((properties.major, properties.minor), properties.shared_memory_per_block_optin, x.dtype)


def table_for(capability: tuple[int, int], shared_bytes: int, dtype: torch.dtype) -> Table:
    """The table for a compute capability, the shared memory that a program may use, and a dtype."""
    if dtype == torch.float32:
        return FP32
    if capability[0] == 9:
        return HOPPER
    if capability[0] == 10:
        return BLACKWELL
    if shared_bytes >= LARGE_SHARED:
        return MMA_SYNC
    return BLACKWELL_SMALL if capability[0] == 12 else MMA_SYNC_SMALL


def split(size: TileSize, *flags: str) -> list[dict[str, bool]]:
    """Constants of each launch: all gradients named by ``flags`` at once, or one launch for each."""
    if size.fused:
        return [dict.fromkeys(flags, True)]
    return [{flag: flag == computed for flag in flags} for computed in flags]


def value_chunks(Dv: int) -> tuple[int, int]:
    """``chunks``, but two for the wide forward: it finishes chunk by chunk, which takes fewer registers."""
    a, b = chunks(Dv)
    return (a, b) if b or a < 256 else (a // 2, a // 2)


def chunks(width: int) -> tuple[int, int]:
    """Sizes of one or two chunks, powers of two >= 16, that cover ``width``; the second is 0 if one is enough."""
    power = max(16, 1 << (width - 1).bit_length())  # the least power of two that covers it
    if power in (width, 16):
        return power, 0
    half = power // 2
    rest = max(16, 1 << (width - half - 1).bit_length())
    return (power, 0) if rest >= half else (half, rest)
