"""Calls the native form of the backend, ``native.cpp``."""

import ctypes

import torch
from torch import Tensor

from diff_transformer.ops.blockwise.build import library

FEW = 8  # rows of either map that share a key/value head: up to here each key is read once and nothing is packed
SMALL = 2**18  # multiply-adds that one thread does sooner than two begin


class Matrix(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((f"by_{name}", ctypes.c_int64) for name in ("batch", "head", "row"))]


MATRICES = ("q1", "q2", "k1", "k2", "v", "out", "dout", "dq1", "dq2", "dk1", "dk2", "dv")


class Problem(ctypes.Structure):
    """``struct Problem`` of ``native.cpp``."""

    _fields_ = [
        *((name, Matrix) for name in MATRICES),
        ("lam", ctypes.c_void_p),
        *((f"lam_by_{name}", ctypes.c_int64) for name in ("batch", "head", "row")),
        ("dlam", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        *((f"mask_by_{name}", ctypes.c_int64) for name in ("batch", "head", "row", "key")),
        *((name, ctypes.c_int64) for name in ("mask_adds", "B", "H", "Hn", "G", "T", "S", "D", "Dv")),
        *((name, ctypes.c_int64) for name in ("causal", "window", "threads", "rows", "parts")),
        ("room", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    ]


def takes(q1: Tensor, v: Tensor, scale: float) -> bool:
    """Whether the native form computes this, here."""
    usual = q1.dtype in (torch.float32, torch.bfloat16) and q1.device.type == "cpu" and scale > 0
    return usual and q1.shape[-1] <= 256 and v.shape[-1] <= 256 and library() is not None


def forward(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """[B, H, T, Dv], laid out in memory as [B, T, H, Dv]."""
    B, H, T, D = q1.shape
    out = v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)
    few = H // k1.shape[1] * T <= FEW
    rows = block_rows(T, (32 if D <= 64 else 64) if v.dtype == torch.float32 else (48 if D <= 64 else 32))
    tensors = (q1, q2, k1, k2, v, out)
    run("decode" if few else "forward", tensors, lam, attn_mask, is_causal, window, scale, rows)
    return out


def backward(dout, q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale):
    """Gradients of q1, q2, k1, k2, v and lam."""
    T, D = q1.shape[2:]
    new = torch.zeros_like if is_causal and k1.shape[2] < T else torch.empty_like  # some queries may see nothing
    gradients = [new(x, memory_format=torch.contiguous_format) for x in (q1, q2, k1, k2, v, lam)]
    rows = block_rows(T, 32 if D <= 32 else 64 if D <= 64 else 128)
    tensors = (q1, q2, k1, k2, v, None, dout, *gradients[:5])
    run("backward", tensors, lam, attn_mask, is_causal, window, scale, rows, gradients[5])
    return tuple(gradients)


def block_rows(T: int, measured: int) -> int:
    """Queries of a block: as measured to be fastest for the width, a multiple of 8."""
    return min(measured, -(-T // 8) * 8)


def run(which: str, tensors, lam, attn_mask, is_causal, window, scale, rows: int, dlam: Tensor | None = None) -> None:
    """Fill in the problem, give it room, call ``diff_attention_WHICH``."""
    q1, q2, k1, _, v = tensors[:5]
    native, problem = library(), Problem()
    if native is None:
        raise RuntimeError("there is no native library here")
    kept: dict[object, Tensor] = {}  # copies, which live until the call returns
    for name, x in zip(MATRICES, tensors, strict=False):
        if x is not None:
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                x = kept.setdefault(id(x), x.contiguous())
            setattr(problem, name, Matrix(x.data_ptr(), *x.stride()[:3]))
    problem.lam = lam.data_ptr()
    problem.lam_by_batch, problem.lam_by_head, problem.lam_by_row = lam.stride()[:3]
    if dlam is not None:
        problem.dlam = dlam.data_ptr()
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask.float()
        kept["mask"] = mask
        steps = [step if size > 1 else 0 for size, step in zip(mask.shape, mask.stride(), strict=True)]
        problem.mask, problem.mask_adds = mask.data_ptr(), mask.dtype != torch.bool
        problem.mask_by_batch, problem.mask_by_head, problem.mask_by_row, problem.mask_by_key = steps
    B, H, T, D = q1.shape
    G, S, Dv = k1.shape[1], k1.shape[2], v.shape[3]
    problem.B, problem.H, problem.Hn, problem.G = B, H, q2.shape[1], G
    problem.T, problem.S, problem.D, problem.Dv = T, S, D, Dv
    problem.causal, problem.window, problem.scale, problem.rows = is_causal, window or 0, scale, rows
    problem.threads = 1 if B * H * T * S * (D + Dv) < SMALL else torch.get_num_threads()
    problem.parts = -(-problem.threads // (B * G))
    address, in_bf16 = ctypes.byref(problem), q1.dtype == torch.bfloat16
    size = getattr(native, f"diff_attention_{which}_room")(address, in_bf16)
    room = torch.empty(size + 64, dtype=torch.uint8)
    problem.room = -(-room.data_ptr() // 64) * 64
    getattr(native, f"diff_attention_{which}")(address, in_bf16)
