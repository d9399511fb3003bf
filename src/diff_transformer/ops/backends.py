"""Which backend computes a call: ``resolve``."""

import logging
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.ops import cpu, reference, sdpa, table, triton
from diff_transformer.ops.arguments import DTYPES, active_transform
from diff_transformer.ops.call import Call, replace


class Backend(Protocol):
    """The interface of a backend's module."""

    def unsupported_reason(self, call: Call, /) -> str | None:
        """Why the backend cannot compute this call, or None. Packed documents that it refuses come one by one."""
        ...

    def attend(self, call: Call, /) -> Tensor:
        """(first softmax(q1 k1^T scale) - lam softmax(q2 k2^T scale)) v, [B, H, T, Dv] in the dtype of v."""
        ...


BACKENDS: dict[str, Backend] = {"reference": reference, "blockwise": cpu, "sdpa": sdpa, "triton": triton}
PURE_PYTORCH = ("reference", "sdpa")  # follow PyTorch's transforms as far as PyTorch's own operators do

log = logging.getLogger("diff_transformer")


def resolve(call: Call) -> Call:
    """The call with the backend that computes it with all gradients that it needs.

    Logs once what "auto" takes.

    Raises:
        UserError: for an unknown name, and a named backend that cannot work here, on this call or in this transform.
    """
    backend, device = call.backend, call.q1.device
    if backend == "auto":
        backend, because = of_auto(call)
        if not torch.compiler.is_compiling():
            _announce(device.type, call.q1.dtype, backend, because)
        return replace(call, backend=backend)
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise UserError(f"backend is {backend!r}; give 'auto' or one of {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].unsupported_reason(_unpacked(call))
    if reason is not None:
        here = ", ".join(available_backends(device, call.q1.dtype)) or "none"
        raise UserError(f"backend={backend!r} is not available: {reason}; available here: {here}")
    transform = active_transform()
    if transform is not None and backend not in PURE_PYTORCH:
        raise UserError(
            f"backend={backend!r} does not follow {transform}; give backend='reference' or 'auto', which is that here"
        )
    if "attn_mask" in call.gradients and backend != "reference":
        raise UserError(
            f"attn_mask requires grad, which backend={backend!r} does not compute; "
            "give backend='reference' or 'auto', or detach the mask"
        )
    return call


def of_auto(call: Call) -> tuple[str, str]:
    """The backend that "auto" means, and the reason for not taking a faster one."""
    if "attn_mask" in call.gradients:
        return "reference", "attn_mask requires grad"
    transform = active_transform()
    if transform is not None:
        return "reference", f"inside {transform}"
    if call.q1.device.type in ("cpu", "meta"):
        reason = cpu.unsupported_reason(_unpacked(call))
        return ("blockwise", "") if reason is None else ("sdpa", f"not 'blockwise', since {reason}")
    reason = triton.unsupported_reason(call)
    if reason is not None:
        return "sdpa", f"not 'triton', since {reason}"
    return "triton" if table.prefers_triton(call) else "sdpa", ""


def _unpacked(call: Call) -> Call:
    """The call as if all rows were one document."""
    return call if call.cu_seqlens_q is None else replace(call, cu_seqlens_q=None, cu_seqlens_k=None)


@cache
def _announce(device: str, dtype: torch.dtype, backend: str, because: str) -> None:
    because = because and f" ({because})"
    log.info("diff_attention on %s, %s: backend=%r%s", device, str(dtype).removeprefix("torch."), backend, because)


def available_backends(device: str | torch.device, dtype: torch.dtype) -> list[str]:
    """Names that ``diff_attention(backend=...)`` accepts for tensors of this device and dtype, the specification first.

    "triton" is not listed for the CPU, where only its interpreter runs (TRITON_INTERPRET=1, for tests). The list is
    empty for dtypes other than bfloat16, float16, float32 and float64, and for a device that this machine does not
    have.
    """
    device = torch.device(device)
    if dtype not in DTYPES:
        return []
    try:
        x = torch.empty(1, 1, 1, 16, dtype=dtype, device=device)
    except (RuntimeError, AssertionError, TypeError):  # not here; PyTorch was built without it; it has no such dtype
        return []
    call = Call(x, x, x, None, x, x)
    names = [name for name, backend in BACKENDS.items() if backend.unsupported_reason(call) is None]
    return [name for name in names if not (name == "triton" and device.type == "cpu")]
