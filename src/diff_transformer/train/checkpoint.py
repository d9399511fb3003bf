"""Checkpoints: written aside and renamed, read back before older ones are removed, verified when loaded.

``RUN/checkpoints/step-00000200/`` holds ``state.ckpt`` (one file, or a folder of shards if the model is sharded) and
``manifest.json``, which has the size and the SHA-256 of every file. A checkpoint is whole exactly if its manifest says
so. ``checkpoints/best.json`` names the checkpoint with the lowest validation loss.
"""

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from diff_transformer.durable import (
    OLD,
    PARTIAL,
    REPLACED,
    DiskError,
    discard,
    explained,
    flush_tree,
    put_back,
    remove,
    require_room,
    swap,
    write_whole,
)
from diff_transformer.errors import UserError
from diff_transformer.train.manifest import HashingFile, damage, read_manifest, write_manifest
from diff_transformer.train.ranks import of_every_rank, on_first_rank
from diff_transformer.train.shards import ShardWriter, load_shards, make_stager, write_shards
from diff_transformer.train.state import has_shards, plain_state, state_bytes

logger = logging.getLogger("diff_transformer")

STATE = "state.ckpt"
_DAMAGED = ".damaged"


class CheckpointError(UserError):
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
        if loss is not None and math.isfinite(loss):
            losses.append((loss, path))
    return min(losses)[1] if losses else None


