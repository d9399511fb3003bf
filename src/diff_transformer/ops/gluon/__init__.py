"""Kernels for Hopper GPUs, written in Gluon: warp-specialised forward and backward of the Triton backend.

They compute what the plain Triton kernels compute, at the width where they were measured to be faster. Gluon is
experimental, and these kernels synchronise by hand: they run with the version of Triton of that record (support.py),
and with DIFF_TRANSFORMER_GLUON=1 also with others for which they were compiled. 0 switches them off; "forward" or
"two_pass" allows only the kernels of that name. Tests marked ``gpu`` compare them with the fp64 reference.

Reading order: pipeline.py (barriers), fwd_sequential.py, bwd_dq.py, bwd_dkdv.py; forward.py and backward.py launch
them.
"""

from diff_transformer.ops.call import Call
from diff_transformer.ops.gluon.support import (
    KERNELS,
    SWITCH,
    WIDTHS,
    switched_off,
    unsupported_backward_shapes,
    unsupported_device,
    unsupported_shapes,
)

__all__ = [
    "KERNELS",
    "SWITCH",
    "WIDTHS",
    "switched_off",
    "unsupported_backward_reason",
    "unsupported_reason",
]


def unsupported_reason(call: Call) -> str | None:
    """Why the forward kernel cannot compute this call, or None."""
    return unsupported_device(call.q1.device, "forward") or unsupported_shapes(call)


def unsupported_backward_reason(call: Call, one_pass: bool) -> str | None:
    """``unsupported_reason`` for the gradients; any forward may have come before."""
    reason = unsupported_device(call.q1.device, "two_pass") or unsupported_backward_shapes(call)
    if reason is None and one_pass:
        return "the Hopper backward takes two passes"
    return reason
