"""Which backend computes a call: ``resolve``.

On a GPU ``table.look_up`` has the answer; elsewhere a static order.
"""

import logging
from functools import cache
from typing import Any

import torch

from diff_transformer.ops import cpu, reference, softmax_calls, table, triton
from diff_transformer.ops.arguments import DTYPES, active_transform, exporting
from diff_transformer.ops.call import Call, replace

# Each has ``attend(call)`` -> [B, H, T, Dv]. Those that have limits have ``unsupported_reason(device, dtype)`` and
# ``unsupported_call_reason(call)``; those that can compute all packed documents at once have ``takes_packed(call)``.
BACKENDS: dict[str, Any] = {
    "reference": reference,
    "blockwise": cpu,
    "sdpa": softmax_calls.Sdpa,
    "flex": softmax_calls.Flex,
    "flash": softmax_calls.Flash,
    "triton": triton,
}
LOOKED_UP = ("cuda",)  # types of devices on which "auto" looks up what computes
PURE_PYTORCH = ("reference", "sdpa")  # follow PyTorch's transforms as far as PyTorch's own operators do

log = logging.getLogger("diff_transformer")


def resolve(call: Call) -> Call:
    """The call with the backend, and perhaps a variant of it, that computes it with all gradients that it needs.

    Logs once what "auto" takes.

    Raises:
        TypeError: no name. ValueError: an unknown name, or as ``check_environment``. RuntimeError: the named backend
        cannot work here, or not on this call. NotImplementedError: it cannot compute a needed gradient, or does not
        support the transform that the call is made in.
    """
    backend, device = call.backend, call.q1.device
    if not torch.compiler.is_compiling():
        table.check_environment()
    if backend == "auto":
        backend, variant, because = of_auto(call)
        if not torch.compiler.is_compiling():
            _announce(device.type, call.q1.dtype, backend, variant, because)
        return replace(call, backend=backend, variant=variant)
    if not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}; give one name: 'auto' or one of {', '.join(BACKENDS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; give 'auto' or one of {', '.join(BACKENDS)}")
    reason = unsupported_reason(backend, call)
    if reason is not None:
        here = ", ".join(available_backends(device, call.q1.dtype)) or "none"
        raise RuntimeError(f"backend={backend!r} is not available: {reason}; available here: {here}")
    transform = active_transform()
    if transform is not None and backend not in PURE_PYTORCH:
        raise NotImplementedError(
            f"backend={backend!r} does not follow {transform}; give backend='reference' or 'auto', which is that here"
        )
    if "attn_mask" in call.gradients and backend != "reference":
        raise NotImplementedError(
            f"attn_mask requires grad, which backend={backend!r} does not compute; "
            "give backend='reference' or 'auto', or detach the mask"
        )
    if backend == "flex" and call.gradients and (reason := softmax_calls.Flex.no_gradients_reason(device)) is not None:
        raise NotImplementedError(f"{', '.join(call.gradients)} require grad: {reason}")
    return call


def of_auto(call: Call) -> tuple[str, Any, str]:
    """What "auto" means: (backend, variant, the reason for not taking a faster one)."""
    if "attn_mask" in call.gradients:
        return "reference", None, "attn_mask requires grad"
    transform = active_transform()
    if transform is not None:
        return "reference", None, f"inside {transform}"
    if exporting():
        return "sdpa", None, "an exported program must load without this package's operators"
    device = call.q1.device.type
    if device in ("cpu", "meta") and device not in LOOKED_UP:
        reason = unsupported_reason("blockwise", call)
        return ("blockwise", None, "") if reason is None else ("sdpa", None, f"not 'blockwise', since {reason}")
    reason = unsupported_reason("triton", call)
    because = "" if reason is None else f"not 'triton', since {reason}"
    if device in LOOKED_UP:
        return *table.look_up(call, reason is None), because
    return "triton" if reason is None else "sdpa", None, because


def unsupported_reason(backend: str, call: Call) -> str | None:
    """Why the backend cannot compute this call, or None."""
    reason = _ask(backend, "unsupported_reason", call.q1.device, call.q1.dtype)
    return reason or _ask(backend, "unsupported_call_reason", call)


def takes_packed(call: Call) -> bool:
    """Whether the backend of a resolved call computes all packed documents at once."""
    return bool(_ask(call.backend, "takes_packed", call))


def _ask(backend: str, question: str, *given: Any) -> Any:
    """What the backend answers, or None."""
    answer = getattr(BACKENDS[backend], question, None)
    return None if answer is None else answer(*given)


@cache
def _announce(device: str, dtype: torch.dtype, backend: str, variant: Any, because: str) -> None:
    name, variant = str(dtype).removeprefix("torch."), "" if variant is None else f", {variant.name}"
    because = because and f" ({because})"
    log.info("diff_attention on %s, %s: backend=%r%s%s", device, name, backend, variant, because)


def available_backends(device: str | torch.device, dtype: torch.dtype) -> list[str]:
    """Names that ``diff_attention(backend=...)`` accepts for tensors of this device and dtype, the specification first.

    "flex" is listed where its forward works; on the CPU it has no backward. "triton" is not listed for the CPU, where
    only its interpreter runs (TRITON_INTERPRET=1, for tests). The list is empty for dtypes other than bfloat16,
    float16, float32 and float64, and for a device that this machine does not have.

    Raises:
        TypeError: dtype is no torch.dtype, or device is neither a name nor a device.
        RuntimeError: PyTorch does not know the device's name.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; give a torch.dtype, such as torch.float32")
    if not isinstance(device, str | int | torch.device):
        raise TypeError(f"device is {device!r}; give a name, such as 'cuda', or a torch.device")
    device = torch.device(device)
    if dtype not in DTYPES or not _exists(device):
        return []
    names = [name for name in BACKENDS if _ask(name, "unsupported_reason", device, dtype) is None]
    return [name for name in names if not (name == "triton" and device.type == "cpu")]


def _exists(device: torch.device) -> bool:
    """Whether this machine has the device; true for devices without an availability check, such as meta."""
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "is_available"):
        return True
    return module.is_available() and (device.index is None or device.index < module.device_count())
