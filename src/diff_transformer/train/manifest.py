"""What a checkpoint consists of, with checksums: it is whole exactly if its manifest says so."""

import datetime
import hashlib
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diff_transformer.durable import write_whole

NAME = "manifest.json"
FORMAT = 1


def write_manifest(
    folder: Path, *, step: int, world_size: int, validation_loss: float | None, checksums: dict[str, str] | None = None
) -> None:
    """Write ``manifest.json`` for the files in ``folder``: sizes, SHA-256, and the manifest's own checksum.

    Args:
        checksums: of files, by their path in ``folder``, that are known already; the others are read.
    """
    import torch

    paths, known = _files(folder), checksums or {}
    with ThreadPoolExecutor(_threads(paths)) as pool:
        sums = list(pool.map(lambda path: known.get(str(path.relative_to(folder))) or _checksum(path), paths))
    manifest = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "validation_loss": validation_loss,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "files": {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": checksum}
            for path, checksum in zip(paths, sums, strict=True)
        },
    }
    write_whole(folder / NAME, json.dumps({**manifest, "sha256": _own(manifest)}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint.

    Raises:
        ValueError: if it is missing, is no manifest, or its own checksum is wrong.
    """
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        said = manifest.pop("sha256")
        files, step = dict(manifest["files"]), int(manifest["step"])
    except FileNotFoundError:
        raise ValueError(f"{NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is damaged ({type(error).__name__})") from None
    if said != _own(manifest):
        raise ValueError(f"{NAME} is damaged (its checksum differs)")
    return {**manifest, "files": files, "step": step}


def damage(folder: Path, *, from_disk: bool = False) -> str | None:
    """What is wrong with a checkpoint, or None if every file has the size and the checksum of the manifest.

    Args:
        from_disk: drop the files from the page cache first, so that what is read is what the disk holds.
    """
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return str(error)
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
        if from_disk:
            _forget(path)
    with ThreadPoolExecutor(_threads(list(files))) as pool:
        try:
            sums = list(pool.map(_checksum, [folder / name for name in files]))
        except OSError as error:
            return f"it cannot be read ({error})"
    wrong = [name for (name, entry), found in zip(files.items(), sums, strict=True) if entry["sha256"] != found]
    return f"the checksum of {', '.join(wrong)} differs" if wrong else None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder) != Path(NAME))


def _threads(paths: list) -> int:
    return max(1, min(len(paths), os.cpu_count() or 1, 8))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _forget(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
