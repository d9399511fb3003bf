"""Calls the native form of the backend, ``native.cpp``."""

import struct
from functools import cache

import torch
from torch import Tensor

from diff_transformer.ops.blockwise.build import library

FEW = 8  # rows of either map that share a key/value head: up to here each key is read once and nothing is packed
SMALL = 2**15  # multiply-adds that one thread does sooner than two begin


# ``struct Problem`` of native.cpp: 12 matrices (pointer and three strides), lam, dlam, mask, 14 sizes, the scale, and
# the head norm (gain, eps, weights, their dtype, whether there is one).
LAYOUT = struct.Struct("@" + 48 * "q" + 4 * "q" + "q" + 5 * "q" + 14 * "q" + "f" + "ff" + "q" + "qq")
NO_NORM = (1.0, 0.0, 0, 0, 0)
NOTHING = (0, 0, 0, 0)


def takes(q1: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the native form computes this, here."""
    usual = q1.dtype in (torch.float32, torch.bfloat16) and q1.device.type == "cpu" and scale > 0
    return usual and q1.shape[-1] <= 256 and v.shape[-1] <= 256 and library() is not None


def forward(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """[B, H, T, Dv], laid out in memory as [B, T, H, Dv]."""
    B, H, T, D = q1.shape
    out = v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
    few = H // k1.shape[1] * T <= FEW
    if v.dtype == torch.float32:
        measured = 32 if D <= 64 else 64
    elif in_tiles():
        measured = 128 if D <= 32 else 64
    else:
        measured = 48 if D <= 64 else 32
    rows = block_rows(T, measured)
    tensors = (q1, q2, k1, k2, v, out)
    run("decode" if few else "forward", tensors, lam, attn_mask, is_causal, window, scale, rows)
    return out


def backward(dout, q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale):
    """Gradients of q1, q2, k1, k2, v and lam."""
    T, D = q1.shape[2:]
    new = torch.zeros_like if is_causal and k1.shape[2] < T else torch.empty_like  # some queries may see nothing
    gradients = [new(x, memory_format=torch.contiguous_format) for x in (q1, q2, k1, k2, v, lam)]
    if q1.dtype == torch.bfloat16 and in_tiles():
        measured = 128 if D <= 64 else 256
    else:
        measured = 32 if D <= 32 else 64 if D <= 64 else 128
    rows = block_rows(T, measured)
    tensors = (q1, q2, k1, k2, v, None, dout, *gradients[:5])
    run("backward", tensors, lam, attn_mask, is_causal, window, scale, rows, gradients[5])
    return tuple(gradients)


@cache
def in_tiles() -> bool:
    """Whether this processor multiplies bf16 in tiles (AMX)."""
    native = library()
    return native is not None and native.diff_attention_in_tiles()


def block_rows(T: int, measured: int) -> int:
    """Queries of a block: as measured to be fastest for the width, a multiple of 8."""
    return min(measured, -(-T // 8) * 8)


def run(which: str, tensors, lam, attn_mask, is_causal, window, scale, rows: int, dlam: Tensor | None = None) -> None:
    """Lay the problem out as ``native.cpp`` reads it, give it room, call ``diff_attention_WHICH``.

    ``tensors``: q1, q2, k1, k2, v, out, dout, dq1, dq2, dk1, dk2, dv, as many as the call needs.
    """
    q1, q2, k1, _, v = tensors[:5]
    native = library()
    if native is None:
        raise RuntimeError("there is no native library here")
    kept: dict[object, Tensor] = {}  # copies, which live until the call returns
    numbers: list[int] = []
    for x in tensors:
        if x is None:
            numbers += NOTHING
            continue
        *steps, inner = x.stride()
        if inner != 1 and x.shape[-1] > 1:
            x = kept.setdefault(id(x), x.contiguous())
            steps = x.stride()[:3]
        numbers += (x.data_ptr(), *steps)
    numbers += NOTHING * (12 - len(tensors))
    numbers += (lam.data_ptr(), *lam.stride()[:3], 0 if dlam is None else dlam.data_ptr())
    if attn_mask is None:
        numbers += (0, *NOTHING)
    else:
        mask = kept["mask"] = attn_mask if attn_mask.dtype == torch.bool else attn_mask.float()
        steps = [step if size > 1 else 0 for size, step in zip(mask.shape, mask.stride(), strict=True)]
        numbers += (mask.data_ptr(), *steps)
    (B, H, T, D), Hn, (G, S), Dv = q1.shape, q2.shape[1], k1.shape[1:3], v.shape[3]
    threads = 1 if B * H * T * S * (D + Dv) < SMALL else torch.get_num_threads()
    adds = attn_mask is not None and attn_mask.dtype != torch.bool
    numbers += (adds, B, H, Hn, G, T, S, D, Dv, is_causal, window or 0, threads, rows, -(-threads // (B * G)))
    problem, in_bf16 = LAYOUT.pack(*numbers, scale, *NO_NORM), q1.dtype == torch.bfloat16
    size = getattr(native, f"diff_attention_{which}_room")(problem, in_bf16)
    room = torch.empty(size + 64, dtype=torch.uint8)
    getattr(native, f"diff_attention_{which}")(problem, in_bf16, -(-room.data_ptr() // 64) * 64)
