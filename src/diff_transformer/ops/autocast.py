"""Autocast, as the operator follows it: queries, keys and values are cast, lam is not."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def cast(*tensors):
    """The tensors in the autocast dtype where autocast is on (float64 is left alone, as autocast does).

    Neighbours that are one tensor (k1 and k2) stay one.
    """
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not enabled(device) or not all(isinstance(x, Tensor) for x in tensors):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    done: list[Tensor] = []
    for i, x in enumerate(tensors):
        if i and x is tensors[i - 1]:
            done.append(done[-1])
        else:
            done.append(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x)
    return tuple(done)


def without(device: str) -> AbstractContextManager:
    """In which nothing is cast."""
    return torch.autocast(device, enabled=False) if enabled(device) else nullcontext()


def enabled(device: str) -> bool:
    """Whether autocast is on; a type of device may have none, such as meta."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
