"""Differential attention in Triton kernels of its own: the default on CUDA.

One launch computes both maps (forward.py), one product dP and one dV serve both in the backward (backward.py); a few
queries over many keys are split over the keys (decode.py); on GPUs that it was tested for, Gluon kernels (gluon/) take
over. ``import triton`` waits for the first call. With TRITON_INTERPRET=1 set before the first import the kernels run on
CPU tensors in Triton's interpreter, slowly, which is how they are tested where there is no GPU.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

LARGEST_D, LARGEST_DV = 128, 256  # beyond, no tile of keys and accumulators fits the registers of an SM
LEAST_CAPABILITY = (8, 0)  # bf16 products and asynchronous copies: Ampere

# The forward kernel gives one program to a head and a tile of queries. Few queries fill a fraction of a tile and few
# heads a fraction of the GPU; decode.py splits the keys instead, of which four blocks of 64 are the least worth it.
DECODE_QUERIES, DECODE_KEYS = 8, 256

_one_pass = False


def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v."""
    from diff_transformer.ops.triton import decode, operator

    if v.dtype == torch.bfloat16 and operator.INTERPRETED:
        tensors = _in_fp32(q1, q2, k1, k2, v)
        return attend(*tensors, lam, attn_mask, is_causal, window, scale).bfloat16()
    T, S = q1.shape[2], k1.shape[2]
    few_on_many = T <= DECODE_QUERIES and S >= DECODE_KEYS and not _gradient_needed(q1, q2, k1, k2, v, lam)
    if few_on_many and decode.fits(q1, q2, k1, k2, v, attn_mask, is_causal, window) is None:
        return decode.attend_decode(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)
    if attn_mask is not None and _whole_rows(attn_mask):
        out = attend(q1, q2, k1, k2, v, lam, None, is_causal, window, scale)
        return torch.where(attn_mask[..., :1], out, 0)  # a hidden row sends no gradient back either
    return operator.apply(q1, q2, k1, k2, v, lam, attn_mask, None, None, T, S, is_causal, window, scale, _one_pass)


def attend_varlen(
    q1, q2, k1, k2, v, lam, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window, scale
) -> Tensor:
    """``attend`` within each document: tensors packed as [1, heads, total, width], lam [1, H, total, 1]."""
    from diff_transformer.ops.triton import operator

    documents = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if v.dtype == torch.bfloat16 and operator.INTERPRETED:
        return attend_varlen(*_in_fp32(q1, q2, k1, k2, v), lam, *documents, is_causal, window, scale).bfloat16()
    return operator.apply(q1, q2, k1, k2, v, lam, None, *documents, is_causal, window, scale, _one_pass)


def _whole_rows(attn_mask: Tensor) -> bool:
    """Whether a boolean mask hides queries from all keys or from none."""
    return attn_mask.dtype == torch.bool and (attn_mask.shape[3] == 1 or attn_mask.stride(3) == 0)


def _in_fp32(q1, q2, k1, k2, v) -> tuple[Tensor, ...]:
    """For the interpreter, which multiplies the bit patterns of bf16. Keys that both maps share stay shared."""
    k1_wide = k1.float()
    return q1.float(), q2.float(), k1_wide, k1_wide if k2 is k1 else k2.float(), v.float()


def _gradient_needed(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@contextmanager
def backward_form(form: str) -> Generator[None]:
    """Which backward kernels serve calls of the forward made inside this context.

    "two_pass" (the default) computes the gradients of keys, then those of queries, and repeats bit for bit. "one_pass"
    computes less, but adds up the gradients of queries with fp32 atomics in whatever order programs come to them;
    under torch.use_deterministic_algorithms two passes are made all the same.

    Raises:
        ValueError: another name.
    """
    global _one_pass
    if form not in ("two_pass", "one_pass"):
        raise ValueError(f"backward form is {form!r}; give 'two_pass' or 'one_pass'")
    before, _one_pass = _one_pass, form == "one_pass"
    try:
        yield
    finally:
        _one_pass = before


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    if dtype == torch.float64:
        return "the Triton kernels take float32, bfloat16 and float16; give backend='reference' or 'blockwise'"
    return _why_not_on(device.type, device.index)


def _why_not_on(device_type: str, index: int | None) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed; pip install triton (PyTorch's CUDA builds for Linux bring it)"
    if device_type == "cpu":
        return None if interpreted() else "the Triton kernels run on CUDA devices; give backend='blockwise' on the CPU"
    if device_type != "cuda" or torch.version.hip is not None:
        other = device_type if torch.version.hip is None else "ROCm"
        return f"the Triton kernels are written for NVIDIA GPUs, not for {other}; give backend='sdpa'"
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, and the Triton kernels need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or more; give backend='sdpa'"
        )
    return None


# For torch.compile the answer is a constant. torch.compiler.assume_constant_result does no more than this, but imports
# the compiler, which takes seconds.
_why_not_on._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, or would if they were imported now."""
    launching = sys.modules.get(f"{__name__}.launching")
    return os.environ.get("TRITON_INTERPRET", "0") == "1" if launching is None else launching.INTERPRETED


def why_not_arguments(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> str | None:
    """Why the backend cannot compute this call, or None."""
    D, Dv = q1.shape[-1], v.shape[-1]
    if D > LARGEST_D or Dv > LARGEST_DV:
        return (
            f"q1 has width {D} and v width {Dv}; the Triton kernels take at most {LARGEST_D} and {LARGEST_DV}: "
            "give backend='sdpa', or more heads of less width"
        )
    return None
