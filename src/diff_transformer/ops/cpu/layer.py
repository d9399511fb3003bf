"""Cached decoding of a whole layer on the CPU in one native call: lambda, attention, head norm and gain.

The attention of one token takes microseconds on the CPU, less than the PyTorch calls it replaces.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from diff_transformer.ops.arguments import active_transform, traced
from diff_transformer.ops.cpu.build import library, refuse_failure
from diff_transformer.ops.cpu.native import (
    LAYOUT,
    MAX_D,
    MAX_DECODE_ROWS,
    MAX_DV,
    MAX_SINGLE_THREAD_WORK,
    NO_MATRIX,
    in_memory,
)

_WEIGHTS = (torch.float32, torch.bfloat16)
LAMBDA = struct.Struct("@4qqf")  # ``struct Lambda`` of native.cpp


class DecodeWeights(NamedTuple):
    """What a layer does beside attention: lambda and the head norm."""

    vectors: tuple[Tensor, ...] = ()  # q1, k1, q2, k2 of lambda, fp32 [d]; empty for a fixed lambda
    initial: float = 0.0  # lambda_init, or the fixed lambda
    weight: Tensor | None = None  # of the head norm, [dv]
    normed: bool = False
    eps: float = 0.0
    gain: float = 1.0
    of_tokens: Tensor | None = None  # lambda itself, fp32 [B, h, T, 1], instead of vectors
    shared_keys: bool = False  # both maps of a head have the keys of one key head


def decode_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Callable[[], DecodeWeights | None],
    is_causal: bool,
    window: int | None,
) -> Tensor | None:
    """``decode`` where it computes this call, else None. The weights are asked for where the tensors may be taken."""
    if q.device.type != "cpu" or traced() or q.dim() != 4 or q.shape[2] > MAX_DECODE_ROWS:
        return None
    given = weights()
    if given is None or not supports(q, k, v, given):
        return None
    return decode(q, k, v, given, is_causal, window)


def supports(q: Tensor, k: Tensor, v: Tensor, weights: DecodeWeights) -> bool:
    """Whether ``decode`` computes this call as ``diff_attention`` and the layer's modules would.

    So for few queries of dense rows in the CPU's memory, without gradient, tracing, transform or autocast to another
    dtype.
    """
    if traced() or active_transform() is not None or _functions_replaced() or not q.numel() or not k.numel():
        return False
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype and q.dtype in _WEIGHTS):
        return False
    (B, n, T, D), (Bk, m, S, Dk), (Bv, G, Sv, Dv) = q.shape, k.shape, v.shape
    layouts = ((G, D),) if weights.shared_keys else ((2 * G, D), (G, 2 * D))
    if not (B == Bk == Bv and Sv == S and n % (2 * G) == 0 and (m, Dk) in layouts):
        return False
    if n // 2 // G * T > MAX_DECODE_ROWS or D > MAX_D or Dv > MAX_DV:
        return False
    for x in (q, k, v):
        if type(x) is not Tensor or not in_memory(x) or x.stride(3) != 1:
            return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if torch.is_autocast_enabled("cpu") and q.dtype != torch.get_autocast_dtype("cpu"):
        return False
    lam = weights.of_tokens
    if lam is not None:
        if not in_memory(lam) or lam.dtype is not torch.float32 or lam.shape != (B, n // 2, T, 1):
            return False
        if torch.is_grad_enabled() and lam.requires_grad:
            return False
    return _reads(weights, Dv) and library() is not None


def _reads(weights: DecodeWeights, Dv: int) -> bool:
    """Whether the weights lie in memory as the native call reads them: one number after another."""
    vectors, initial, weight, _, eps, *_ = weights
    if type(initial) is not float or type(eps) is not float:
        return False
    if weight is not None:
        if not in_memory(weight) or not weight.is_contiguous():
            return False
        if weight.dtype not in _WEIGHTS or weight.shape != (Dv,):
            return False
    width = vectors[0].numel() if vectors else 0
    for x in vectors:
        if not in_memory(x) or not x.is_contiguous() or x.dtype is not torch.float32 or x.shape != (width,):
            return False
    return True


def _functions_replaced() -> bool:
    """Whether a mode of torch.overrides may change what functions compute; a default device changes none here."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def decode(q: Tensor, k: Tensor, v: Tensor, weights: DecodeWeights, is_causal: bool, window: int | None) -> Tensor:
    """``gain * norm((A1 - lambda A2) V)``, for calls that ``supports`` accepts.

    Args:
        q: ``[B, 2h, T, d]``, heads 2i and 2i+1 are the maps of head i.
        k: ``[B, 2g, S, d]``, or pairs concatenated along the width, ``[B, g, S, 2d]``; shared, ``[B, g, S, d]``.
        v: ``[B, g, S, dv]``.

    Returns:
        ``[B, T, h, dv]`` in the dtype of v.
    """
    (B, n, T, D), (G, S, Dv) = q.shape, v.shape[1:]
    H, size = n // 2, q.element_size()
    out = v.new_empty(B, T, H, Dv)
    (qb, qh, qt, _), (kb, kh, kt, _), (vb, vh, vt, _) = q.stride(), k.stride(), v.stride()
    queries, keys = q.data_ptr(), k.data_ptr()
    if weights.shared_keys:
        second = keys
    elif k.shape[3] == D:
        second, kh = keys + size * kh, 2 * kh
    else:
        second = keys + size * D
    weight, given = weights.weight, weights.of_tokens
    lam = NO_MATRIX if given is None else (given.data_ptr(), *given.stride()[:3])
    threads = 1 if B * H * T * S * (D + Dv) < MAX_SINGLE_THREAD_WORK else torch.get_num_threads()
    problem = LAYOUT.pack(
        queries, qb, 2 * qh, qt, queries + size * qh, qb, 2 * qh, qt,
        keys, kb, kh, kt, second, kb, kh, kt, v.data_ptr(), vb, vh, vt,
        out.data_ptr(), T * H * Dv, Dv, H * Dv, *_NO_GRADIENTS, *lam, *_NO_MASK,
        0, B, H, H, G, T, S, D, Dv, is_causal, window or 0, threads, T, 1, D**-0.5,
        weights.gain, weights.eps, 0 if weight is None else weight.data_ptr(),
        weight is not None and weight.dtype == torch.bfloat16, weights.normed,
    )  # fmt: skip
    vectors = [vector.data_ptr() for vector in weights.vectors] or [0, 0, 0, 0]
    length = -1 if given is not None else weights.vectors[0].numel() if weights.vectors else 0
    native = library()
    assert native is not None  # ``supports`` has checked it
    of_layer = LAMBDA.pack(*vectors, length, weights.initial)
    refuse_failure(native.diff_attention_decode_layer(problem, of_layer, q.dtype == torch.bfloat16))
    return out


_NO_GRADIENTS, _NO_MASK = 6 * NO_MATRIX, (0, 0, *NO_MATRIX)  # the mask's, with that of lambda's gradient before it
