"""Launch the forward kernels: TMA descriptors, memory for the results, and the configuration of each width."""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diff_transformer.ops.gluon.fwd_fused import fwd_fused
from diff_transformer.ops.gluon.fwd_sequential import fwd_sequential
from diff_transformer.ops.gluon.support import unsupported_shapes
from diff_transformer.ops.triton.call import Call
from diff_transformer.ops.triton.launching import launch

ROWS = 64  # query rows of one computing warpgroup: the height of a wgmma tile
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Configuration:
    """How one width is computed. Compiles without spills; uses at most 208 of the chip's 227 KiB of shared memory."""

    kernel: Any
    keys: int  # keys in a tile
    stages: int  # slots of the ring
    one_key: bool = False  # whether the kernel has a faster form for k2 = k1
    parts: int = 1  # powers of two that make up a width

    def constants(self, D: int, Dv: int, is_causal: bool, save: bool, one_key: bool) -> dict[str, Any]:
        """Constants of the kernel; ``one_key``: k2 is k1."""
        own = {"ONE_KEY": one_key} if self.one_key else {"PARTS": self.parts}
        return {"ROWS": ROWS, "BN": self.keys, "D": D, "DV": Dv, "STAGES": self.stages, "CAUSAL": is_causal,
                "SAVE": save, **own}  # fmt: skip


CONFIGURATIONS = {  # by D
    64: Configuration(fwd_fused, keys=64, stages=4, one_key=True),
    96: Configuration(fwd_sequential, keys=64, stages=4, parts=3),
    128: Configuration(fwd_sequential, keys=64, stages=3),
}
# A program starts its 12 warps with 168 registers a thread; then the 8 consumer warps take 240, the other 4 keep 24.
OPTIONS = {"num_warps": 4, "maxnreg": 168}


@cache
def layout(rows: int, width: int, dtype: torch.dtype):
    """Shared-memory layout of a [1, 1, rows, width] tile, swizzled as wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[dtype])


def descriptor(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """TMA descriptor of x [B, heads, length, width] in tiles of rows x columns (None: the width), zero outside.

    All dimensions but the last may lie in any order in memory.
    """
    # TMA wants a multiple of 16 bytes even as the stride of a dimension of size 1, which is never used.
    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    columns = x.shape[3] if columns is None else columns
    block = [1, 1, rows, columns]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout(rows, columns, x.dtype))


def attend_forward(call: Call, need_gradient: bool) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any]:
    """Differential attention on a Hopper GPU: ((out, out2, lse1, lse2), the compiled kernel).

    Args:
        call: bfloat16 or float16; D is 64, 96 or 128, and Dv is 2 D; no mask, window or documents. Any scale.
        need_gradient: whether the backward needs out2, lse1 and lse2; otherwise they are empty.

    Returns:
        out [B, H, T, 2 D] and out2 = softmax(q2 k2^T scale) v, both in the dtype of v and in memory [B, T, H, 2 D];
        lse1 and lse2 [B, H, T], float32, in base 2: log2(sum(exp2(scores scale log2 e))). A fully masked row has out 0
        and lse +inf.

    Raises:
        ValueError: tensors that the kernels do not take.
    """
    reason = unsupported_shapes(call)
    if reason is not None:
        raise ValueError(reason)
    q1, q2, k1, k2, v, lam, scale = call.q1, call.q2, call.k1, call.k2, call.v, call.lam, call.scale
    B, H, T, D = q1.shape
    S, Dv = v.shape[2:]
    if scale < 0:  # the kernels take the row maximum before they scale the scores
        q1, q2 = -q1, -q2
    base2 = max(abs(scale) * math.log2(math.e), 1e-30)  # not 0: 0 times the -inf of hidden keys would be NaN
    out = v.new_empty(B, T, H, Dv)
    out2 = v.new_empty(B, T, H, Dv) if need_gradient else out  # fwd_sequential writes O2 to memory in any case
    lse1, lse2 = (torch.empty((B, H, T) if need_gradient else 0, dtype=torch.float32, device=v.device) for _ in "12")
    configuration = CONFIGURATIONS[D]
    constants = configuration.constants(D, Dv, call.is_causal, need_gradient, k2 is None)
    queries, keys = (partial(descriptor, rows=rows, columns=D // configuration.parts)
                     for rows in (ROWS, configuration.keys))  # fmt: skip
    first_keys = keys(k1)
    second_keys = first_keys if k2 is None else keys(k2)
    values = descriptor(v, configuration.keys, Dv // configuration.parts)
    arguments = [
        queries(q1), queries(q2), first_keys, second_keys, values, out, out2, lse1, lse2, lam, *lam.stride()[:3],
        T, S, H, H // q2.shape[1], H // v.shape[1], base2,
    ]  # fmt: skip
    compiled = launch(configuration.kernel, (math.ceil(T / (2 * ROWS)) * B * H,), arguments, constants | OPTIONS)
    out2 = out2.transpose(1, 2) if need_gradient else v.new_empty(0)
    return (out.transpose(1, 2), out2, lse1, lse2), compiled
