"""The "blockwise" backend: differential attention in blocks of queries, the default on the CPU.

It has two implementations of the same mathematics: ``native.cpp``, compiled for the processor at its first use, and
PyTorch calls (``in_torch.py``), which need no compiler and take every dtype and device.
"""

import torch
from torch import Tensor

from diff_transformer.ops import flops
from diff_transformer.ops.arguments import refuse_second_derivatives, traced
from diff_transformer.ops.call import Call, in_dtype, of_list, with_noise_head_for_each_mask
from diff_transformer.ops.cpu import in_torch, native


def attend(call: Call, *rest) -> Tensor:
    """(softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v, [B, H, T, Dv] in the dtype of v.

    Checkpoints that earlier builds exported give the parts of a call in a row.
    """
    call = with_noise_head_for_each_mask(of_list(call, *rest) if rest else call)
    if call.v.dtype == torch.float16:  # CPUs multiply float16 slowly or not at all
        return attend(in_dtype(call, torch.float32)).half()
    if not call.gradients and _is_plain(call):
        out = _unwritten(call)
        _implementation(call).forward(call, out.transpose(1, 2))
        return out.transpose(1, 2)
    return forward(*call.inputs, call.attn_mask, call.is_causal, call.window, call.scale).transpose(1, 2)


def _implementation(call: Call):
    return native if native.supports(call) else in_torch


def _unwritten(call: Call) -> Tensor:
    """Memory for the output, [B, T, H, Dv]."""
    B, H, T, _ = call.q1.shape
    return call.v.new_empty(B, T, H, call.v.shape[3])


def _is_plain(call: Call) -> bool:
    """Whether nothing traces or compiles: then, without gradients, the operator's bookkeeping, which takes as long as a
    short query, is skipped."""
    if traced():
        return False
    for x in (*call[:6], call.attn_mask):  # noqa: SIM110 (a generator takes twice as long)
        if x is not None and not native.in_memory(x):
            return False
    return True


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
    """[B, T, H, Dv], contiguous and no view, so that the output can be changed in place."""
    call = of_list(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)
    out = _unwritten(call)
    _implementation(call).forward(call, out.transpose(1, 2))
    return out


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
    call = of_list(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)
    return _implementation(call).backward(call, dout)


@forward.register_fake
def _(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale):
    B, H, T, _ = q1.shape
    return v.new_empty(B, T, H, v.shape[-1])


@backward.register_fake
def _(dout, q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale):
    return tuple(x.new_empty(x.shape) for x in (q1, q2, k1, k2, v, lam))


def _save(ctx, inputs, output):
    *tensors, ctx.is_causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dout):
    gradients = backward(dout.transpose(1, 2), *ctx.saved_tensors, ctx.is_causal, ctx.window, ctx.scale)
    return (*gradients, None, None, None, None)


flops.count({
    torch.ops.diff_transformer.blockwise: flops.of_forward,
    torch.ops.diff_transformer.blockwise_backward: flops.of_backward,
})  # fmt: skip
forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(refuse_second_derivatives)
