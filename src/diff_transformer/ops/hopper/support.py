"""Which calls the Hopper kernels take: the installation, the device, and the tensors' dtypes, widths and strides.

Functions return the reason why a call is not supported, as a message, or None. Nothing here runs a kernel.
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
    if version not in RECORDED_TRITON and SWITCH not in os.environ:
        return f"no Hopper kernel ran with Triton {triton.__version__} yet; {SWITCH}=1 runs it"
    return None


def unsupported_tensors(call: Call) -> str | None:
    """Why the kernels do not take tensors like these, or None."""
    (B, H, T, width), v = call.q1.shape, call.v
    taken = (
        all(option is None for option in (call.attn_mask, call.window, call.documents, call.first))
        and v.dtype in DTYPES
        and (width, v.shape[3]) == (D, DV)
        and max(B, H) <= MAX_GRID
        and B * H * T < 2**31
        and all(x is None or read_by_tma(x) for x in call[:5])
    )
    if taken:
        return None
    return (
        f"the Hopper kernels take bfloat16 and float16 of widths {D} and {DV}, without attn_mask, window, packed "
        "documents and weight of the first map, as TMA reads them: rows contiguous and at multiples of 16 bytes"
    )


def read_by_tma(x: Tensor) -> bool:
    """True if a TMA descriptor can describe x as it lies in memory. A dimension of size 1 may have any stride."""
    strides = [x.stride(i) * x.element_size() for i in range(x.dim() - 1) if x.shape[i] > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in strides)
