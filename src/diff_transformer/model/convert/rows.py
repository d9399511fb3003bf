"""Exact rearrangements of projection matrices: rows move, no number changes.

A projection has one row for each channel of its output, head after head: ``[heads * width, inputs]``.
"""

import torch
from torch import Tensor


def halves_from_interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of W_Q or W_K for a rotary embedding that turns halves, from ones for turning neighbours (2i, 2i + 1).

    Queries and keys move alike, so that every score ``q . k`` stays the same sum in another order.
    """
    heads = weight.unflatten(0, (-1, head_dim // 2, 2))  # [heads, d / 2, 2, inputs]
    return heads.transpose(1, 2).flatten(0, 2)


def interleaved_from_halves(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of ``halves_from_interleaved``."""
    heads = weight.unflatten(0, (-1, 2, head_dim // 2))  # [heads, 2, d / 2, inputs]
    return heads.transpose(1, 2).flatten(0, 2)


def adjacent_from_split(weight: Tensor, head_dim: int) -> Tensor:
    """Heads i and i + n/2 become neighbours 2i and 2i + 1: pairs as here, from pairs as in ``DiffLlama``."""
    heads = weight.unflatten(0, (2, -1, head_dim))  # [2, n / 2, d, inputs]
    return heads.transpose(0, 1).flatten(0, 2)


def split_from_adjacent(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of ``adjacent_from_split``."""
    heads = weight.unflatten(0, (-1, 2, head_dim))  # [n / 2, 2, d, inputs]
    return heads.transpose(0, 1).flatten(0, 2)


def take_heads(weight: Tensor, heads: list[int], width: int) -> Tensor:
    """The heads of ``weight`` in the order of ``heads``, any of them any number of times."""
    return weight.unflatten(0, (-1, width))[torch.tensor(heads)].flatten(0, 1)


def fold_head_norm(output: Tensor, norm: Tensor) -> Tensor:
    """W_O with the weight of the head norm in it: column ``c`` times ``norm[c % 2d]``; at least fp32.

    The product of the norm's weight and W_O is what the layer computes, so a norm without weight can follow with this
    matrix: exact but for the rounding of the product.
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    columns = output.to(wide).unflatten(1, (-1, norm.numel())) * norm.to(wide)
    return columns.flatten(1)
