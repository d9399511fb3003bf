"""Transforms of PyTorch that kernels of our own do not follow: forward-mode AD, and those of torch.func."""

import torch
from torch.autograd import forward_ad


def active() -> str | None:
    """The transform inside which this is called, in words, or None."""
    if forward_ad._current_level >= 0:
        return "forward-mode AD"
    return "a transform of torch.func" if torch._C._are_functorch_transforms_active() else None


def refuse_second_derivatives(*_) -> None:
    """Stands where the derivative of a backward would be computed.

    Raises:
        NotImplementedError: always, with what to do.
    """
    raise NotImplementedError(
        "the kernels of diff_attention have no second derivatives; give backend='reference' for what is differentiated "
        "twice"
    )
