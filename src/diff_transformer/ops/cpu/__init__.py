"""The "blockwise" backend: differential attention in blocks of queries, the default on the CPU.

It has two implementations of the same mathematics: ``native.cpp``, compiled for the processor at its first use, and
PyTorch calls (``in_torch.py``), which need no compiler and take every dtype and device.
"""

import torch
from torch import Tensor

from diff_transformer.ops import flops
from diff_transformer.ops.arguments import refuse_second_derivatives, traced
from diff_transformer.ops.cpu import in_torch, native


def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v of checked arguments, [B, H, T, Dv] in the dtype of v."""
    if attn_mask is not None and attn_mask.shape[1] > 1 and q2.shape[1] < q1.shape[1]:
        q2 = q2.repeat_interleave(q1.shape[1] // q2.shape[1], dim=1)  # each signal head then has its own second map
    arguments = (q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)
    if v.dtype == torch.float16:  # CPUs multiply float16 slowly or not at all
        return forward(*(x.float() for x in arguments[:5]), *arguments[5:]).half()
    if _is_plain_inference(*arguments[:6], *(() if attn_mask is None else (attn_mask,))):
        return _implementation(q1, v, scale).forward(*arguments)
    return forward(*arguments)


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the backend cannot work here, or None."""
    return None


def _implementation(q1: Tensor, v: Tensor, scale: float):
    return native if native.supports(q1, v, scale) else in_torch


def _is_plain_inference(*tensors: Tensor) -> bool:
    """Whether nothing differentiates, traces or compiles: then the operator's bookkeeping, which takes as long as a
    short query, is skipped."""
    if traced() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    return all(native.in_memory(x) for x in tensors)


@torch.library.custom_op("diff_transformer::blockwise", mutates_args=())
def forward(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """[B, H, T, Dv], laid out in memory as [B, T, H, Dv]."""
    form = _implementation(q1, v, scale)
    return form.forward(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)


@torch.library.custom_op("diff_transformer::blockwise_backward", mutates_args=())
def backward(
    dout: Tensor,
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q1, q2, k1, k2, v and lam; dout [B, H, T, Dv] is that of the output."""
    form = _implementation(q1, v, scale)
    return form.backward(dout, q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)


@forward.register_fake
def _(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale):
    B, H, T, _ = q1.shape
    return v.new_empty(B, T, H, v.shape[-1]).transpose(1, 2)


@backward.register_fake
def _(dout, q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale):
    return tuple(x.new_empty(x.shape) for x in (q1, q2, k1, k2, v, lam))


def _save(ctx, inputs, output):
    *tensors, ctx.is_causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dout):
    gradients = backward(dout, *ctx.saved_tensors, ctx.is_causal, ctx.window, ctx.scale)
    return (*gradients, None, None, None, None)


flops.count({
    torch.ops.diff_transformer.blockwise: flops.of_forward,
    torch.ops.diff_transformer.blockwise_backward: flops.of_backward,
})  # fmt: skip
forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(refuse_second_derivatives)
