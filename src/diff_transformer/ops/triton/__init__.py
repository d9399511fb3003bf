"""Triton kernels for differential attention on CUDA.

One launch computes both maps (forward.py). In the backward one dP and one dV product serve both maps (backward.py). A
few queries over many keys are split along the keys (decode.py). On Hopper, Gluon kernels (ops/gluon) take over where
a record says that they win. ``triton`` is imported at the first call. With TRITON_INTERPRET=1 set before that import,
the kernels run on CPU tensors in Triton's interpreter, slowly: tests use this where there is no GPU.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.call import Call, Documents, in_dtype, of_list, replace
from diff_transformer.registration import when_imported

MAX_D, MAX_DV = 128, 256  # no tile of wider keys and accumulators fits the registers of a multiprocessor
MIN_CAPABILITY = (8, 0)  # Ampere: bf16 products and asynchronous copies

# The forward kernel runs one program for each head and tile of queries. With few queries and heads most of the GPU is
# idle; decode.py splits the keys instead. That pays from about four blocks of 64 keys.
MAX_DECODE_QUERIES, MIN_DECODE_KEYS = 8, 256

_one_pass: bool | None = None  # as backward_form chose; None for two passes, or the faster form where it was measured


class TritonVariant(NamedTuple):
    """Which kernels compute a call."""

    one_pass: bool = False  # in the backward
    gluon: bool = True  # where they take the call; not in a backward in one pass

    @property
    def name(self) -> str:
        return f"{'one pass' if self.one_pass else 'two passes'}{'' if self.gluon else ', without Gluon'}"


def variants(q1: Tensor, v: Tensor, plain: bool, gradients: bool) -> list[TritonVariant]:
    """The variants among which a measurement decides, the default first.

    plain: whether there is no mask, no window and no packed documents.
    """
    passes = [False]
    if gradients and not torch.are_deterministic_algorithms_enabled():
        passes = [False, True] if _one_pass is None else [_one_pass]
    from diff_transformer.ops.gluon.support import DTYPES, WIDTHS

    gluon = plain and WIDTHS.get(q1.shape[3]) == v.shape[3] and q1.dtype in DTYPES
    gluon = gluon and _gluon_device(q1.device.type, q1.device.index)
    return [TritonVariant(one, by_gluon) for by_gluon in ((True, False) if gluon else (True,)) for one in passes]


def _gluon_device(device_type: str, index: int | None) -> bool:
    from diff_transformer.ops.gluon.support import unsupported_device

    return (
        unsupported_device(torch.device(device_type if index is None else f"{device_type}:{index}"), "forward") is None
    )


def chosen_passes() -> bool | None:
    """What ``backward_form`` chose: one pass, or two; None for the form that is faster where it was measured."""
    return _one_pass


def gluon_switches() -> str:
    """The Hopper kernels that DIFF_TRANSFORMER_GLUON allows.

    Raises:
        ValueError: the variable has another value than those of ``gluon.support.switched_off``.
    """
    from diff_transformer.ops.gluon.support import KERNELS, switched_off

    return ",".join(name for name in KERNELS if not switched_off(name))


def attend(call: Call, *rest, form: TritonVariant | None = None) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v, [B, H, T, Dv] in the dtype of v.

    Checkpoints that earlier builds exported give the parts of a call in a row, and the variant as ``form``.
    """
    from diff_transformer.ops.triton import decode, operator

    if rest:
        call = replace(of_list(call, *rest), variant=form)
    if call.v.dtype == torch.bfloat16 and operator.INTERPRETED:  # which multiplies the bit patterns of bf16
        return attend(in_dtype(call, torch.float32)).bfloat16()
    T, S, mask, documents = call.q1.shape[2], call.k1.shape[2], call.attn_mask, call.documents
    options = call.is_causal, call.window
    few = T <= MAX_DECODE_QUERIES and S >= MIN_DECODE_KEYS and not call.gradients and documents is None
    if few and decode.unsupported_reason(call) is None:
        return decode.attend_decode(*call.inputs, mask, *options, call.scale)
    if mask is not None and _whole_rows(mask):
        out = attend(replace(call, attn_mask=None))
        return torch.where(mask[..., :1], out, 0)  # which also zeroes the gradients of masked rows
    rows = [None if x is None else operator.rows_contiguous(x) for x in call[:5]]
    bounds = (None, None) if documents is None else documents[:2]
    variant = call.variant or TritonVariant(bool(_one_pass))
    out = operator.forward(
        *rows, call.lam, mask, *bounds, *options, call.scale, bool(call.gradients), variant.one_pass, variant.gluon
    )[0]
    return out.transpose(1, 2)


def takes_packed(call: Call) -> bool:
    """Whether all packed documents are computed at once."""
    return True


def _whole_rows(attn_mask: Tensor) -> bool:
    """Whether a boolean mask masks each row fully or not at all."""
    return attn_mask.dtype == torch.bool and (attn_mask.shape[3] == 1 or attn_mask.stride(3) == 0)


@contextmanager
def backward_form(form: str) -> Generator[None]:
    """Context manager that selects the backward kernels for forward calls made inside it.

    "two_pass" (the default of backend="triton") computes the gradients of keys, then those of queries, and repeats bit
    for bit. "one_pass" computes less, but adds up the gradients of queries with fp32 atomics, in no fixed order. Under
    torch.use_deterministic_algorithms it is "two_pass" in any case. Outside of this context, backend="auto" takes the
    one that was measured to be faster.

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


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    if dtype == torch.float64:
        return "the Triton kernels take float32, bfloat16 and float16; give backend='reference' or 'blockwise'"
    return _unsupported_device(device.type, device.index)


def _unsupported_device(device_type: str, index: int | None) -> str | None:
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
    if capability < MIN_CAPABILITY:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, and the Triton kernels need "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more; give backend='sdpa'"
        )
    return None


# Tells torch.compile that the results are constants. torch.compiler.assume_constant_result does the same, but imports
# the compiler, which takes seconds.
_unsupported_device._dynamo_marked_constant = True  # ty: ignore[missing-attribute]
_gluon_device._dynamo_marked_constant = True  # ty: ignore[missing-attribute]


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, or would if imported now."""
    launching = sys.modules.get(f"{__name__}.launching")
    return os.environ.get("TRITON_INTERPRET", "0") == "1" if launching is None else launching.INTERPRETED


def unsupported_call_reason(call: Call, *rest) -> str | None:
    """Why the backend cannot compute this call, or None."""
    call = of_list(call, *rest) if rest else call
    D, Dv = call.q1.shape[-1], call.v.shape[-1]
    if D > MAX_D or Dv > MAX_DV:
        return (
            f"q1 has width {D} and v width {Dv}; the Triton kernels take at most {MAX_D} and {MAX_DV}: "
            "give backend='sdpa', or more heads of less width"
        )
    return None


# Names that checkpoints exported by earlier builds call.


def attend_varlen(q1, q2, k1, k2, v, lam, *rest, form: TritonVariant | None = None) -> Tensor:
    """``attend`` within each document; rest: the fields of ``Documents``, is_causal, window and scale."""
    return attend(replace(of_list(q1, q2, k1, k2, v, lam, None, *rest[4:], Documents(*rest[:4])), variant=form))


forms, why_not, why_not_arguments = variants, unsupported_reason, unsupported_call_reason


def _define_operators(_) -> None:
    """Import the files of the operators, whose formulas a counter of FLOPs takes when it is made: before their call."""
    if find_spec("triton") is not None:
        from diff_transformer.ops.triton import decode, operator  # noqa: F401


when_imported("torch.utils.flop_counter", _define_operators)
