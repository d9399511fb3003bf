"""Forward and backward of the Triton backend for Hopper GPUs, written in Gluon: a loading warp, two warpgroups.

They compute what the plain Triton kernels compute, for the shapes that matter most for speed; ``why_not`` and
``why_not_backward`` say which. Gluon is experimental: only tested versions of Triton are accepted, and on each machine
a kernel is used for a width, dtype and masking only after small problems came out right there, in a process of their
own (trial.py).
DIFF_TRANSFORMER_GLUON=0 does without them; a list, such as "forward,two_pass", allows what it names.
"""

import os

import torch
from torch import Tensor

SWITCH = "DIFF_TRANSFORMER_GLUON"
KERNELS = ("forward", "two_pass", "one_pass")
TESTED_TRITON = ((3, 6), (3, 7))
WIDTHS = {64: 128, 96: 192, 128: 256}  # D: Dv
LARGEST_GRID = 65535  # programs in the second and third dimension of a launch
DTYPES = (torch.bfloat16, torch.float16)


def why_not(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor,
    attn_mask: Tensor | None, cu_seqlens_q: Tensor | None, is_causal: bool, window: int | None,
) -> str | None:  # fmt: skip
    """Why these kernels cannot compute the forward of this call, or None. Shapes as in ``attend_forward``.

    The first call on a machine for a width, dtype and masking compiles and tries the kernel, which takes seconds.
    """
    reason = why_not_here(q1.device, "forward")
    reason = reason or why_not_shapes(q1, q2, k1, k2, v, attn_mask, cu_seqlens_q, window)
    return reason or _why_not_verified(q1, is_causal, "forward")


def why_not_backward(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor,
    attn_mask: Tensor | None, cu_seqlens_q: Tensor | None, is_causal: bool, window: int | None, one_pass: bool,
) -> str | None:  # fmt: skip
    """``why_not`` for the gradients, in two passes or one. Whether there was a Gluon forward does not matter."""
    kernels = backward_kernels(one_pass)
    reason = why_not_here(q1.device, kernels)
    reason = reason or why_not_backward_shapes(q1, q2, k1, k2, v, attn_mask, cu_seqlens_q, window)
    return reason or _why_not_verified(q1, is_causal, kernels)


def backward_kernels(one_pass: bool) -> str:
    """The name among KERNELS."""
    return "one_pass" if one_pass else "two_pass"


def _why_not_verified(q1: Tensor, is_causal: bool, kernels: str) -> str | None:
    from diff_transformer.ops.triton.gluon.trial import fault_found

    fault = fault_found(q1.device, q1.shape[3], q1.dtype, is_causal, kernels)
    return None if fault is None else f"the Hopper kernel did not pass its check on this machine: {fault}"


def switched_off(kernels: str) -> bool:
    """Whether the user does without these, one of KERNELS.

    Raises:
        ValueError: the environment variable is neither 0 nor 1 nor a list of names.
    """
    given = os.environ.get(SWITCH, "1")
    if given in ("0", "1"):
        return given == "0"
    allowed = given.split(",")
    unknown = [name for name in allowed if name not in KERNELS]
    if unknown:
        raise ValueError(f"{SWITCH} is {given!r}; give 0, 1, or some of {','.join(KERNELS)} with commas between them")
    return kernels not in allowed


def why_not_here(device: torch.device, kernels: str) -> str | None:
    """Why the kernels, one of KERNELS, cannot run on the device with this installation, or None."""
    if switched_off(kernels):
        return f"{SWITCH} is {os.environ[SWITCH]}"
    if device.type != "cuda":
        return f"the Hopper kernel needs a CUDA device, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return f"the Hopper kernel needs compute capability 9.x, not {capability[0]}.{capability[1]}"
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) not in TESTED_TRITON:
        tested = " and ".join(f"{major}.{minor}" for major, minor in TESTED_TRITON)
        return f"the Hopper kernel was tested with Triton {tested}, not {triton.__version__}"
    return None


def why_not_backward_shapes(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor,
    attn_mask: Tensor | None, cu_seqlens_q: Tensor | None, window: int | None,
) -> str | None:  # fmt: skip
    """Why the gradient kernels do not take tensors like these, or None."""
    B, H, T = q1.shape[:3]
    if max(B, H) > LARGEST_GRID or B * H * T >= 2**31:
        return f"the Hopper backward takes batches and heads up to {LARGEST_GRID} and 2^31 rows, not {B} x {H} x {T}"
    return why_not_shapes(q1, q2, k1, k2, v, attn_mask, cu_seqlens_q, window)