def choose_checkpoint(
    folder: Path, found: list[Path] | None = None, damage: Callable[[Path], str | None] = damage
) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and a note for each newer one that is damaged.

    Args:
        found: the complete checkpoints by step; None looks for them.
        damage: says what is wrong with a checkpoint.

    Returns:
        (None, []) if there is no checkpoint at all.

    Raises:
        CheckpointError: if every checkpoint is damaged. Nothing is removed.
    """
    found = _complete(folder) if found is None else found
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
    """Load the newest undamaged checkpoint into ``state``, if there is any. Every rank calls it and reads a part.

    Newer checkpoints, which are damaged, are renamed to ``NAME.damaged``.

    Returns:
        A note for each damaged checkpoint; the notes are also logged as warnings.

    Raises:
        CheckpointError: if there are checkpoints but all are damaged, one does not fit, or one holds pickled code.
    """

    def look() -> list[Path]:
        _put_back(folder)
        return _complete(folder)

    def tidy() -> None:
        for note in notes:
            logger.warning("%s", note)
        for newer in found:
            if path is not None and newer > path:
                _set_aside(newer)

    def damage_in_parts(path: Path) -> str | None:
        part = slice(getattr(fabric, "global_rank", 0), None, getattr(fabric, "world_size", 1))
        return next((wrong for wrong in of_every_rank(damage(path, part=part)) if wrong is not None), None)

    found = on_first_rank(fabric, look)
    path, notes = choose_checkpoint(folder, found, damage_in_parts)
    on_first_rank(fabric, tidy)
    if path is not None:
        _load(fabric, path, state)
    return notes


def _load(fabric, path: Path, state: dict[str, Any]) -> None:
    try:
        if (path / STATE).is_dir():
            load_shards(path / STATE, state)
        else:
            fabric.load(path / STATE, state, weights_only=True)
    except (UnpicklingError, CheckpointException, OSError) as error:
        cause = _cause(error)
        if not isinstance(cause, UnpicklingError):
            raise CheckpointError(f"{path / STATE} cannot be loaded: {cause}") from error
        raise CheckpointError(
            f"{path / STATE} holds more than tensors, numbers and texts, which could run code: no run of this "
            f"package wrote it. Nothing of it was loaded; restore it from a copy, or remove {path} to continue "
            "from the checkpoint before"
        ) from None


class Saver:
    """Writes the checkpoints of a run, while training waits or in the background, with the same guarantees.

    The files are written to a temporary folder, flushed to the disk and renamed together. They are read back from
    the disk before older checkpoints are removed. If the model is sharded, every rank writes and reads back its part.

    In the background, ``save`` copies the state to main memory and a thread writes the copy; this needs memory for one
    more state. One checkpoint is written at a time: ``save`` waits for the previous one and raises its error. Call
    ``wait`` before telling anybody that a state is saved.

    Args:
        keep: number of newest checkpoints that stay.
        keep_best: whether the checkpoint with the lowest validation loss stays too.
    """

    def __init__(self, fabric, folder: Path, *, keep: int = 2, keep_best: bool = True, background: bool = False):
        self._fabric, self._folder = fabric, folder
        self._options: dict[str, Any] = {
            "world_size": getattr(fabric, "world_size", 1), "keep": keep, "keep_best": keep_best,
        }  # fmt: skip
        self._background = _Background() if background else None
        self._group: dist.ProcessGroup | None = None
        self._finish: Callable[[], object] | None = None  # returns when what is being written is on the disk

    def save(self, step: int, state: dict[str, Any], validation_loss: float | None = None) -> None:
        """Save ``state``, modules, optimizers and plain values, as the checkpoint of ``step``. Every rank calls it.

        Args:
            validation_loss: the loss measured at this step, if it was.

        Raises:
            DiskError: if this checkpoint, or the previous one in the background, cannot be written, with the folder,
                the bytes needed and free. Older checkpoints are intact.
        """
        self.wait()
        write = _Write(self._folder, step, state_bytes(state), validation_loss=validation_loss, **self._options)
        self._finish = self._shards(write, state) if has_shards(state) else self._whole(write, plain_state(state))
        if self._background is None:
            self.wait()

    def _whole(self, write: "_Write", state: dict[str, Any]) -> Callable[[], object]:
        action: Callable[[], object] = partial(write.whole, state)
        if self._background is not None and self._fabric.is_global_zero:
            action = self._background.start(write.whole, state)
        return partial(on_first_rank, self._fabric, action)

    def _shards(self, write: "_Write", state: dict[str, Any]) -> Callable[[], object]:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        parts = {key: plain for key, plain in plain_state(state).items() if has_shards({key: plain})}
        rest = {key: value for key, value in state.items() if key not in parts}
        writer = ShardWriter(write.partial / STATE, rest, prepare=write.prepare, publish=write.shards)
        stager = None if self._background is None else self._background.stager
        written = write_shards(parts, writer, self._group, stager)

        def finish() -> None:
            try:
                written()
            except CheckpointException as error:
                raise write.failed(_cause(error)) from error

        return finish

    def wait(self) -> None:
        """Return once the state given to ``save`` is on the disk. Every rank calls it.

        Raises:
            DiskError: if it could not be written.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def close(self) -> None:
        """End the threads after their last write. ``wait`` raises the errors, this does not."""
        if self._background is not None:
            self._background.close()


class _Background:
    """Writes states in a thread, from copies in main memory."""

    def __init__(self):
        self.stager = make_stager()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def start(self, write: Callable[[Any], object], state: dict[str, Any]) -> Callable[[], object]:
        """Copy ``state`` and begin to write the copy; a function that returns when it is written, or raises."""
        return self._pool.submit(write, self.stager.stage(state)).result

    def close(self) -> None:
        self._pool.shutdown()
        self.stager.close()


def write_state(path: Path, state: dict[str, Any]) -> str:
    """Write ``state`` with ``torch.save``, flush it to the disk and return its SHA-256.

    Raises:
        OSError: if the write fails.
    """
    with path.open("wb") as file:
        hashing = HashingFile(file)
        torch.save(state, hashing)  # ty: ignore[invalid-argument-type]  (it has the methods that torch.save calls)
        file.flush()
        os.fsync(file.fileno())
    return hashing.checksum


def _complete(folder: Path) -> list[Path]:
    """The checkpoints by step. A folder gets the name of a checkpoint only when it is complete."""
    return sorted(path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdigit())


