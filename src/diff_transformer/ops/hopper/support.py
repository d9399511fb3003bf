"""Which calls the Hopper kernels take: the installation, the device, and the tensors' dtypes, widths and strides.

Each function returns the reason why a call is not supported, as a message, or None. Nothing here runs a kernel.
"""

import os

import torch
from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.ops.call import Call

SWITCH = "DIFF_TRANSFORMER_HOPPER"
D, DV = 128, 256  # widths of queries and values
# Triton with which an H200 ran them: right, and faster than plain Triton (benchmarks/results/attention_gpu.json).
RECORDED_TRITON = ((3, 6),)
COMPILED_TRITON = ((3, 6), (3, 7))  # versions with which the compile checks pass: these run on request
MAX_GRID = 65535  # programs in the second and third dimension of a launch
DTYPES = (torch.bfloat16, torch.float16)


def unsupported_reason(call: Call) -> str | None:
    """Why the Hopper kernels do not compute this call, or None."""
    device = call.q1.device
    if device.type != "cuda":
        return f"the Hopper kernels need a CUDA device, not {device.type}"
    return unsupported_installation(device.index) or unsupported_tensors(call)


def switched_off() -> bool:
    """True if the environment variable DIFF_TRANSFORMER_HOPPER switches the Hopper kernels off.

    Raises:
        UserError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise UserError(f"{SWITCH} is {value!r}; give 0 (off) or 1 (also with a Triton of which there is no record)")
    return value == "0"


def unsupported_installation(index: int | None) -> str | None:
    """Why the kernels cannot run on a GPU with this installation, or None."""
    capability = torch.cuda.get_device_capability(index)
    if capability[0] != 9:
        return f"the Hopper kernels need compute capability 9.x, not {capability[0]}.{capability[1]}"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version not in COMPILED_TRITON:
        tested = " and ".join(f"{major}.{minor}" for major, minor in COMPILED_TRITON)
        return f"the Hopper kernels were tested with Triton {tested}, not {triton.__version__}"
    if version not in RECORDED_TRITON and SWITCH not in os.environ:
        return f"no Hopper kernel ran with Triton {triton.__version__} yet; {SWITCH}=1 runs it"
    return None


def unsupported_tensors(call: Call) -> str | None:
    """Why the kernels do not take tensors like these, or None."""
    if call.attn_mask is not None or call.window is not None or call.documents is not None:
        return "the Hopper kernels take no attn_mask, no window and no packed documents"
    if call.first is not None:
        return "the Hopper kernels take no weight of the first map"
    q1, v = call.q1, call.v
    if q1.dtype not in DTYPES:
        return f"the Hopper kernels take bfloat16 and float16, not {q1.dtype}"
    if (q1.shape[3], v.shape[3]) != (D, DV):
        return f"the Hopper kernels take query and value widths ({D}, {DV}), not ({q1.shape[3]}, {v.shape[3]})"
    B, H, T = q1.shape[:3]
    if max(B, H) > MAX_GRID or B * H * T >= 2**31:
        return f"the Hopper kernels take batches and heads up to {MAX_GRID} and 2^31 rows, not {B} x {H} x {T}"
    for name, x in {"q1": q1, "q2": call.q2, "k1": call.k1, "k2": call.k2, "v": v}.items():
        reason = None if x is None else unsupported_by_tma(x)
        if reason is not None:
            return f"{name} {reason}, which TMA cannot read"
    return None


def unsupported_by_tma(x: Tensor) -> str | None:
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