def why_not_shapes(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor,
    attn_mask: Tensor | None, cu_seqlens_q: Tensor | None, window: int | None,
) -> str | None:  # fmt: skip
    """Why the kernels do not take tensors like these, or None."""
    if attn_mask is not None or window is not None or cu_seqlens_q is not None:
        return "the Hopper kernel takes no attn_mask, no window and no packed documents"
    if q1.dtype not in DTYPES:
        return f"the Hopper kernel takes bfloat16 and float16, not {q1.dtype}"
    if WIDTHS.get(q1.shape[3]) != v.shape[3]:
        pairs = ", ".join(f"({d}, {dv})" for d, dv in WIDTHS.items())
        return f"the Hopper kernel takes query and value widths {pairs}, not ({q1.shape[3]}, {v.shape[3]})"
    for name, x in {"q1": q1, "q2": q2, "k1": k1, "k2": k2, "v": v}.items():
        reason = None if x is None else why_not_tma(x)
        if reason is not None:
            return f"{name} {reason}, which TMA cannot read"
    return None


def why_not_tma(x: Tensor) -> str | None:
    """Why no TMA descriptor can describe x as it lies in memory, or None. A dimension of size 1 may have any stride."""
    if x.stride(-1) != 1:
        return "has a last dimension that is not contiguous"
    if x.data_ptr() % 16:
        return f"starts {x.data_ptr() % 16} bytes beyond a multiple of 16"
    for i in range(x.dim() - 1):
        stride = x.stride(i) * x.element_size()
        if x.shape[i] > 1 and (stride <= 0 or stride % 16):
            return f"has a stride in dimension {i} that is no positive multiple of 16 bytes"
    return None


def attend_forward(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor,
    is_causal: bool, window: int | None, scale: float, need_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Differential attention on a Hopper GPU, for arguments that ``why_not`` does not refuse.

    Args:
        q1: [B, H, T, D], bfloat16 or float16, like q2, k1, k2 and v; D is 64, 96 or 128.
        q2: [B, Hn, T, D]. k1, k2: [B, G, S, D]; k2 is None where it is k1. v: [B, G, S, 2 D].
        lam: [B, H, T, 1], float32, any strides.
        is_causal: lower right alignment. window: must be None. scale: factor of the scores, of any sign.
        need_gradient: whether the backward will want out2, lse1 and lse2; they are empty otherwise.

    Returns:
        out [B, H, T, 2 D] and out2 = softmax(q2 k2^T scale) v, both in the dtype of v and in memory [B, T, H, 2 D];
        lse1 and lse2 [B, H, T], float32, in base 2: log2(sum(exp2(scores scale log2 e))). A row that sees nothing has
        out 0 and lse +inf.

    Raises:
        ValueError: tensors that the kernels do not take.
    """
    reason = why_not_shapes(q1, q2, k1, k2, v, None, None, window)
    if reason is not None:
        raise ValueError(reason)
    from diff_transformer.ops.triton.gluon.forward import launch

    return launch(q1, q2, k1, k2, v, lam, is_causal, scale, need_gradient)[0]


def attend_backward(
    dout: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor | None, v: Tensor, lam: Tensor,
    out: Tensor, out2: Tensor, lse1: Tensor, lse2: Tensor,
    is_causal: bool, window: int | None, scale: float, one_pass: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients on a Hopper GPU, for arguments that ``why_not_backward`` does not refuse.

    Args:
        dout: [B, H, T, 2 D], the gradient of the output, in the dtype of v; any strides.
        q1, q2, k1, k2, v, lam, is_causal, window, scale: as in ``attend_forward``.
        out, out2, lse1, lse2: what the forward returned for a gradient.
        one_pass: add up dq1 and dq2 in fp32 with atomics, in whatever order programs come to them, instead of
            computing the maps again in a second pass whose results repeat bit for bit.

    Returns:
        dq1 [B, H, T, D], dq2 [B, Hn, T, D], dk1, dk2 [B, G, S, D] and dv [B, G, S, 2 D] in their dtypes, in memory [B,
        length, heads, width]; dlam [B, H, T, 1], fp32. Without k2 the gradient of k1 is both maps' and that of k2 is
        empty.

    Raises:
        ValueError: tensors that the kernels do not take.
    """
    reason = why_not_backward_shapes(q1, q2, k1, k2, v, None, None, window)
    if reason is not None:
        raise ValueError(reason)
    from diff_transformer.ops.triton.gluon.backward import launch

    if why_not_tma(dout) is not None:  # the gradient of a sum has strides 0
        dout = dout.contiguous()
    return launch(dout, q1, q2, k1, k2, v, lam, out, out2, lse1, lse2, is_causal, scale, one_pass)[0]
