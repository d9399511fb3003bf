"""Kernels for Hopper GPUs, written in Gluon: warp-specialised forward and backward of the Triton backend.

They compute what the plain Triton kernels compute, at the width where they were measured to be faster (support.py).
Gluon is experimental, so only tested versions of Triton are accepted, and on each machine a kernel is used for a width,
dtype and masking only after it passed a self-test there, in a subprocess (self_test.py). The environment variable
DIFF_TRANSFORMER_GLUON=0 switches them off; "forward" or "two_pass" allows only the kernels of that name.

Reading order: pipeline.py (barriers), fwd_sequential.py, bwd_dq.py, bwd_dkdv.py; forward.py and backward.py launch
them.
"""

from diff_transformer.ops.gluon.support import (
    KERNELS,
    SWITCH,
    WIDTHS,
    switched_off,
    unsupported_backward_shapes,
    unsupported_device,
    unsupported_shapes,
)
from diff_transformer.ops.triton.call import Call

__all__ = [
    "KERNELS",
    "SWITCH",
    "WIDTHS",
    "switched_off",
    "unsupported_backward_reason",
    "unsupported_reason",
]


def unsupported_reason(call: Call) -> str | None:
    """Why the forward kernel cannot compute this call, or None.

    The first call on a machine for a width, dtype and masking compiles and tests the kernel, which takes seconds.
    """
    reason = unsupported_device(call.q1.device, "forward") or unsupported_shapes(call)
    return reason or failed_self_test(call, "forward")


def unsupported_backward_reason(call: Call, one_pass: bool) -> str | None:
    """``unsupported_reason`` for the gradients; any forward may have come before."""
    reason = unsupported_device(call.q1.device, "two_pass") or unsupported_backward_shapes(call)
    if reason is None and one_pass:
        reason = "the Hopper backward takes two passes"
    return reason or failed_self_test(call, "two_pass")


def failed_self_test(call: Call, kernels: str) -> str | None:
    """Why the self-test did not pass on this machine, or None."""
    from diff_transformer.ops.gluon.self_test import fault_found

    fault = fault_found(call.q1.device, call.q1.shape[3], call.q1.dtype, call.is_causal, kernels)
    return None if fault is None else f"the Hopper kernel did not pass its check on this machine: {fault}"
