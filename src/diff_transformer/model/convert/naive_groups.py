"""The authors' plain (not flash) file under grouped-query attention, and how to hold a model trained with it.

That file repeats the 2g key heads of the g key/value pairs r times, one after another, and then takes neighbours as the
two maps. Differential head i so meets keys 2i // r and (2i + 1) // r, where the flash files give it both keys of pair
i // r; values agree. With an even r both maps meet the same key. Multi-head attention (r = 1) is not affected.
"""

import torch
from torch import Tensor

from diff_transformer.model.convert.rows import take_heads


def naive_sources(diff_heads: int, pairs: int) -> tuple[list[int], list[int]]:
    """Which key head and which value head of the naive file each head here repeats, so that the outputs are equal.

    Returns the sources of two key heads and of one value head for each key/value pair here. Consecutive heads that
    meet the same keys and values share a pair: with an even r there are twice the pairs, with an odd one as many as
    differential heads.
    """
    r = diff_heads // pairs
    met = [((2 * i) // r, (2 * i + 1) // r, i // r) for i in range(diff_heads)]
    size = next(s for s in range(diff_heads, 0, -1) if diff_heads % s == 0 and _same_in_blocks(met, s))
    kept = met[::size]
    return [key for first, second, _ in kept for key in (first, second)], [value for _, _, value in kept]


def _same_in_blocks(items: list, size: int) -> bool:
    return all(item == items[i - i % size] for i, item in enumerate(items))


def single_keys(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse for W_K and an even r: one of every two equal key heads.

    Raises:
        ValueError: if they are not equal; the naive file then cannot hold the model.
    """
    return _halved(weight, head_dim, "the two maps of a key/value pair have different keys")


def single_values(weight: Tensor, value_dim: int) -> Tensor:
    """The inverse for W_V and an even r: one of every two equal value heads."""
    return _halved(weight, value_dim, "neighbouring key/value pairs have different values")


def _halved(weight: Tensor, width: int, difference: str) -> Tensor:
    heads = weight.unflatten(0, (-1, 2, width))
    if not torch.equal(heads[:, 0], heads[:, 1]):
        raise ValueError(
            f"the naive grouped-query file cannot hold this model: {difference}; convert it without "
            "--naive-grouped-query, for the authors' flash files"
        )
    return take_heads(weight, list(range(0, 2 * len(heads), 2)), width)
