"""The "blockwise" backend: differential attention in blocks of queries and chunks of keys, the default on CPUs.

``native.cpp`` computes it; ``setup.py`` compiles that file, ``library.py`` loads it, ``kernel.py`` calls it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.arguments import no_second_derivatives, traced
from diff_transformer.ops.call import OPERANDS, SCHEMA, TENSORS, Call, in_dtype, normalized
from diff_transformer.ops.cpu import kernel, library

_PLAIN = (Tensor, torch.nn.Parameter)


def unsupported_reason(call: Call) -> str | None:
    """Why the backend cannot compute this call, or None. It takes one document at a time."""
    device, width = call.q1.device.type, max(call.q1.shape[3], call.v.shape[3])
    if call.cu_seqlens_q is not None:
        return "it takes no packed documents"
    if device not in ("cpu", "meta"):
        return f"it computes on CPUs, not on {device}"
    if call.q1.dtype == torch.float64:
        return "it computes in float32 and bfloat16, not in float64; give backend='sdpa' or 'reference'"
    if not library.available():
        return f"{library.why_unavailable()}; give backend='sdpa'"
    if width > kernel.MAX_WIDTH:
        return f"it takes widths up to {kernel.MAX_WIDTH}, not {width}; give backend='sdpa'"
    return None


def attend(call: Call) -> Tensor:
    """(first softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v, [B, H, T, Dv] in the dtype of v."""
    call = normalized(call)
    if call.v.dtype == torch.float16:  # CPUs multiply float16 slowly or not at all
        return attend(in_dtype(call, torch.float32)).half()
    if not call.gradients and not traced() and in_memory((*call.inputs, call.first, call.attn_mask)):
        return kernel.forward(call).transpose(1, 2)  # the custom operator takes as long as a short query
    return forward(*call.inputs, *call[6:OPERANDS]).transpose(1, 2)


def in_memory(tensors: Iterable[Tensor | None]) -> bool:
    """True if the values of all tensors lie at their addresses on the CPU: not so for subclasses (fake, sharded or
    quantised tensors), meta tensors, storages that were freed, and views that are negated when they are read."""
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _PLAIN or not x.is_cpu or x.layout is not torch.strided or x.is_neg():
            return False
        if not x.untyped_storage().nbytes():
            return False
    return True


@torch.library.custom_op("diff_transformer::blockwise", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def forward(*operands: Any) -> Tensor:
    """[B, T, H, Dv], contiguous and no view, so that the output can be changed in place."""
    return kernel.forward(Call(*operands))


@torch.library.custom_op(
    "diff_transformer::blockwise_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(dout: Tensor, *operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q1, q2, k1, k2, v, lam and first; dout [B, H, T, Dv] is that of the output."""
    return kernel.backward(Call(*operands), dout)


@forward.register_fake
def _(q1, q2, k1, k2, v, *_):
    B, H, T, _ = q1.shape
    return v.new_empty(B, T, H, v.shape[-1])


@backward.register_fake
def _(dout, q1, q2, k1, k2, v, lam, *_):
    return tuple(x.new_empty(x.shape) for x in (q1, q2, k1, k2, v, lam, lam))


def _save(ctx, inputs, output):
    tensors, ctx.options = inputs[:TENSORS], inputs[TENSORS:]
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dout):
    tensors = ctx.saved_tensors
    *gradients, dfirst = backward(dout.transpose(1, 2), *tensors, *ctx.options)
    return *gradients, None if tensors[6] is None else dfirst, *(None,) * (OPERANDS - 7)


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(no_second_derivatives)
