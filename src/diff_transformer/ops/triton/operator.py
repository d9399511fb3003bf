"""The kernels as PyTorch operators with gradients, so that they work with torch.compile, export and checkpointing.

Arguments are the fields of ``Call``. Results are those of ``forward.plan_forward`` and ``backward.launch_backward``.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from diff_transformer.ops import flops, gluon
from diff_transformer.ops.arguments import refuse_second_derivatives
from diff_transformer.ops.call import Call, Documents, of_list
from diff_transformer.ops.gluon.backward import attend_backward
from diff_transformer.ops.gluon.forward import attend_forward
from diff_transformer.ops.gluon.support import switched_off
from diff_transformer.ops.triton.backward import launch_backward
from diff_transformer.ops.triton.forward import plan_forward
from diff_transformer.ops.triton.launching import INTERPRETED as INTERPRETED
from diff_transformer.ops.triton.launching import like_queries, run, transposed_like
from diff_transformer.ops.triton.launching import rows_contiguous as rows_contiguous
from diff_transformer.ops.triton.tile_sizes import table_of

log = logging.getLogger("diff_transformer")


@torch.library.custom_op("diff_transformer::triton", mutates_args=())
def forward(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor | None,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    need_gradient: bool,
    one_pass: bool,
    by_gluon: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, [B, T, H, Dv] in memory, and what the backward needs: the results of ``plan_forward``.

    one_pass is for the backward. by_gluon: use Gluon if it can, in the backward too.
    """
    documents = None if cu_seqlens_q is None or cu_seqlens_k is None else Documents(cu_seqlens_q, cu_seqlens_k)
    call = of_list(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, documents)
    if by_gluon and _gluon_forward(call):
        return attend_forward(call, need_gradient)
    _announce("forward", str(q1.device), q1.dtype, "plain Triton")
    results, launches = plan_forward(call, need_gradient, table_of(q1))
    run(launches, q1.device)
    return results


@torch.library.custom_op("diff_transformer::triton_backward", mutates_args=())
def backward(
    dout: Tensor,
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor | None,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    out1: Tensor,
    out2: Tensor,
    lse1: Tensor,
    lse2: Tensor,
    is_causal: bool,
    window: int | None,
    scale: float,
    one_pass: bool,
    by_gluon: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q1, q2, k1, k2, v and lam; that of k2 is empty if k2 is None. by_gluon: use Gluon if it can."""
    one_pass = one_pass and not torch.are_deterministic_algorithms_enabled()
    passes = "one pass" if one_pass else "two passes"
    documents = None if cu_seqlens_q is None or cu_seqlens_k is None else Documents(cu_seqlens_q, cu_seqlens_k)
    call = of_list(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, documents)
    saved = (out1, out2, lse1, lse2)
    if by_gluon and _gluon_backward(call, one_pass, passes):
        return attend_backward(call, dout, saved)
    _announce("backward", str(q1.device), q1.dtype, f"plain Triton, {passes}")
    return launch_backward(call, dout, saved, one_pass)


@forward.register_fake
def _(
    q1, q2, k1, k2, v, lam, attn_mask, cu_seqlens_q, cu_seqlens_k, is_causal, window, scale, need_gradient, one_pass,
    by_gluon=True,
):  # fmt: skip
    B, H, T, _ = q1.shape
    out = v.new_empty(B, T, H, v.shape[3])
    out1, out2 = (like_queries(v, B, H, T) if need_gradient else v.new_empty(0) for _ in range(2))
    lse1, lse2 = (q1.new_empty((B, H, T) if need_gradient else 0, dtype=torch.float32) for _ in range(2))
    return out, out1, out2, lse1, lse2


@backward.register_fake
def _(dout, q1, q2, k1, k2, v, lam, *rest):
    dk2 = k1.new_empty(0) if k2 is None else transposed_like(k1)
    dlam = lam.new_empty(lam.shape)
    return transposed_like(q1), transposed_like(q2), transposed_like(k1), dk2, transposed_like(v), dlam


def _save(ctx, inputs, output):
    *tensors, ctx.is_causal, ctx.window, ctx.scale, _, ctx.one_pass, by_gluon = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)
    # Read now: the backward follows the switch as it was at its forward.
    ctx.by_gluon = by_gluon and not switched_off("two_pass")


def _differentiate(ctx, dout, *unused):
    if dout is None:
        return (None,) * 15
    rest = (ctx.is_causal, ctx.window, ctx.scale, ctx.one_pass, ctx.by_gluon)
    saved = ctx.saved_tensors
    dq1, dq2, dk1, dk2, dv, dlam = backward(dout.transpose(1, 2), *saved, *rest)
    return dq1, dq2, dk1, dk2 if saved[3] is not None else None, dv, dlam, *(None,) * 9


flops.count({
    torch.ops.diff_transformer.triton: flops.of_forward,
    torch.ops.diff_transformer.triton_backward: flops.of_backward,
})  # fmt: skip
forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(refuse_second_derivatives)


def _gluon_forward(call: Call) -> bool:
    """Whether the Gluon kernel computes the forward. Logs once why it does not."""
    if call.q1.device.type != "cuda":
        return False
    reason = gluon.unsupported_reason(call)
    _announce("forward", str(call.q1.device), call.q1.dtype, "Gluon" if reason is None else f"not Gluon: {reason}")
    return reason is None


def _gluon_backward(call: Call, one_pass: bool, passes: str) -> bool:
    """Whether the Gluon kernels compute the gradients. Logs once why they do not."""
    if call.q1.device.type != "cuda":
        return False
    reason = gluon.unsupported_backward_reason(call, one_pass)
    what = f"Gluon, {passes}" if reason is None else f"not Gluon: {reason}"
    _announce("backward", str(call.q1.device), call.q1.dtype, what)
    return reason is None


@cache
def _announce(direction: str, device: str, dtype: torch.dtype, what: str) -> None:
    log.info("backend='triton', %s on %s, %s: %s", direction, device, str(dtype).removeprefix("torch."), what)
