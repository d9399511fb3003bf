"""The manifest of a checkpoint: the size and the SHA-256 of every file, and whether the files still have them."""

import datetime
import errno
import hashlib
import json
import os
import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from diff_transformer.durable import DiskError, write_whole
from diff_transformer.errors import UserError

MANIFEST, FORMAT = "manifest.json", 1


def write_manifest(
    folder: Path, *, step: int, world_size: int, validation_loss: float | None, checksums: dict[str, str] | None = None
) -> None:
    """Write ``manifest.json`` for the files in ``folder``: their sizes and SHA-256, and its own SHA-256.

    Args:
        checksums: known checksums by path in ``folder``. The other files are read.
    """
    paths, known = _files(folder), checksums or {}
    with ThreadPoolExecutor(_threads(paths)) as pool:
        sums = list(pool.map(lambda path: known.get(_name(path, folder)) or _checksum(path), paths))
    manifest = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "validation_loss": validation_loss,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "files": {
            _name(path, folder): {"bytes": path.stat().st_size, "sha256": checksum}
            for path, checksum in zip(paths, sums, strict=True)
        },
    }
    write_whole(folder / MANIFEST, json.dumps({**manifest, "sha256": _own_checksum(manifest)}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        ValueError: if it is missing, is not a manifest, or does not have its own checksum.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        said = manifest.pop("sha256")
        files, step = dict(manifest["files"]), int(manifest["step"])
    except FileNotFoundError:
        raise UserError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{MANIFEST} is damaged ({type(error).__name__})") from None
    if said != _own_checksum(manifest):
        raise UserError(f"{MANIFEST} is damaged (its checksum differs)")
    return {**manifest, "files": files, "step": step}


def damage(folder: Path, *, from_disk: bool = False, part: slice = slice(None), but: Iterable[str] = ()) -> str | None:
    """The defect of the checkpoint in ``folder``; None if its files have the sizes and checksums of the manifest.

    Args:
        from_disk: drop the files from the page cache first, so that the disk is read.
        part: of the manifest's files; only these are read.
        but: files that are not read.
    """
    try:
        listed = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    files = {name: listed[name] for name in list(listed)[part] if name not in set(but)}
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
        if from_disk:
            _drop_from_page_cache(path)
    with ThreadPoolExecutor(_threads(list(files))) as pool:
        try:
            sums = list(pool.map(_checksum, [folder / name for name in files]))
        except OSError as error:
            return f"it cannot be read ({error})"
    wrong = [name for (name, entry), found in zip(files.items(), sums, strict=True) if entry["sha256"] != found]
    return f"the checksum of {', '.join(wrong)} differs" if wrong else None


class HashingFile:
    """A file that computes the SHA-256 of what is written to it.

    The checksum is of the bytes that the serialiser gives, not of the file, so that comparing the two finds errors of
    the disk.
    """

    def __init__(self, file):
        self._file, self._digest = file, hashlib.sha256()
        self.flush, self.close, self.fileno, self.tell = file.flush, file.close, file.fileno, file.tell

    def write(self, data) -> int:
        self._file.write(data)
        self._digest.update(data)
        return memoryview(data).nbytes

    @property
    def checksum(self) -> str:
        return self._digest.hexdigest()


def read_back(path: Path, checksum: str) -> None:
    """Read a file from the disk, not from the page cache.

    Raises:
        DiskError: if it does not have this SHA-256.
    """
    _drop_from_page_cache(path)
    if _checksum(path) != checksum:
        raise DiskError(errno.EIO, f"{path} was written but reads back damaged")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder) != Path(MANIFEST))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _threads(paths: list) -> int:
    return max(1, min(len(paths), os.cpu_count() or 1, 8))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_checksum(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _drop_from_page_cache(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
