"""Checkpoints: written aside and renamed, read back before older ones are removed, verified when loaded.

``RUN/checkpoints/step-00000200/`` holds ``state.ckpt`` (one file, or a folder of shards if the model is sharded) and
``manifest.json``, which has the size and the SHA-256 of every file. A checkpoint is whole exactly if its manifest says
so. ``checkpoints/best.json`` names the checkpoint with the lowest validation loss.
"""

import datetime
import errno
import hashlib
import json
import logging
import os
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.strategies import ModelParallelStrategy

from diff_transformer.durable import (
    OLD,
    PARTIAL,
    DiskError,
    explained,
    flush_folder,
    flush_tree,
    remove,
    require_room,
    write_whole,
)
from diff_transformer.train.launch import on_first_rank
from diff_transformer.train.state import Snapshots, has_shards, plain_state, state_bytes

logger = logging.getLogger("diff_transformer")

STATE, MANIFEST, FORMAT = "state.ckpt", "manifest.json", 1
_DAMAGED, _REPLACED = ".damaged", ".replaced"


class CheckpointError(RuntimeError):
    """There are checkpoints, but none can be used."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """The folder of the checkpoint of ``step`` in the run's ``folder``."""
    return folder / "checkpoints" / f"step-{step:08d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Its checksums are not verified."""
    found = _complete(folder)
    return found[-1] if found else None


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run with the lowest validation loss; None if none has one."""
    losses = []
    for path in _complete(folder):
        try:
            loss = read_manifest(path)["validation_loss"]
        except ValueError:
            continue
        if loss is not None:
            losses.append((loss, path))
    return min(losses)[1] if losses else None


def save_checkpoint(
    fabric,
    folder: Path,
    step: int,
    state: dict[str, Any],
    *,
    keep: int = 2,
    keep_best: bool = True,
    validation_loss: float | None = None,
) -> Path:
    """Write ``state`` as the checkpoint of ``step``. Every rank calls it.

    The files are written to a temporary folder, flushed to the disk and renamed together. They are read back from
    the disk before older checkpoints are removed.

    Args:
        state: modules, optimizers and plain values. If the model is sharded, every rank writes its part.
        keep: number of newest checkpoints that stay.
        keep_best: whether the checkpoint with the lowest validation loss stays too.
        validation_loss: the loss measured at this step, if it was.

    Raises:
        DiskError: if it cannot be written, with the folder, the bytes needed and free. Older checkpoints are intact.
    """
    options: dict[str, Any] = {"keep": keep, "keep_best": keep_best, "validation_loss": validation_loss}
    if not has_shards(state):
        plain = plain_state(state)
        world = getattr(fabric, "world_size", 1)
        return on_first_rank(fabric, lambda: write_checkpoint(folder, step, plain, world_size=world, **options))
    write = _Write(folder, step, state_bytes(state))
    on_first_rank(fabric, write.prepare)
    try:
        fabric.save(write.partial / STATE, state)
    except Exception as error:
        if fabric.is_global_zero:
            remove(write.partial)
        raise write.failed(error) from error
    return on_first_rank(fabric, lambda: write.publish({}, world_size=fabric.world_size, **options))


def write_checkpoint(folder: Path, step: int, state: dict[str, Any], *, world_size: int = 1, **options) -> Path:
    """As ``save_checkpoint``, for a state from ``plain_state`` and from this process alone."""
    write = _Write(folder, step, state_bytes(state))
    write.prepare()
    try:
        checksum = write_state(write.partial / STATE, state)
    except Exception as error:
        remove(write.partial)
        raise write.failed(error) from error
    return write.publish({STATE: checksum}, world_size=world_size, **options)


def choose_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and a note for each newer one that is damaged.

    Returns:
        (None, []) if there is no checkpoint at all.

    Raises:
        CheckpointError: if every checkpoint is damaged. Nothing is removed.
    """
    found = _complete(folder)
    broken: list[str] = []
    for path in reversed(found):
        wrong = damage(path)
        if wrong is None:
            return path, [f"checkpoint {one}; {path.name} is used instead" for one in broken]
        broken.append(f"{path.name} is damaged: {wrong}")
    if found:
        raise CheckpointError(
            f"no checkpoint in {folder / 'checkpoints'} can be used ({'; '.join(broken)}). Nothing was removed; "
            f"restore one of them from a copy, or start again in another folder"
        )
    return None, []