@dataclass
class _Write:
    """One write of a checkpoint: prepare a temporary folder, write to it, publish it by its final name, prune."""

    folder: Path
    step: int
    needed: int  # bytes of the state
    world_size: int
    validation_loss: float | None
    keep: int
    keep_best: bool

    @property
    def final(self) -> Path:
        return checkpoint_path(self.folder, self.step)

    @property
    def partial(self) -> Path:
        return self.final.with_name(self.final.name + PARTIAL)

    def whole(self, state: dict[str, Any]) -> None:
        """Write a state of ``plain_state``, from this process alone."""
        try:
            self.prepare()
            checksum = write_state(self.partial / STATE, state)
            self.publish({STATE: checksum})
            self.prune()
        except Exception as error:
            raise self.failed(error) from error

    def shards(self, checksums: dict[str, str]) -> None:
        """Publish what every process has written and read back, given the checksums by name of shard; then prune."""
        known = {f"{STATE}/{name}": checksum for name, checksum in checksums.items()}
        self.publish(known, but=known)
        self.prune()

    def prepare(self) -> None:
        """Make an empty folder to write to, on a disk with enough room; remove what interrupted writes left."""
        place = self.partial.parent
        place.mkdir(parents=True, exist_ok=True)
        _put_back(self.folder)
        for left in [*place.glob(f"step-*{PARTIAL}"), *place.glob(f"step-*{OLD}")]:
            remove(left)
        require_room(place, self.needed, f"the checkpoint of step {self.step}")
        self.partial.mkdir()

    def publish(self, checksums: dict[str, str], *, but: Iterable[str] = ()) -> None:
        """Write the manifest, give the folder its final name, and read back its files ``but`` some."""
        write_manifest(
            self.partial, step=self.step, world_size=self.world_size, validation_loss=self.validation_loss,
            checksums=checksums,
        )  # fmt: skip
        flush_tree(self.partial)
        swap(self.partial, self.final)
        wrong = damage(self.final, from_disk=True, but=but)
        if wrong:
            _set_aside(self.final)
            raise DiskError(errno.EIO, f"{self.final} was written but reads back damaged: {wrong}")

    def prune(self) -> None:
        """Name the best checkpoint, and remove those that need not stay."""
        best = best_checkpoint(self.folder) if self.keep_best else None
        if best is not None:
            of_best = read_manifest(best)
            pointer = {"checkpoint": best.name, "step": of_best["step"], "validation_loss": of_best["validation_loss"]}
            write_whole(best.parent / "best.json", json.dumps(pointer) + "\n")
        for path in set(_complete(self.folder)) - {*_complete(self.folder)[-max(1, self.keep) :], self.final, best}:
            discard(path)
        for path in self.final.parent.glob(f"step-*{_DAMAGED}"):
            if path.name.removesuffix(_DAMAGED) <= self.final.name:
                remove(path)

    def failed(self, error: BaseException) -> DiskError:
        """Remove what was written; the error with the folder, the bytes needed, what is intact, and what to do."""
        with suppress(OSError):
            remove(self.partial)
        if not isinstance(error, DiskError):
            error = explained(error, self.final.parent, self.needed, f"the checkpoint of step {self.step}")
        last = latest_checkpoint(self.folder)
        kept = f"{last} is intact" if last is not None else "there is no earlier checkpoint"
        return DiskError(error.errno, f"{error.strerror}; {kept}. Once this is fixed, continue with --resume")


def _cause(error: BaseException) -> BaseException:
    """The error of the first process that failed."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _put_back(folder: Path) -> None:
    """Finish or undo what interrupted writes left of the run in ``folder``."""
    for path in (folder / "checkpoints").glob(f"step-*{REPLACED}"):
        put_back(path.with_name(path.name.removesuffix(REPLACED)))


def _set_aside(path: Path) -> None:
    aside = path.with_name(path.name + _DAMAGED)
    remove(aside)
    os.replace(path, aside)
