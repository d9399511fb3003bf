"""Random generators named by their purpose, and a permutation that takes no memory.

Training and evaluation never share a stream.
"""

import zlib

import numpy as np

_TRAINING, _EVALUATION = 0, 1


def training_rng(seed: int, *key: int | np.integer | str) -> np.random.Generator:
    """The generator of a training item: a pure function of ``seed`` and ``key`` (such as ``"needles", row_index``)."""
    return _rng(seed, _TRAINING, key)


def evaluation_rng(seed: int, *key: int | np.integer | str) -> np.random.Generator:
    """The generator of an evaluation item. Its stream differs from every stream of :func:`training_rng`."""
    return _rng(seed, _EVALUATION, key)


def _rng(seed: int, purpose: int, key: tuple[int | np.integer | str, ...]) -> np.random.Generator:
    words = tuple(zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in key)
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose, *words)))


_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def permuted(places: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """The entries at ``places`` of a permutation of ``range(size)`` drawn by ``rng``, each computed separately.

    A Feistel network permutes the numbers below the next power of four. A result of ``size`` or more is permuted again
    until it is smaller (cycle walking: Black and Rogaway 2002), fewer than four times on average.

    Args:
        places: int64, any shape, in [0, size).

    Returns:
        int64, the shape of ``places``.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = rng.integers(0, 1 << 64, _ROUNDS, dtype=np.uint64)
    values = np.array(places, dtype=np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(half), keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of the value."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        values = (values ^ (values >> np.uint64(shift))) * multiplier
    return values ^ (values >> np.uint64(31))
