"""Checks of a call's arguments, autocast, and the detection of tracing and torch.func."""

import math
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from diff_transformer.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SMALLEST = torch.finfo(torch.float32).tiny  # a scale that kernels can divide by


def autocast_input(x: Any) -> Any:
    """A tensor in the autocast dtype where autocast is on. fp64 stays, as in PyTorch."""
    if not isinstance(x, Tensor) or not _autocast_enabled(x.device.type):
        return x
    casts = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if casts else x


def autocast_off(device: str) -> AbstractContextManager:
    """Context manager that disables autocast."""
    return torch.autocast(device, enabled=False) if _autocast_enabled(device) else nullcontext()


def _autocast_enabled(device: str) -> bool:
    """True if autocast is on. The meta device has none; ``is_autocast_available`` would say so, but torch.compile of
    torch 2.11 cannot trace it."""
    return device != "meta" and torch.is_autocast_enabled(device)


def check_options(
    is_causal: bool, window: int | None, scale: float | None, lengths: tuple[int, int], width: int
) -> tuple[int | None, float]:
    """The window, at most as long as the longer of ``lengths`` (queries, keys), and the scale of ``width``.

    A longer window hides nothing, and kernels add positions to it in 32 bits.

    Raises:
        UserError: for a scale or a window out of range, and for a window without is_causal.
    """
    if scale is None:
        scale = width**-0.5
    else:
        scale = float(scale)
        if not -math.inf < scale < math.inf:  # torch.compile cannot trace math.isfinite
            raise UserError(f"scale is {scale}; give a finite number, or None for D ** -0.5")
        scale = scale if abs(scale) >= SMALLEST else 0.0
    if window is None:
        return None, scale
    window = window if type(window) is int else index(window)
    if window < 1:
        raise UserError(f"window is {window}; give at least 1 (the query's own position) or None")
    if not is_causal:
        raise UserError(
            f"window={window} without is_causal=True; a window counts back from the query's own position. "
            "Set is_causal=True, or give another band as a boolean attn_mask"
        )
    return min(window, max(1, *lengths)), scale


FITTING = (
    "q1 [B, H, T, D], q2 [B, Hn, T, D], k1 and k2 [B, G, S, D] and v [B, G, S, Dv], where G divides Hn, Hn divides H, "
    "and B, T and S alone may be 0"
)


def check_tensors(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor) -> None:
    """Raise unless the shapes fit together and the tensors have one device and one of ``DTYPES``."""
    try:
        fit = (
            shapes_fit(q1.shape, q2.shape, k1.shape, k2.shape, v.shape)
            and q1.dtype == q2.dtype == k1.dtype == k2.dtype == v.dtype
            and q1.dtype in DTYPES
            and q1.device == q2.device == k1.device == k2.device == v.device
        )
    except (AttributeError, TypeError):  # of what is no tensor
        fit = False
    if not fit:
        named = zip(("q1", "q2", "k1", "k2", "v"), (q1, q2, k1, k2, v), strict=True)
        operands = "; ".join(f"{name} is {described(x)}" for name, x in named)
        raise UserError(f"{operands}: give {FITTING}; all float32, bfloat16, float16 or float64, and on one device")


def described(x: Any) -> str:
    """The shape, dtype and device of a tensor, or the type of anything else, for a message."""
    return f"{list(x.shape)}, {x.dtype}, {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def shapes_fit(q1, q2, k1, k2, v) -> bool:
    """True if tensors of these shapes are ``FITTING``."""
    if not len(q1) == len(q2) == len(k1) == len(v) == 4:
        return False
    (B, H, T, D), Hn, (G, S), Dv = q1, q2[1], k1[1:3], v[3]
    same = q2 == (B, Hn, T, D) and k1 == k2 == (B, G, S, D) and v == (B, G, S, Dv)
    return same and H * Hn * G * D * Dv > 0 and H % Hn == Hn % G == 0


def weight_for_every_row(name: str, x: float | Tensor, q1: Tensor) -> Tensor:
    """The weight of a map as a view of [B, H, T, 1] in fp32 (fp64 when q1 is fp64), on the device of q1.

    name: of the argument, "lam" or "first".
    """
    B, H, T, _ = q1.shape
    dtype = torch.promote_types(q1.dtype, torch.float32)
    if not isinstance(x, Tensor):
        return torch.full((1, 1, 1, 1), float(x), dtype=dtype, device=q1.device).expand(B, H, T, 1)
    weight = x.to(dtype=dtype) if x.dim() else x.to(device=q1.device, dtype=dtype)
    if weight.device == q1.device:
        if x.dim() == 1 and x.shape[0] in (1, H):
            return weight[None, :, None, None].expand(B, H, T, 1)
        if x.dim() == 0 or (x.dim() > 1 and broadcasts(x.shape, (B, H, T, 1))):
            return weight.expand(B, H, T, 1)
    raise UserError(
        f"{name} is {described(x)}; give a float, a scalar, [{H}] (one per head) "
        f"or dimensions that broadcast to [{B}, {H}, {T}, 1], on {q1.device}"
    )


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """True if a tensor of this shape broadcasts to ``full``."""
    sizes = zip(reversed(shape), reversed(full), strict=False)
    return len(shape) <= len(full) and all(n in (1, size) for n, size in sizes)


def four_dimensional_mask(attn_mask: Tensor | None, q1: Tensor, S: int) -> Tensor | None:
    """attn_mask as [B|1, H|1, T|1, S|1]."""
    if attn_mask is None:
        return None
    full = (*q1.shape[:3], S)  # [B, H, T, S]
    if not (
        isinstance(attn_mask, Tensor)
        and (attn_mask.dtype == torch.bool or attn_mask.is_floating_point())
        and attn_mask.device == q1.device
        and broadcasts(attn_mask.shape, full)
    ):
        raise UserError(
            f"attn_mask is {described(attn_mask)}; give None, or bool (True = attend) or a floating-point mask that is "
            f"added, that broadcasts to {list(full)}, on {q1.device}"
        )
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def traced() -> bool:
    """True if something records the call, or replaces what its operators do: torch.compile, torch.export,
    torch.jit.trace and the exporters on it, make_fx, fake tensors, counters of FLOPs.

    Values then cannot be read, and what is computed at an address is not seen.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or _get_current_dispatch_mode() is not None


def no_second_derivatives(ctx, *gradients):
    """Raise UserError: kernels do not compute the derivative of their backward."""
    raise UserError("second derivatives pass through diff_attention; give backend='reference', which computes them")


def active_transform() -> str | None:
    """The transform that surrounds the call and that kernels of our own do not support, as a message, or None."""
    if forward_ad._current_level >= 0:
        return "forward-mode AD"
    return "a transform of torch.func" if torch._C._are_functorch_transforms_active() else None
