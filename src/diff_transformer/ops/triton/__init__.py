"""Triton kernels for differential attention on CUDA.

One launch computes both maps (forward.py). In the backward one dP and one dV product serve both maps (backward.py). A
few queries over many keys are split along the keys (decode.py). On Hopper GPUs the kernels of ops/hopper take over
where a record says that they win. ``triton`` is imported at the first call. With TRITON_INTERPRET=1 set before that
import, the kernels run on CPU tensors in Triton's interpreter, slowly: tests use this where there is no GPU.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from diff_transformer.ops.call import OPERANDS, Call, in_dtype, replace
from diff_transformer.ops.hopper.support import switched_off

MAX_D, MAX_DV = 128, 256  # no tile of wider keys and accumulators fits the registers of a multiprocessor
MIN_CAPABILITY = (8, 0)  # Ampere: bf16 products and asynchronous copies

# The forward kernel runs one program for each head and tile of queries. With few queries and heads most of the GPU is
# idle; decode.py splits the keys instead. That pays from about four blocks of 64 keys.
MAX_DECODE_QUERIES, MIN_DECODE_KEYS = 8, 256


def unsupported_reason(call: Call) -> str | None:
    """Why the backend cannot compute this call, or None."""
    if call.q1.dtype == torch.float64:
        return "the Triton kernels take float32, bfloat16 and float16; give backend='reference' or 'blockwise'"
    D, Dv = call.q1.shape[-1], call.v.shape[-1]
    if D > MAX_D or Dv > MAX_DV:
        return (
            f"q1 has width {D} and v width {Dv}; the Triton kernels take at most {MAX_D} and {MAX_DV}: "
            "give backend='sdpa', or more heads of less width"
        )
    return _unsupported_device(call.q1.device.type, call.q1.device.index)


def _unsupported_device(device_type: str, index: int | None) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton (PyTorch's CUDA builds for Linux bring it)"
    if device_type == "cpu":
        return None if interpreted() else "the Triton kernels run on CUDA devices; give backend='blockwise' on the CPU"
    if device_type != "cuda" or torch.version.hip is not None:
        other = device_type if torch.version.hip is None else "ROCm"
        return f"the Triton kernels are written for NVIDIA GPUs, not for {other}; give backend='sdpa'"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, and the Triton kernels need "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more; give backend='sdpa'"
        )
    return None


# Tells torch.compile that the result is a constant. torch.compiler.assume_constant_result does the same, but imports
# the compiler, which takes seconds.
_unsupported_device._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


def interpreted() -> bool:
    """True if the kernels run in Triton's interpreter, or would if imported now."""
    launching = sys.modules.get(f"{__name__}.launching")
    return os.environ.get("TRITON_INTERPRET", "0") == "1" if launching is None else launching.INTERPRETED


def attend(call: Call) -> Tensor:
    """(first softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v, [B, H, T, Dv] in the dtype of v."""
    from diff_transformer.ops.triton import decode, launching, operator

    if call.v.dtype == torch.bfloat16 and operator.INTERPRETED:  # which multiplies the bit patterns of bf16
        return attend(in_dtype(call, torch.float32)).bfloat16()
    if decodes(call) and decode.takes(call):
        return decode.attend_decode(*call[:OPERANDS], None)
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool and (mask.shape[3] == 1 or mask.stride(3) == 0):  # whole rows
        out = attend(replace(call, attn_mask=None))
        return torch.where(mask[..., :1], out, 0)  # which also zeroes the gradients of masked rows
    rows = [None if x is None else launching.rows_contiguous(x) for x in call[:5]]
    return operator.forward(*rows, *call[5:OPERANDS], not switched_off(), bool(call.gradients))[0].transpose(1, 2)


def decodes(call: Call) -> bool:
    """True if a call has few queries over many keys, so that the kernels of decode.py are faster."""
    few = call.q1.shape[2] <= MAX_DECODE_QUERIES and call.k1.shape[2] >= MIN_DECODE_KEYS
    return few and not call.gradients and call.documents is None
