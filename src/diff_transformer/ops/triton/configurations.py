"""Tile sizes, by widths, dtype, compute capability and direction.

None of these was timed. They are the largest found that ptxas compiles without spilling a register or serialising
wgmma, within the shared memory of the GPUs they are for (99 KiB, for all but Hopper). Not every call is compiled, for
there are thousands: tests/ops/triton/test_compiled_attention.py compiles each feature alone, and of those that take
registers (a window, documents, a mask, shared heads, shared keys, one pass) the heaviest combinations. What decides is
registers: a thread has 255, and 128 of them hold the fp32 accumulators of, for example, 128 rows of 256 columns with 8
warps. Hopper multiplies 64 rows with 4 warps, Ampere 16 with each. Smaller tiles on the other side read more shared
memory for a product, fewer stages hide less of the loading, and gradients that do not fit together cost another
computation of the maps: 16 products instead of 14 where the programs that own keys are split, 18 where those that own
queries are as well.
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
    fused: bool = True  # both maps, or all gradients, in one loop; else one after the other

    def options(self) -> dict[str, int]:
        """For a launch; ``fused`` is for the launcher."""
        return {name: value for name, value in self._asdict().items() if name != "fused"}


class Backward(NamedTuple):
    """Of the programs that own keys, of those that own queries, and of those that do both in one pass."""

    keys: Configuration
    queries: Configuration
    one_pass: Configuration


DELTA_ROWS = 32  # of a program that sums up rows of dO * O
IN_INTERPRETER = Configuration(32, 32, 4, 1)

# For widths (D, Dv) up to these.
HOPPER_FORWARD = {
    (32, 64): Configuration(128, 64, 8, 3),
    (64, 128): Configuration(128, 32, 8, 3),
    (96, 192): Configuration(128, 64, 8, 2, fused=False),
    (128, 256): Configuration(128, 32, 8, 2, fused=False),
}
HOPPER_BACKWARD = {
    (63, 127): Backward(  # such as 40 and 80, of two chunks each
        keys=Configuration(32, 128, 8, 2, fused=False),
        queries=Configuration(128, 32, 8, 2),
        one_pass=Configuration(32, 128, 8, 2, fused=False),
    ),
    (64, 128): Backward(
        keys=Configuration(32, 128, 8, 2, fused=False),
        queries=Configuration(128, 64, 8, 2),
        one_pass=Configuration(32, 128, 8, 2, fused=False),
    ),
    (128, 256): Backward(
        keys=Configuration(16, 128, 8, 1, fused=False),
        queries=Configuration(128, 64, 8, 1, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
}
# A mask that differs from query to query takes registers too, above all beside a window: with the tiles above it would
# serialise wgmma or spill.
HOPPER_FORWARD_MASKED = {
    (31, 63): Configuration(128, 32, 8, 3),
    **HOPPER_FORWARD,
    (96, 192): Configuration(128, 32, 8, 2, fused=False),
}
_MASKED_KEYS = HOPPER_BACKWARD[63, 127]._replace(keys=Configuration(32, 128, 8, 1, fused=False))
_MASKED_WIDE = HOPPER_BACKWARD[128, 256]._replace(one_pass=Configuration(16, 32, 4, 2, fused=False))
HOPPER_BACKWARD_MASKED = {
    (32, 64): _MASKED_KEYS._replace(queries=Configuration(128, 64, 8, 1)),
    (63, 127): _MASKED_KEYS._replace(keys=Configuration(16, 128, 8, 1, fused=False)),
    (64, 128): HOPPER_BACKWARD[64, 128]._replace(
        keys=Configuration(32, 128, 8, 1, fused=False),
        queries=Configuration(128, 32, 8, 1),
        one_pass=Configuration(16, 128, 8, 1, fused=False),
    ),
    (96, 192): _MASKED_WIDE._replace(queries=Configuration(128, 32, 8, 1, fused=False)),
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
        keys=Configuration(16, 32, 8, 1, fused=False),
        queries=Configuration(64, 32, 4, 2, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
    (64, 128): Backward(
        keys=Configuration(16, 32, 8, 1, fused=False),
        queries=Configuration(64, 32, 4, 1, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
    (96, 192): Backward(
        keys=Configuration(16, 32, 8, 1, fused=False),
        queries=Configuration(64, 16, 4, 1, fused=False),
        one_pass=Configuration(16, 32, 8, 1, fused=False),
    ),
    (128, 256): Backward(
        keys=Configuration(16, 32, 4, 1, fused=False),
        queries=Configuration(64, 16, 8, 1, fused=False),
        one_pass=Configuration(16, 32, 4, 2, fused=False),
    ),
}
AMPERE_BACKWARD_MASKED = {
    (31, 63): AMPERE_BACKWARD[64, 128],
    (32, 64): AMPERE_BACKWARD[64, 128]._replace(keys=Configuration(32, 32, 4, 1, fused=False)),
    (64, 64): AMPERE_BACKWARD[64, 128]._replace(queries=Configuration(64, 32, 8, 1, fused=False)),
    (64, 128): AMPERE_BACKWARD[64, 128],
    (96, 192): AMPERE_BACKWARD[96, 192]._replace(
        keys=Configuration(16, 16, 4, 1, fused=False), queries=Configuration(64, 16, 8, 1, fused=False)
    ),
    (128, 128): AMPERE_BACKWARD[128, 256]._replace(queries=Configuration(64, 16, 4, 2, fused=False)),
    (128, 256): AMPERE_BACKWARD[128, 256],
}
# fp32 is multiplied without tensor cores, for exactness; some of these spill a few registers.
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
    """For ``forward_kernel``, whose ``fused`` means both maps at once."""
    if INTERPRETED and device.type == "cpu":
        return IN_INTERPRETER._replace(fused=D <= 64)
    if dtype == torch.float32:
        return at_least(D, Dv, FP32_FORWARD)
    if is_hopper(device):
        return at_least(D, Dv, HOPPER_FORWARD_MASKED if mask_by_query else HOPPER_FORWARD)
    return at_least(D, Dv, AMPERE_FORWARD)


def backward_configuration(D: int, Dv: int, dtype: torch.dtype, device: torch.device, mask_by_query: bool) -> Backward:
    """For the kernels of backward.py, whose ``fused`` means all gradients of a kernel in one launch."""
    if INTERPRETED and device.type == "cpu":
        return Backward(*[IN_INTERPRETER._replace(fused=D <= 64)] * 3)
    if dtype == torch.float32:
        return at_least(D, Dv, FP32_BACKWARD)
    if is_hopper(device):
        return at_least(D, Dv, HOPPER_BACKWARD_MASKED if mask_by_query else HOPPER_BACKWARD)
    return at_least(D, Dv, AMPERE_BACKWARD_MASKED if mask_by_query else AMPERE_BACKWARD)


def is_hopper(device: torch.device) -> bool:
    """Whether the GPU multiplies with warp groups and has 227 KiB of shared memory; Ampere's tiles fit everywhere."""
    return torch.cuda.get_device_capability(device)[0] == 9


def at_least(D: int, Dv: int, table: dict[tuple[int, int], Any]) -> Any:
    """The first entry of the table for widths that are not less."""
    return next(entry for (width, value_width), entry in table.items() if width >= D and Dv <= value_width)


def split(configuration: Configuration, *flags: str) -> list[dict[str, bool]]:
    """What each launch computes of the gradients named by ``flags``: all at once, or one after the other."""
    if configuration.fused:
        return [dict.fromkeys(flags, True)]
    return [{flag: flag == computed for flag in flags} for computed in flags]


def value_chunks(Dv: int) -> tuple[int, int]:
    """``chunks``, of which the wide forward needs two: it ends chunk by chunk, which takes fewer registers."""
    a, b = chunks(Dv)
    return (a, b) if b or a < 256 else (a // 2, a // 2)


def chunks(width: int) -> tuple[int, int]:
    """The sizes of one or two tiles, powers of two from 16 on, that cover ``width``; the second is 0 if one does."""
    power = max(16, 1 << (width - 1).bit_length())  # the least power of two that covers it
    if power in (width, 16):
        return power, 0
    half = power // 2
    rest = max(16, 1 << (width - half - 1).bit_length())
    return (power, 0) if rest >= half else (half, rest)
