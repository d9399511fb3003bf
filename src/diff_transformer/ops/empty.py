"""Calls without a query or without a key: whatever rows there are see nothing and give 0, in every backend."""

import torch
from torch import Tensor


def is_empty(q1: Tensor, k1: Tensor) -> bool:
    """Whether a batch without entries, no queries or no keys leave nothing to compute; [B, heads, length, width]."""
    return not (q1.numel() and k1.numel())


def zeros(shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor) -> Tensor:
    """Zeros whose gradients by ``inputs`` are zeros too, instead of none."""
    nothing = [x[:0].sum().to(dtype) for x in inputs]
    return sum(nothing, inputs[0].new_zeros(shape, dtype=dtype))