def load_checkpoint(fabric, folder: Path, state: dict[str, Any]) -> list[str]:
    """Load the newest undamaged checkpoint into ``state``, if there is any. Every rank calls it.

    Newer checkpoints, which are damaged, are renamed to ``NAME.damaged``.

    Returns:
        A note for each damaged checkpoint; the notes are also logged as warnings.

    Raises:
        CheckpointError: if there are checkpoints but all are damaged, one holds pickled code, or one is in parts and
            the strategy is not FSDP2.
    """

    def choose():
        _put_back(folder)
        path, notes = choose_checkpoint(folder)
        for note in notes:
            logger.warning("%s", note)
        for newer in _complete(folder):
            if path is not None and newer > path:
                _set_aside(newer)
        return path, notes

    path, notes = on_first_rank(fabric, choose)
    if path is not None:
        if (path / STATE).is_dir() and not isinstance(fabric.strategy, ModelParallelStrategy):
            raise CheckpointError(
                f"{path / STATE} is in parts (train.parallel.sharded_checkpoints), which only FSDP2 reads: resume with "
                "--set train.parallel.strategy=fsdp, on any number of processes, one too"
            )
        try:
            fabric.load(path / STATE, state, weights_only=True)
        except UnpicklingError:
            raise CheckpointError(
                f"{path / STATE} holds more than tensors, numbers and texts, which could run code: no run of this "
                f"package wrote it. Nothing of it was loaded; restore it from a copy, or remove {path} to continue "
                "from the checkpoint before"
            ) from None
    return notes


class Saver:
    """Writes the checkpoints of a run, while training waits or in the background, with the same guarantees.

    In the background, ``save`` copies the state to main memory and a thread writes the copy; this needs memory for one
    more state. One checkpoint is written at a time: ``save`` waits for the previous one and raises its error. Call
    ``wait`` before telling anybody that a state is saved.

    Args:
        keep, keep_best: as in ``save_checkpoint``.
    """

    def __init__(self, fabric, folder: Path, *, keep: int = 2, keep_best: bool = True, background: bool = False):
        self._fabric, self._folder = fabric, folder
        self._options: dict[str, Any] = {"keep": keep, "keep_best": keep_best}
        self._snapshots = Snapshots()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if background else None
        self._writing: Future | None = None

    def save(self, step: int, state: dict[str, Any], validation_loss: float | None = None) -> None:
        """Save ``state`` as the checkpoint of ``step``. Every rank calls it.

        Raises:
            DiskError: if this checkpoint, or the previous one in the background, cannot be written.
            ValueError: for a sharded model in the background.
        """
        options: dict[str, Any] = {**self._options, "validation_loss": validation_loss}
        if self._pool is None:
            save_checkpoint(self._fabric, self._folder, step, state, **options)
            return
        if has_shards(state):
            raise ValueError("train.checkpoint_async copies whole tensors, and this model is sharded; set it to false")
        self.wait()
        if self._fabric.is_global_zero:
            world = self._fabric.world_size
            copied = self._snapshots.take(state)
            self._writing = self._pool.submit(write_checkpoint, self._folder, step, copied, world_size=world, **options)

    def wait(self) -> None:
        """Return once the state given to ``save`` is on the disk. Every rank calls it.

        Raises:
            DiskError: if it could not be written.
        """
        writing, self._writing = self._writing, None
        if self._pool is not None:
            on_first_rank(self._fabric, lambda: None if writing is None else (writing.result(), None)[1])

    def close(self) -> None:
        """End the thread after its last write. ``wait`` raises the errors, this does not."""
        if self._pool is not None:
            self._pool.shutdown()


def write_manifest(
    folder: Path, *, step: int, world_size: int, validation_loss: float | None, checksums: dict[str, str] | None = None
) -> None:
    """Write ``manifest.json`` for the files in ``folder``: their sizes and SHA-256, and its own SHA-256.

    Args:
        checksums: known checksums by path in ``folder``. The other files are read.
    """
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
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged ({type(error).__name__})") from None
    if said != _own_checksum(manifest):
        raise ValueError(f"{MANIFEST} is damaged (its checksum differs)")
    return {**manifest, "files": files, "step": step}


