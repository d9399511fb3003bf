"""A state as one file of tensors and plain values, with the checksum of what was meant to be written."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch


class _Summed:
    """A file that sums up what is written to it."""

    def __init__(self, file):
        self._file, self.sum = file, hashlib.sha256()

    def write(self, data) -> int:
        self._file.write(data)
        self.sum.update(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()


def write_state(path: Path, state: dict[str, Any]) -> str:
    """Write ``state`` as ``torch.save`` does, flush it to the disk; return its SHA-256.

    The checksum is of the bytes as they left the serialiser, not of what the file then holds: comparing the two finds
    what went wrong on the way.

    Raises:
        OSError: if the disk does not take it.
    """
    with path.open("wb") as file:
        summed = _Summed(file)
        torch.save(state, summed)  # ty: ignore[invalid-argument-type]  (a file in what torch.save needs of one)
        file.flush()
        os.fsync(file.fileno())
    return summed.sum.hexdigest()
