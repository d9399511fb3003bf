"""Cached decoding of a whole layer on the CPU in one native call: lambda, attention, head norm and gain.

The attention of one token takes microseconds on the CPU, less than the PyTorch calls it replaces.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from diff_transformer.ops.arguments import active_transform
from diff_transformer.ops.cpu.build import library, refuse_failure
from diff_transformer.ops.cpu.native import LAYOUT, MAX_DECODE_ROWS, MAX_SINGLE_THREAD_WORK, NO_MATRIX

LAMBDA = struct.Struct("@4qqf")  # ``struct Lambda`` of native.cpp


class Head(NamedTuple):
    """What a layer's weights determine: lambda and the head norm."""

    vectors: tuple[Tensor, ...]  # q1, k1, q2, k2 of lambda, fp32 [d]; empty for a fixed lambda
    initial: float  # lambda_init, or the fixed lambda
    weight: Tensor | None  # of the head norm, [dv]
    normed: bool
    eps: float
    gain: float


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether ``decode`` computes this call: few queries, dense rows, on the CPU, no gradient, tracing or transform."""
    T, G = q.shape[2], v.shape[1]
    if (
        q.shape[1] // 2 // G * T > MAX_DECODE_ROWS
        or q.device.type != "cpu"
        or q.dtype not in (torch.float32, torch.bfloat16)
    ):
        return False
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None or active_transform() is not None:
        return False
    if not (type(q) is type(k) is type(v) is Tensor and q.dtype == k.dtype == v.dtype):
        return False
    if not (q.numel() and k.numel()):
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    dense = q.stride(3) == k.stride(3) == v.stride(3) == 1
    return dense and q.shape[3] <= 256 and v.shape[3] <= 256 and library() is not None


def decode(q: Tensor, k: Tensor, v: Tensor, head: Head, is_causal: bool, window: int | None) -> Tensor:
    """``gain * norm((A1 - lambda A2) V)``, for calls that ``supports`` accepts.

    Args:
        q: ``[B, 2h, T, d]``, heads 2i and 2i+1 are the maps of head i.
        k: ``[B, 2g, S, d]``, or pairs concatenated along the width, ``[B, g, S, 2d]``.
        v: ``[B, g, S, dv]``.

    Returns:
        ``[B, T, h, dv]`` in the dtype of v.
    """
    (B, n, T, D), (G, S, Dv) = q.shape, v.shape[1:]
    H, size = n // 2, q.element_size()
    out = v.new_empty(B, T, H, Dv)
    (qb, qh, qt, _), (kb, kh, kt, _), (vb, vh, vt, _) = q.stride(), k.stride(), v.stride()
    queries, keys = q.data_ptr(), k.data_ptr()
    if k.shape[3] == D:
        second, kh = keys + size * kh, 2 * kh
    else:
        second = keys + size * D
    weight = head.weight
    threads = 1 if B * H * T * S * (D + Dv) < MAX_SINGLE_THREAD_WORK else torch.get_num_threads()
    problem = LAYOUT.pack(
        queries, qb, 2 * qh, qt, queries + size * qh, qb, 2 * qh, qt,
        keys, kb, kh, kt, second, kb, kh, kt, v.data_ptr(), vb, vh, vt,
        out.data_ptr(), T * H * Dv, Dv, H * Dv, *_NO_OTHER_MATRICES,
        0, B, H, H, G, T, S, D, Dv, is_causal, window or 0, threads, T, 1, D**-0.5,
        head.gain, head.eps, 0 if weight is None else weight.data_ptr(),
        weight is not None and weight.dtype == torch.bfloat16, head.normed,
    )  # fmt: skip
    vectors = [vector.data_ptr() for vector in head.vectors] or [0, 0, 0, 0]
    length = head.vectors[0].numel() if head.vectors else 0
    native = library()
    assert native is not None  # ``supports`` has checked it
    lam = LAMBDA.pack(*vectors, length, head.initial)
    refuse_failure(native.diff_attention_decode_layer(problem, lam, q.dtype == torch.bfloat16))
    return out


_NO_OTHER_MATRICES = 6 * NO_MATRIX + NO_MATRIX + (0,) + (0, *NO_MATRIX)  # gradients, lam, dlam, mask