def damage(folder: Path, *, from_disk: bool = False) -> str | None:
    """What is wrong with the checkpoint in ``folder``; None if every file has the size and checksum of the manifest.

    Args:
        from_disk: drop the files from the page cache first, so that the disk is read.
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
            _drop_from_page_cache(path)
    with ThreadPoolExecutor(_threads(list(files))) as pool:
        try:
            sums = list(pool.map(_checksum, [folder / name for name in files]))
        except OSError as error:
            return f"it cannot be read ({error})"
    wrong = [name for (name, entry), found in zip(files.items(), sums, strict=True) if entry["sha256"] != found]
    return f"the checksum of {', '.join(wrong)} differs" if wrong else None


class _HashingFile:
    """A file that computes the SHA-256 of what is written to it."""

    def __init__(self, file):
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data) -> int:
        self._file.write(data)
        self.digest.update(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        self._file.flush()


def write_state(path: Path, state: dict[str, Any]) -> str:
    """Write ``state`` with ``torch.save``, flush it to the disk and return its SHA-256.

    The checksum is computed from the bytes that the serialiser gives, not from the file, so that comparing the two
    finds errors of the disk.

    Raises:
        OSError: if the write fails.
    """
    with path.open("wb") as file:
        hashing = _HashingFile(file)
        torch.save(state, hashing)  # ty: ignore[invalid-argument-type]  (it has the methods that torch.save calls)
        file.flush()
        os.fsync(file.fileno())
    return hashing.digest.hexdigest()


def _complete(folder: Path) -> list[Path]:
    """The checkpoints by step. A folder gets the name of a checkpoint only when it is complete."""
    return sorted(path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdigit())


class _Write:
    """One write of a checkpoint: to a temporary folder (``prepare``), which then gets the final name (``publish``).

    Args:
        needed: bytes of the state.
    """

    def __init__(self, folder: Path, step: int, needed: int):
        self.folder, self.step, self.needed = folder, step, needed
        self.final = checkpoint_path(folder, step)
        self.partial = self.final.with_name(self.final.name + PARTIAL)

    def prepare(self) -> None:
        """Make an empty folder to write to, on a disk with enough room; remove what interrupted writes left."""
        place = self.partial.parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            _put_back(self.folder)
            for left in [*place.glob(f"step-*{PARTIAL}"), *place.glob(f"step-*{OLD}")]:
                remove(left)
            require_room(place, self.needed, f"the checkpoint of step {self.step}")
            self.partial.mkdir()
        except OSError as error:
            raise self.failed(error) from error

    def publish(
        self,
        checksums: dict[str, str],
        *,
        world_size: int,
        keep: int = 2,
        keep_best: bool = True,
        validation_loss: float | None = None,
    ) -> Path:
        """Write the manifest, give the folder its final name, read it back, remove older checkpoints."""
        about: dict[str, Any] = {"step": self.step, "world_size": world_size, "validation_loss": validation_loss}
        try:
            write_manifest(self.partial, **about, checksums=checksums)
            flush_tree(self.partial)
            _replace(self.partial, self.final)
            wrong = damage(self.final, from_disk=True)
            if wrong:
                _set_aside(self.final)
                raise DiskError(errno.EIO, f"{self.final} was written but reads back damaged: {wrong}")
            _forget_older(self.folder, self.final, keep, keep_best)
        except OSError as error:
            remove(self.partial)
            raise self.failed(error) from error
        return self.final

    def failed(self, error: Exception) -> DiskError:
        """The error with the folder, the bytes needed, which checkpoint is intact, and what to do."""
        if not isinstance(error, DiskError):
            error = explained(error, self.final.parent, self.needed, f"the checkpoint of step {self.step}")
        last = latest_checkpoint(self.folder)
        kept = f"{last} is intact" if last is not None else "there is no earlier checkpoint"
        return DiskError(error.errno, f"{error.strerror}; {kept}. Once this is fixed, continue with --resume")


def _replace(partial: Path, final: Path) -> None:
    """Rename ``partial`` to ``final``. If this is interrupted, ``_put_back`` restores the ``final`` of before."""
    if final.exists():
        os.replace(final, final.with_name(final.name + _REPLACED))
    os.replace(partial, final)
    flush_folder(final.parent)
    _put_back(final.parent.parent)


def _put_back(folder: Path) -> None:
    """Finish or undo an interrupted ``_replace``."""
    for path in (folder / "checkpoints").glob(f"step-*{_REPLACED}"):
        final = path.with_name(path.name.removesuffix(_REPLACED))
        if final.exists():
            old = path.with_name(final.name + OLD)
            os.replace(path, old)
            remove(old)
        else:
            os.replace(path, final)


def _forget_older(folder: Path, newest: Path, keep: int, keep_best: bool) -> None:
    best = best_checkpoint(folder) if keep_best else None
    if best is not None:
        manifest = read_manifest(best)
        pointer = {"checkpoint": best.name, "step": manifest["step"], "validation_loss": manifest["validation_loss"]}
        write_whole(best.parent / "best.json", json.dumps(pointer) + "\n")
    for path in set(_complete(folder)) - {*_complete(folder)[-max(1, keep) :], newest, best}:
        old = path.with_name(path.name + OLD)
        os.replace(path, old)  # rename first: a half-removed folder must not look like a checkpoint
        remove(old)
    for path in newest.parent.glob(f"step-*{_DAMAGED}"):
        if path.name.removesuffix(_DAMAGED) <= newest.name:
            remove(path)


def _set_aside(path: Path) -> None:
    aside = path.with_name(path.name + _DAMAGED)
    remove(aside)
    os.replace(path, aside)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder) != Path(MANIFEST))


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
