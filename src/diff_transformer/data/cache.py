"""A cache on the disk of tokenised corpora and trained tokenizers, so that several processes need not repeat the work.

It is the folder ``corpora`` in ``$DIFF_TRANSFORMER_CACHE``, or in ``diff_transformer`` in ``$XDG_CACHE_HOME`` or
``~/.cache``. Files are written atomically, so any number of processes may use the cache at a time. Any of them may be
removed.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from diff_transformer.durable import replacing


def fingerprint(texts: Iterable[str], *more: object) -> str:
    """A key, 32 hexadecimal digits, of the texts in their order and of ``more``."""
    digest = hashlib.blake2b(repr(more).encode(), digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(data))
        digest.update(data)
    return digest.hexdigest()


def cached(key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array cached under ``key``, mapped into memory; if there is none, the result of ``make``, which is cached."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("DIFF_TRANSFORMER_CACHE") or caches / "diff_transformer").expanduser() / "corpora"
    path = folder / f"{key}.npy"
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):  # none, or one that a power cut left in part
        array = make()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, array)
    return array
