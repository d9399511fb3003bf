"""Packed documents: several in one row of tokens, none of which attends to another."""

from typing import NamedTuple

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Where the documents lie in a batch whose rows are put one after another.

    cu_seqlens: int32 [documents + 1], 0 and then where each document ends; longest: tokens of the longest.
    """

    cu_seqlens: Tensor
    longest: int

    def positions(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Each token's position in its document, int64 of ``shape`` [B, T]."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
        return (torch.arange(len(starts), device=starts.device) - starts).view(shape)


def split_documents(ids: Tensor, end: int) -> Documents:
    """The documents of ``ids [B, T]``: each ends with the token ``end``, or with its row."""
    ends = ids == end
    ends[:, -1] = True
    return _ending_at(ends)


def _ending_at(ends: Tensor) -> Documents:
    after = ends.flatten().nonzero().flatten() + 1
    bounds = torch.cat((after.new_zeros(1), after)).to(torch.int32)
    return Documents(bounds, int(bounds.diff().max()))


def restarts(position_ids: Tensor) -> bool:
    """Whether ``position_ids [B, T]`` do not count on by one somewhere in a row, where another document begins."""
    return bool((position_ids.diff(dim=-1) != 1).any())


def documents_at(position_ids: Tensor, batch: int) -> Documents:
    """The documents of ``position_ids [B or 1, T]`` in a batch of ``batch`` rows; none spans two rows."""
    ends = torch.ones_like(position_ids, dtype=torch.bool)
    ends[:, :-1] = position_ids.diff(dim=-1) != 1
    return _ending_at(ends.expand(batch, -1))


def take_documents(kwargs: dict) -> Documents | None:
    """Remove from ``kwargs`` what transformers' collators say of packed documents, and return it; None if nothing.

    Raises:
        ValueError: if queries and keys are packed differently, or something is missing.
    """
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    bounds, of_keys, longest, longest_key = (kwargs.pop(name, None) for name in names)
    if bounds is None:
        return None
    if longest is None:
        raise ValueError("cu_seq_lens_q came without max_length_q; give both, as DataCollatorWithFlattening does")
    same = of_keys is None or of_keys is bounds or torch.equal(of_keys, bounds)
    if not same or longest_key not in (None, longest):
        raise ValueError("queries and keys are packed differently; self-attention needs the same documents for both")
    return Documents(bounds, int(longest))
