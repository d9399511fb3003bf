"""What several processes would otherwise tokenise again: tokens and trained tokenizers of a corpus, kept on the disk.

Kept in ``corpora`` of the package's cache folder (``$DIFF_TRANSFORMER_CACHE``, or ``diff_transformer`` in
``$XDG_CACHE_HOME`` or ``~/.cache``), or in ``$DIFF_TRANSFORMER_CORPORA``, which keeps nothing when empty. A file is
there as a whole or not at all, so that any number of processes may look for it and make it at a time; the least
recently used go where there would be more than 4 GB.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from diff_transformer.durable import cache_folder, replacing

MIN_CHARACTERS = 1_000_000  # a smaller corpus is made faster than found
MAX_BYTES = 4 << 30


def folder() -> Path | None:
    """Where things are kept; None for nowhere."""
    chosen = os.environ.get("DIFF_TRANSFORMER_CORPORA")
    if chosen is not None:
        return Path(chosen) if chosen else None
    return cache_folder() / "corpora"


def fingerprint(texts: Iterable[str], *more: object) -> str | None:
    """32 hexadecimal digits that change with any of the texts, their order, and ``more``; None for a small corpus."""
    digest, characters = hashlib.blake2b(repr(more).encode(), digest_size=16), 0
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(data))
        digest.update(data)
        characters += len(text)
    return digest.hexdigest() if characters >= MIN_CHARACTERS else None


def kept_array(key: str | None, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array kept under ``key``, mapped into memory, or what ``make`` gives, kept from then on."""
    path = _path(key, ".npy")
    if path is None:
        return make()
    try:
        os.utime(path)
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        array = make()
        _keep(path, lambda file: np.save(file, array))
        return array


def kept_text(key: str | None, make: Callable[[], str]) -> str:
    """The same for a text."""
    path = _path(key, ".json")
    if path is None:
        return make()
    try:
        os.utime(path)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = make()
        _keep(path, lambda file: file.write(text.encode()))
        return text


def _path(key: str | None, suffix: str) -> Path | None:
    place = folder()
    return None if key is None or place is None else place / f"{key}{suffix}"


def _keep(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """A cache that cannot be written is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, flush=False, unique=True) as partial, partial.open("wb") as file:
            write(file)
        _forget(path.parent, path)


def _forget(place: Path, newest: Path) -> None:
    found = [(path.stat().st_mtime, path.stat().st_size, path) for path in place.iterdir() if path.is_file()]
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MAX_BYTES:
            return
        if path != newest:
            path.unlink(missing_ok=True)
            total -= size
