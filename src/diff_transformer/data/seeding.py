"""Random generators named by their purpose. Training and evaluation never share a stream."""

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
