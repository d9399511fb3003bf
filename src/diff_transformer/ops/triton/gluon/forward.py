"""Launches the forward kernels: tensors to descriptors, memory for the results, the configuration of each width."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diff_transformer.ops.triton.gluon.in_turn import forward_in_turn
from diff_transformer.ops.triton.gluon.together import forward_together

ROWS = 64  # query rows of one computing warpgroup: the height of a wgmma tile
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Configuration:
    """How one width is computed. Compiled without spills, at most 208 KiB of shared memory of the chip's 227."""

    kernel: Any
    keys: int  # keys a tile
    stages: int  # tiles the ring holds
    one_key: bool = False  # whether the kernel gains by knowing that k2 is k1
    parts: int = 1  # of which a width is made up, each a power of two

    def constants(self, D: int, Dv: int, is_causal: bool, save: bool, one_key: bool) -> dict[str, Any]:
        """What the kernel is compiled for; ``one_key``: k2 is k1."""
        own = {"ONE_KEY": one_key} if self.one_key else {"PARTS": self.parts}
        return {"ROWS": ROWS, "BN": self.keys, "D": D, "DV": Dv, "STAGES": self.stages, "CAUSAL": is_causal,
                "SAVE": save, **own}  # fmt: skip


CONFIGURATIONS = {  # by D
    64: Configuration(forward_together, keys=64, stages=4, one_key=True),
    96: Configuration(forward_in_turn, keys=64, stages=4, parts=3),
    128: Configuration(forward_in_turn, keys=64, stages=3),
}
# The 12 warps of a program start with 168 registers a thread; then 8 that compute take 240 and 4 that load keep 24.
OPTIONS = {"num_warps": 4, "maxnreg": 168}


@cache
def layout(rows: int, width: int, dtype: torch.dtype):
    """Shared memory of a [1, 1, rows, width] tile, swizzled as wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[dtype])


def descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """How TMA sees x [B, heads, length, width]: in tiles of rows x columns (None: the width), zero outside.

    The dimensions but the last may lie in any order.
    """
    # The stride of a dimension of size 1 means nothing, but TMA wants a multiple of 16 bytes there too.
    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    columns = x.shape[3] if columns is None else columns
    block = [1, 1, rows, columns]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout(rows, columns, x.dtype))


def launch(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor,
    is_causal: bool, scale: float, need_gradient: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any]:  # fmt: skip
    """Both results of ``attend_forward`` and the compiled kernel; no checks."""
    B, H, T, D = q1.shape
    S, Dv = v.shape[2:]
    if scale < 0:  # the kernels take the maximum of the scores before they scale them
        q1, q2 = -q1, -q2
    base2 = max(abs(scale) * math.log2(math.e), 1e-30)  # not 0, which times the -inf of hidden keys would be NaN
    out = v.new_empty(B, T, H, Dv)
    save = v.new_empty(B, T, H, Dv) if need_gradient else out  # without gradients the second map is parked in out
    lse1, lse2 = (torch.empty((B, H, T) if need_gradient else 0, dtype=torch.float32, device=v.device) for _ in "12")
    configuration = CONFIGURATIONS[D]
    constants = configuration.constants(D, Dv, is_causal, need_gradient, k2 is None)
    queries, keys = (partial(descriptor, rows=rows, columns=D // configuration.parts)
                     for rows in (ROWS, configuration.keys))  # fmt: skip
    first_keys = keys(k1)
    second_keys = first_keys if k2 is None else keys(k2)
    values = descriptor(v, configuration.keys, Dv // configuration.parts)
    with torch.cuda.device_of(v):
        compiled = configuration.kernel[(math.ceil(T / (2 * ROWS)) * B * H,)](
            queries(q1), queries(q2), first_keys, second_keys, values,
            out, save, lse1, lse2, lam, *lam.stride()[:3],
            T, S, H, H // q2.shape[1], H // v.shape[1], base2, **constants, **OPTIONS,
        )  # fmt: skip
    out2 = save.transpose(1, 2) if need_gradient else v.new_empty(0)
    return (out.transpose(1, 2), out2, lse1, lse2), compiled
