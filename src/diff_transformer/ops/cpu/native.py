"""Calls the native implementation, ``native.cpp``."""

import struct
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.cpu.build import library, refuse_failure

MAX_DECODE_ROWS = 8  # rows of either map that share a key/value head: up to here each key is read once, unpacked
MAX_D = MAX_DV = 256
MAX_SINGLE_THREAD_WORK = 2**15  # multiply-adds that one thread finishes before a second one has started


# ``struct Problem`` of native.cpp: 12 matrices (pointer and three strides), lam, dlam, mask, 14 sizes, the scale, and
# the head norm (gain, eps, weights, their dtype, whether there is one).
LAYOUT = struct.Struct("@" + 48 * "q" + 4 * "q" + "q" + 5 * "q" + 14 * "q" + "f" + "ff" + "q" + "qq")
NO_NORM = (1.0, 0.0, 0, 0, 0)
NO_MATRIX = (0, 0, 0, 0)


class Problem(NamedTuple):
    """A call as ``native.cpp`` reads it."""

    packed: bytes  # LAYOUT
    bf16: bool
    copies: dict[object, Tensor]  # tensors that ``packed`` points to, kept until the call returns


def supports(q1: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the native implementation computes this call on this machine."""
    usual = q1.dtype in (torch.float32, torch.bfloat16) and q1.device.type == "cpu" and scale > 0
    return usual and q1.shape[-1] <= MAX_D and v.shape[-1] <= MAX_DV and library() is not None


def forward(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """[B, H, T, Dv], laid out in memory as [B, T, H, Dv]."""
    B, H, T, D = q1.shape
    out = v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
    if v.dtype == torch.float32:
        measured = 32 if D <= 64 else 64
    elif in_tiles():
        measured = 128 if D <= 32 else 64
    else:
        measured = 48 if D <= 64 else 32
    rows = block_rows(T, measured)
    problem = pack((q1, q2, k1, k2, v, out), lam, attn_mask, is_causal, window, scale, rows)
    few_rows = H // k1.shape[1] * T <= MAX_DECODE_ROWS
    function, workspace = prepare("decode" if few_rows else "forward", problem)
    refuse_failure(function(problem.packed, problem.bf16, _aligned(workspace)))
    return out


def backward(dout, q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale):
    """Gradients of q1, q2, k1, k2, v and lam."""
    T, D = q1.shape[2:]
    new = torch.zeros_like if is_causal and k1.shape[2] < T else torch.empty_like  # then some rows are fully masked
    gradients = [new(x, memory_format=torch.contiguous_format) for x in (q1, q2, k1, k2, v, lam)]
    if q1.dtype == torch.bfloat16 and in_tiles():
        measured = 128 if D <= 64 else 256
    else:
        measured = 32 if D <= 32 else 64 if D <= 64 else 128
    rows = block_rows(T, measured)
    tensors = (q1, q2, k1, k2, v, None, dout, *gradients[:5])
    problem = pack(tensors, lam, attn_mask, is_causal, window, scale, rows, dlam=gradients[5])
    function, workspace = prepare("backward", problem)
    refuse_failure(function(problem.packed, problem.bf16, _aligned(workspace)))
    return tuple(gradients)


@cache
def in_tiles() -> bool:
    """Whether this processor multiplies bf16 in tiles (AMX)."""
    native = library()
    return native is not None and native.diff_attention_in_tiles()


def block_rows(T: int, measured: int) -> int:
    """Queries in a block: the fastest measured number for the width, or T rounded up to a multiple of 8."""
    return min(measured, -(-T // 8) * 8)


def pack(tensors, lam, attn_mask, is_causal, window, scale, rows: int, dlam: Tensor | None = None) -> Problem:
    """Describe a call for ``native.cpp``.

    ``tensors``: q1, q2, k1, k2, v, out, dout, dq1, dq2, dk1, dk2, dv, as many as the call needs.
    """
    q1, q2, k1, _, v = tensors[:5]
    copies: dict[object, Tensor] = {}
    numbers: list[int] = []
    for x in tensors:
        if x is None:
            numbers += NO_MATRIX
            continue
        *strides, inner = x.stride()
        if inner != 1 and x.shape[-1] > 1:
            x = copies.setdefault(id(x), x.contiguous())
            strides = x.stride()[:3]
        numbers += (x.data_ptr(), *strides)
    numbers += NO_MATRIX * (12 - len(tensors))
    numbers += (lam.data_ptr(), *lam.stride()[:3], 0 if dlam is None else dlam.data_ptr())
    if attn_mask is None:
        numbers += (0, *NO_MATRIX)
    else:
        mask = copies["mask"] = attn_mask if attn_mask.dtype == torch.bool else attn_mask.float()
        strides = [stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True)]
        numbers += (mask.data_ptr(), *strides)
    (B, H, T, D), Hn, (G, S), Dv = q1.shape, q2.shape[1], k1.shape[1:3], v.shape[3]
    threads = 1 if B * H * T * S * (D + Dv) < MAX_SINGLE_THREAD_WORK else torch.get_num_threads()
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    numbers += (additive, B, H, Hn, G, T, S, D, Dv, is_causal, window or 0, threads, rows, -(-threads // (B * G)))
    return Problem(LAYOUT.pack(*numbers, scale, *NO_NORM), q1.dtype == torch.bfloat16, copies)


def prepare(name: str, problem: Problem) -> tuple[Callable, Tensor]:
    """The library's function ``diff_attention_NAME`` and its workspace for the problem."""
    native = library()
    if native is None:
        raise RuntimeError("there is no native library here")
    size = getattr(native, f"diff_attention_{name}_workspace")(problem.packed, problem.bf16)
    return getattr(native, f"diff_attention_{name}"), torch.empty(size + 64, dtype=torch.uint8)


def _aligned(workspace: Tensor) -> int:
    """The first address in it that 64 divides."""
    return -(-workspace.data_ptr() // 64) * 64
