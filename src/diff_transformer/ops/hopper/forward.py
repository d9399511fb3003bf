"""Launch the forward kernel: TMA descriptors, memory for the results, and the sizes of tiles and of the ring."""

import math
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diff_transformer.ops.call import Call, normalized
from diff_transformer.ops.hopper.fwd_sequential import fwd_sequential
from diff_transformer.ops.triton.launching import Launch

ROWS = 64  # query rows of one computing warpgroup: the height of a wgmma tile
KEYS = 64  # keys in a tile
STAGES = 3  # slots of the ring. Uses 208 of the chip's 227 KiB of shared memory.
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# A program starts its 12 warps with 168 registers a thread; then the 8 consumer warps take 240, the other 4 keep 24.
OPTIONS = {"num_warps": 4, "maxnreg": 168}


@cache
def layout(rows: int, width: int, dtype: torch.dtype):
    """Shared-memory layout of a [1, 1, rows, width] tile, swizzled as wgmma reads it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], DTYPES[dtype])


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of x [B, heads, length, width] in tiles of that many rows, zero outside.

    All dimensions but the last may lie in any order in memory.
    """
    # TMA wants a multiple of 16 bytes even as the stride of a dimension of size 1, which is never used.
    strides = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    block = [1, 1, rows, x.shape[3]]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout(rows, x.shape[3], x.dtype))


def plan_forward(call: Call, need_gradient: bool) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], list[Launch]]:
    """Differential attention on a Hopper GPU: (out, out1, out2, lse1, lse2), not yet computed, and what computes them.

    Args:
        call: one that ``unsupported_tensors`` accepts.
        need_gradient: whether the backward needs out1, out2, lse1 and lse2; otherwise they are empty.

    Returns:
        out [B, T, H, 2 D] in the dtype of v; out1 = softmax(q1 k1^T scale) v and out2, [B, H, T, 2 D] in the same
        memory layout; lse1 and lse2 [B, H, T], float32, in base 2: log2(sum(exp2(scores scale log2 e))). A fully masked
        row has out 0 and lse +inf.
    """
    call = normalized(call)
    q1, q2, k1, k2, v = call.q1, call.q2, call.k1, call.k2, call.v
    B, H, T, D = q1.shape
    S, Dv = v.shape[2:]
    out = v.new_empty(B, T, H, Dv)
    out1, out2 = (v.new_empty(B, T, H, Dv) if need_gradient else out for _ in "12")  # O2 goes to memory in any case
    lse1, lse2 = (torch.empty((B, H, T) if need_gradient else 0, dtype=torch.float32, device=v.device) for _ in "12")
    first_keys = descriptor(k1, KEYS)
    stride_lam_b, stride_lam_h, stride_lam_t = call.lam.stride()[:3]
    arguments = {
        "q1": descriptor(q1, ROWS), "q2": descriptor(q2, ROWS), "k1": first_keys,
        "k2": first_keys if k2 is None else descriptor(k2, KEYS), "v": descriptor(v, KEYS), "out": out,
        "out1": out1, "out2": out2, "lse1": lse1, "lse2": lse2, "lam": call.lam,
        "stride_lam_b": stride_lam_b, "stride_lam_h": stride_lam_h,
        "stride_lam_t": stride_lam_t, "T": T, "S": S, "H": H, "signal_per_noise": H // q2.shape[1],
        "signal_per_kv": H // v.shape[1], "scale": call.scale * math.log2(math.e), "ROWS": ROWS, "BN": KEYS, "D": D,
        "DV": Dv, "STAGES": STAGES, "CAUSAL": call.is_causal, "SAVE": need_gradient, **OPTIONS,
    }  # fmt: skip
    launch = Launch(fwd_sequential, (math.ceil(T / (2 * ROWS)) * B * H,), arguments)
    out1, out2 = (x.transpose(1, 2) if need_gradient else v.new_empty(0) for x in (out1, out2))
    return (out, out1, out2, lse1, lse2), [launch]
