"""Tile sizes, by widths, dtype, compute capability and direction.

None of these was timed. They are the largest tiles found that ptxas compiles without spilling registers or serialising
wgmma, and that fit the shared memory of their GPUs (99 KiB, except on Hopper). There are too many kinds of calls to
compile all: tests/ops/triton/test_compiled_attention.py compiles each feature alone, and the heaviest combinations of
features that take registers (window, documents, mask, shared heads, shared keys, one pass).

Registers are the limit. A thread has 255; the fp32 accumulators of 128 rows x 256 columns with 8 warps take 128 of
them. Hopper multiplies 64 rows with 4 warps, Ampere 16 rows with each warp. Smaller tiles read more shared memory for a
product, and fewer stages hide less of the loading. Gradients that do not fit into one launch cost recomputing the maps:
16 products instead of 14 if dK and dV are computed in two launches, 18 if dQ1 and dQ2 are as well.
"""

from typing import Any, NamedTuple

import torch

from diff_transformer.ops.triton.launching import INTERPRETED


class Configuration(NamedTuple):
    """Queries and keys of a tile, and the compiler's options."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    fused: bool = True  # both maps, or all gradients, in one loop; otherwise one after the other

    def options(self) -> dict[str, int]:
        """Options of a launch; ``fused`` is read by the launcher."""
        return {name: value for name, value in self._asdict().items() if name != "fused"}


class Backward(NamedTuple):
    """Configurations of the backward kernels."""

    dkdv: Configuration
    dq: Configuration
    one_pass: Configuration  # of bwd_dkdv_kernel, if it adds to dQ as well


DELTA_ROWS = 32  # rows in a program of delta_kernel
IN_INTERPRETER = Configuration(32, 32, 4, 1)

# Keys of the tables: the largest widths (D, Dv) that an entry is for.
HOPPER_FORWARD = {
    (32, 64): Configuration(128, 64, 8, 3),
    (64, 128): Configuration(128, 32, 8, 3),
    (96, 192): Configuration(128, 64, 8, 2, fused=False),
    (128, 256): Configuration(128, 32, 8, 2, fused=False),
}
HOPPER_BACKWARD = {
    (63, 127): Backward(  # such as (40, 80), two chunks each
        dkdv=Configuration(32, 128, 8, 2, fused=False),
        dq=Configuration(128, 32, 8, 2),
        one_pass=Configuration(32, 128, 8, 2, fused=False),
    ),
    (64, 128): Backward(
        dkdv=Configuration(32, 128, 8, 2, fused=False),
        dq=Configuration(128, 64, 8, 2),
        one_pass=Configuration(32, 128, 8, 2, fused=False),
    ),
    (128, 256): Backward(
        dkdv=Configuration(16, 128, 8, 1, fused=False),
        dq=Configuration(128, 64, 8, 1, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
}
# A mask that differs between queries takes registers too, above all with a window: the tiles above would serialise
# wgmma or spill.
HOPPER_FORWARD_MASKED = {
    (31, 63): Configuration(128, 32, 8, 3),
    **HOPPER_FORWARD,
    (96, 192): Configuration(128, 32, 8, 2, fused=False),
}
_MASKED_KEYS = HOPPER_BACKWARD[63, 127]._replace(dkdv=Configuration(32, 128, 8, 1, fused=False))
_MASKED_WIDE = HOPPER_BACKWARD[128, 256]._replace(one_pass=Configuration(16, 32, 4, 2, fused=False))
HOPPER_BACKWARD_MASKED = {
    (32, 64): _MASKED_KEYS._replace(dq=Configuration(128, 64, 8, 1)),
    (63, 127): _MASKED_KEYS._replace(dkdv=Configuration(16, 128, 8, 1, fused=False)),
    (64, 128): HOPPER_BACKWARD[64, 128]._replace(
        dkdv=Configuration(32, 128, 8, 1, fused=False),
        dq=Configuration(128, 32, 8, 1),
        one_pass=Configuration(16, 128, 8, 1, fused=False),
    ),
    (96, 192): _MASKED_WIDE._replace(dq=Configuration(128, 32, 8, 1, fused=False)),
    (128, 256): _MASKED_WIDE,
}
AMPERE_FORWARD = {
    (32, 64): Configuration(64, 32, 4, 3),
    (64, 128): Configuration(64, 32, 4, 2, fused=False),
    (96, 192): Configuration(64, 16, 4, 2, fused=False),
    (128, 256): Configuration(64, 32, 8, 2, fused=False),
}
AMPERE_BACKWARD = {
    (64, 64): Backward(
        dkdv=Configuration(16, 32, 8, 1, fused=False),
        dq=Configuration(64, 32, 4, 2, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
    (64, 128): Backward(
        dkdv=Configuration(16, 32, 8, 1, fused=False),
        dq=Configuration(64, 32, 4, 1, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
    (96, 192): Backward(
        dkdv=Configuration(16, 32, 8, 1, fused=False),
        dq=Configuration(64, 16, 4, 1, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
    (128, 256): Backward(
        dkdv=Configuration(16, 32, 4, 1, fused=False),
        dq=Configuration(64, 16, 8, 1, fused=False),
        one_pass=Configuration(16, 32, 4, 2, fused=False),
    ),
}
AMPERE_BACKWARD_MASKED = {
    (31, 63): AMPERE_BACKWARD[64, 128],
    (32, 64): AMPERE_BACKWARD[64, 128]._replace(dkdv=Configuration(32, 32, 4, 1, fused=False)),
    (64, 64): AMPERE_BACKWARD[64, 128]._replace(dq=Configuration(64, 32, 8, 1, fused=False)),
    (64, 128): AMPERE_BACKWARD[64, 128],
    (96, 192): AMPERE_BACKWARD[96, 192]._replace(
        dkdv=Configuration(16, 16, 4, 1, fused=False), dq=Configuration(64, 16, 8, 1, fused=False)
    ),
    (128, 128): AMPERE_BACKWARD[128, 256]._replace(dq=Configuration(64, 16, 4, 2, fused=False)),
    (128, 256): AMPERE_BACKWARD[128, 256],
}
# fp32 products use no tensor cores, for exactness; some of these spill a few registers.
FP32_FORWARD = {
    (64, 128): Configuration(32, 32, 8, 1, fused=False),
    (128, 256): Configuration(16, 16, 8, 1, fused=False),
}
FP32_BACKWARD = {
    (128, 256): Backward(*[Configuration(16, 16, 8, 1, fused=False)] * 3),
}


def forward_configuration(
    D: int, Dv: int, dtype: torch.dtype, device: torch.device, mask_by_query: bool
) -> Configuration:
    """Configuration of ``forward_kernel``; ``fused``: both maps in one loop."""
    if INTERPRETED and device.type == "cpu":
        return IN_INTERPRETER._replace(fused=D <= 64)
    if dtype == torch.float32:
        return at_least(D, Dv, FP32_FORWARD)
    if is_hopper(device):
        return at_least(D, Dv, HOPPER_FORWARD_MASKED if mask_by_query else HOPPER_FORWARD)
    return at_least(D, Dv, AMPERE_FORWARD)


def backward_configuration(D: int, Dv: int, dtype: torch.dtype, device: torch.device, mask_by_query: bool) -> Backward:
    """Configurations of the kernels in backward.py; ``fused``: all gradients of a kernel in one launch."""
    if INTERPRETED and device.type == "cpu":
        return Backward(*[IN_INTERPRETER._replace(fused=D <= 64)] * 3)
    if dtype == torch.float32:
        return at_least(D, Dv, FP32_BACKWARD)
    if is_hopper(device):
        return at_least(D, Dv, HOPPER_BACKWARD_MASKED if mask_by_query else HOPPER_BACKWARD)
    return at_least(D, Dv, AMPERE_BACKWARD_MASKED if mask_by_query else AMPERE_BACKWARD)


def is_hopper(device: torch.device) -> bool:
    """Whether the GPU has wgmma and 227 KiB of shared memory. Ampere's tiles fit every GPU."""
    return torch.cuda.get_device_capability(device)[0] == 9


def at_least(D: int, Dv: int, table: dict[tuple[int, int], Any]) -> Any:
    """The first entry of the table whose widths are at least D and Dv."""
    return next(entry for (width, value_width), entry in table.items() if width >= D and Dv <= value_width)


def split(configuration: Configuration, *flags: str) -> list[dict[str, bool]]:
    """Constants of each launch: all gradients named by ``flags`` at once, or one launch for each."""
    if configuration.fused:
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
