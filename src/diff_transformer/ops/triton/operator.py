"""The kernels as PyTorch operators with gradients, so that they work with torch.compile, export and checkpointing.

Arguments are the first fields of ``Call``. Results are those of ``forward.plan_forward`` and
``backward.plan_backward``.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.arguments import no_second_derivatives
from diff_transformer.ops.call import OPERANDS, SCHEMA, TENSORS, Call
from diff_transformer.ops.hopper import backward as hopper_backward
from diff_transformer.ops.hopper import forward as hopper_forward
from diff_transformer.ops.hopper.support import unsupported_reason
from diff_transformer.ops.triton.backward import plan_backward
from diff_transformer.ops.triton.forward import plan_forward
from diff_transformer.ops.triton.launching import INTERPRETED as INTERPRETED
from diff_transformer.ops.triton.launching import launched, like_queries, transposed_like
from diff_transformer.ops.triton.tile_sizes import table_of

log = logging.getLogger("diff_transformer")


@torch.library.custom_op(
    "diff_transformer::triton",
    mutates_args=(),
    schema=f"({SCHEMA}, bool by_hopper, bool need_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, [B, T, H, Dv] in memory, and what the backward needs: the results of ``plan_forward``.

    by_hopper: use the Hopper kernels where they support the call, in the backward too.
    """
    *operands, by_hopper, need_gradient = arguments
    call = Call(*operands)
    if by_hopper and _by_hopper("forward", call):
        return launched(*hopper_forward.plan_forward(call, need_gradient))
    return launched(*plan_forward(call, need_gradient, table_of(call.q1)))


@torch.library.custom_op(
    "diff_transformer::triton_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {SCHEMA}, bool by_hopper, Tensor out1, Tensor out2, Tensor lse1, Tensor lse2) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(dout: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q1, q2, k1, k2, v, lam and first; those of k2 and of first are empty if these are None."""
    *operands, by_hopper, out1, out2, lse1, lse2 = arguments
    call, saved = Call(*operands), (out1, out2, lse1, lse2)
    if by_hopper and _by_hopper("backward", call):
        gradients = launched(*hopper_backward.plan_backward(call, dout, saved))
        return *hopper_backward.summed(call, gradients), call.lam.new_empty(0)
    return launched(*plan_backward(call, dout, saved, table_of(call.q1)))


@forward.register_fake
def _(q1, q2, k1, k2, v, *rest):
    need_gradient = rest[-1]
    B, H, T, _ = q1.shape
    out = v.new_empty(B, T, H, v.shape[3])
    out1, out2 = (like_queries(v, B, H, T) if need_gradient else v.new_empty(0) for _ in range(2))
    lse1, lse2 = (q1.new_empty((B, H, T) if need_gradient else 0, dtype=torch.float32) for _ in range(2))
    return out, out1, out2, lse1, lse2


@backward.register_fake
def _(dout, q1, q2, k1, k2, v, lam, first, *rest):
    dk2 = k1.new_empty(0) if k2 is None else transposed_like(k1)
    dlam, dfirst = lam.new_empty(lam.shape), lam.new_empty(0 if first is None else lam.shape)
    return transposed_like(q1), transposed_like(q2), transposed_like(k1), dk2, transposed_like(v), dlam, dfirst


def _save(ctx, inputs, output):
    tensors, ctx.options = inputs[:TENSORS], inputs[TENSORS:-1]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, *unused):
    if dout is None:
        return (None,) * (OPERANDS + 2)
    unpacked = ctx.saved_tensors  # once: recomputation unpacks them no second time
    tensors, saved = unpacked[:TENSORS], unpacked[TENSORS:]
    computed = backward(dout.transpose(1, 2), *tensors, *ctx.options, *saved)
    gradients = [None if x is None else gradient for x, gradient in zip(tensors[:7], computed, strict=True)]
    return *gradients, *(None,) * (OPERANDS - 5)


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(no_second_derivatives)


def _by_hopper(direction: str, call: Call) -> bool:
    """True if the Hopper kernels compute this direction, "forward" or "backward". Logs once which kernels do."""
    reason = unsupported_reason(call)
    _announce(direction, str(call.q1.device), call.q1.dtype, reason)
    return reason is None


@cache
def _announce(direction: str, device: str, dtype: torch.dtype, reason: str | None) -> None:
    kernels = "Hopper kernels" if reason is None else f"plain Triton: {reason}"
    log.info("backend='triton', %s on %s, %s: %s", direction, device, str(dtype).removeprefix("torch."), kernels)
