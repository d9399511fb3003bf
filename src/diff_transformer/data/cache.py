"""A cache on the disk of tokenised corpora and trained tokenizers, so that several processes need not repeat the work.

It is the folder ``corpora`` in the package's cache (``$DIFF_TRANSFORMER_CACHE``, or ``diff_transformer`` in
``$XDG_CACHE_HOME`` or ``~/.cache``), or ``$DIFF_TRANSFORMER_CORPORA``; if that is empty, nothing is cached. Files are
written atomically, so any number of processes may use the cache at a time. Above 4 GB, the least recently used files
are removed.
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

MIN_CHARACTERS = 1_000_000  # a smaller corpus is tokenised faster than looked up
MAX_BYTES = 4 << 30


def folder() -> Path | None:
    """The folder of the cache; None if nothing is cached."""
    chosen = os.environ.get("DIFF_TRANSFORMER_CORPORA")
    if chosen is not None:
        return Path(chosen) if chosen else None
    return cache_folder() / "corpora"


def fingerprint(texts: Iterable[str], *more: object, least: int | None = None) -> str | None:
    """A key, 32 hexadecimal digits, of the texts in their order and of ``more``.

    None for texts of fewer characters than ``least``, by default ``MIN_CHARACTERS``.
    """
    digest, characters = hashlib.blake2b(repr(more).encode(), digest_size=16), 0
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d " % len(data))
        digest.update(data)
        characters += len(text)
    return digest.hexdigest() if characters >= (MIN_CHARACTERS if least is None else least) else None


def kept_array(key: str | None, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array cached under ``key``, mapped into memory; if there is none, the result of ``make``, which is cached."""
    path = _path(key, ".npy")
    if path is None:
        return make()
    try:
        os.utime(path)
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):  # none, or what a power cut left of one
        array = make()
        _keep(path, lambda file: np.save(file, array))
        return array


def kept_text(key: str | None, make: Callable[[], str]) -> str:
    """As ``kept_array``, for a text."""
    path = _path(key, ".json")
    if path is None:
        return make()
    try:
        os.utime(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    if not text:  # none, or what a power cut left of one
        text = make()
        _keep(path, lambda file: file.write(text.encode()))
    return text


def _path(key: str | None, suffix: str) -> Path | None:
    place = folder()
    return None if key is None or place is None else place / f"{key}{suffix}"


def _keep(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file of the cache; ignore errors of the disk."""
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
