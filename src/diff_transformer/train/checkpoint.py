"""Checkpoints: written aside and renamed, checked on the disk before an older one goes, checked again when loaded.

``RUN/checkpoints/step-00000200/`` holds ``state.ckpt`` (one file, or a folder of shards where the model is sharded) and
``manifest.json``; ``checkpoints/best.json`` names the one with the lowest validation loss.
"""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diff_transformer.durable import (
    DiskError,
    explained,
    flush_folder,
    flush_tree,
    remove,
    require_room,
    write_whole,
)
from diff_transformer.train.manifest import damage, read_manifest, write_manifest
from diff_transformer.train.run_folder import open_run_folder
from diff_transformer.train.snapshot import has_shards, plain_state, state_bytes
from diff_transformer.train.state_file import write_state

__all__ = [
    "CheckpointError", "best_checkpoint", "checkpoint_path", "choose_checkpoint", "latest_checkpoint",
    "load_checkpoint", "open_run_folder", "save_checkpoint", "write_checkpoint",
]  # fmt: skip

logger = logging.getLogger("diff_transformer")

STATE = "state.ckpt"
_PARTIAL, _OLD, _DAMAGED, _REPLACED = ".partial", ".old", ".damaged", ".replaced"


class CheckpointError(RuntimeError):
    """There are checkpoints, but none can be used."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None; its checksums are not looked at."""
    found = _complete(folder)
    return found[-1] if found else None


def best_checkpoint(folder: Path) -> Path | None:
    """Of the checkpoints of a run, the one with the lowest validation loss; None where none was validated."""
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
    """Write ``state`` as the checkpoint of ``step``; called by every rank.

    The files are written beside their final place, flushed to the disk and renamed together; they are read back from
    the disk before older checkpoints go, all but the last ``keep`` and (``keep_best``) the best.

    Args:
        state: modules, optimizers and plain values; where the model is sharded every rank writes its part.
        validation_loss: of this very step, where it was measured.

    Raises:
        DiskError: if it cannot be written, with folder, bytes needed and free. What was there before is intact.
    """
    options: dict[str, Any] = {"keep": keep, "keep_best": keep_best, "validation_loss": validation_loss}
    if not has_shards(state):
        plain = plain_state(state)
        world = getattr(fabric, "world_size", 1)
        return on_first_rank(fabric, lambda: write_checkpoint(folder, step, plain, world_size=world, **options))
    needed = state_bytes(state)
    partial = _partial(folder, step)
    on_first_rank(fabric, lambda: _prepare(folder, step, needed))
    try:
        fabric.save(partial / STATE, state)
    except Exception as error:
        if fabric.is_global_zero:
            remove(partial)
        raise _failed(error, folder, step, needed) from error
    return on_first_rank(fabric, lambda: _publish(folder, step, needed, {}, fabric.world_size, **options))


def write_checkpoint(folder: Path, step: int, state: dict[str, Any], *, world_size: int = 1, **options) -> Path:
    """``save_checkpoint`` of a plain state (``plain_state``) from this process alone."""
    needed = state_bytes(state)
    partial = _prepare(folder, step, needed)
    try:
        checksum = write_state(partial / STATE, state)
    except Exception as error:
        remove(partial)
        raise _failed(error, folder, step, needed) from error
    return _publish(folder, step, needed, {STATE: checksum}, world_size, **options)


def choose_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose checksums are right, and what is to be said about newer ones that are damaged.

    Returns:
        (None, []) where there is no checkpoint at all.

    Raises:
        CheckpointError: if every checkpoint is damaged; nothing is removed.
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
            f"no checkpoint in {folder / 'checkpoints'} can be used ({'; '.join(broken)}). Nothing was removed; put a "
            f"copy of one of them back, or start anew in another folder"
        )
    return None, []


def load_checkpoint(fabric, folder: Path, state: dict[str, Any]) -> list[str]:
    """Load the newest checkpoint that is whole into ``state``, if there is any; called by every rank.

    Damaged ones that are newer are renamed to ``NAME.damaged``.

    Returns:
        What is to be said about damaged checkpoints, already logged as warnings.

    Raises:
        CheckpointError: if there are checkpoints but all are damaged.
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
        fabric.load(path / STATE, state, weights_only=True)
    return notes


def on_first_rank(fabric, action: Callable[[], Any]) -> Any:
    """``action()`` on rank 0 alone; its result, or its exception, on every rank."""
    if getattr(fabric, "world_size", 1) == 1:
        return action()
    outcome = None
    if fabric.is_global_zero:
        try:
            outcome = action()
        except Exception as error:
            outcome = error
    outcome = fabric.broadcast(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _complete(folder: Path) -> list[Path]:
    """By step, whatever has the name of a checkpoint: it got that name when it was whole."""
    return sorted(path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdigit())


def _partial(folder: Path, step: int) -> Path:
    final = checkpoint_path(folder, step)
    return final.with_name(final.name + _PARTIAL)


def _prepare(folder: Path, step: int, needed: int) -> Path:
    """An empty folder to write to, on a disk with room; what earlier, broken-off writes left is removed."""
    partial = _partial(folder, step)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        _put_back(folder)
        for left in [*partial.parent.glob(f"step-*{_PARTIAL}"), *partial.parent.glob(f"step-*{_OLD}")]:
            remove(left)
        require_room(partial.parent, needed, f"the checkpoint of step {step}")
        partial.mkdir()
    except OSError as error:
        raise _failed(error, folder, step, needed) from error
    return partial


def _publish(
    folder: Path,
    step: int,
    needed: int,
    checksums: dict[str, str],
    world_size: int,
    *,
    keep: int = 2,
    keep_best: bool = True,
    validation_loss: float | None = None,
) -> Path:
    """Give what was written its manifest and its name, read it back, let older ones go."""
    final, partial = checkpoint_path(folder, step), _partial(folder, step)
    try:
        write_manifest(partial, step=step, world_size=world_size, validation_loss=validation_loss, checksums=checksums)
        flush_tree(partial)
        _replace(partial, final)
        wrong = damage(final, from_disk=True)
        if wrong:
            _set_aside(final)
            raise DiskError(errno.EIO, f"{final} was written but reads back damaged: {wrong}")
        _forget_older(folder, final, keep, keep_best)
    except OSError as error:
        remove(partial)
        raise _failed(error, folder, step, needed) from error
    return final


def _replace(partial: Path, final: Path) -> None:
    """Give ``partial`` its name; one that has that name already comes back if this is cut short."""
    if final.exists():
        os.replace(final, final.with_name(final.name + _REPLACED))
    os.replace(partial, final)
    flush_folder(final.parent)
    _put_back(final.parent.parent)


def _put_back(folder: Path) -> None:
    for path in (folder / "checkpoints").glob(f"step-*{_REPLACED}"):
        final = path.with_name(path.name.removesuffix(_REPLACED))
        if final.exists():
            old = path.with_name(final.name + _OLD)
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
        old = path.with_name(path.name + _OLD)
        os.replace(path, old)  # first the name: what is left of it must not look like a checkpoint
        remove(old)
    for path in newest.parent.glob(f"step-*{_DAMAGED}"):
        if path.name.removesuffix(_DAMAGED) <= newest.name:
            remove(path)


def _set_aside(path: Path) -> None:
    aside = path.with_name(path.name + _DAMAGED)
    remove(aside)
    os.replace(path, aside)


def _failed(error: Exception, folder: Path, step: int, needed: int) -> DiskError:
    """The error with where, how much, what the user still has, and what to do."""
    if not isinstance(error, DiskError):
        error = explained(error, folder / "checkpoints", needed, f"the checkpoint of step {step}")
    last = latest_checkpoint(folder)
    kept = f"{last} is intact" if last is not None else "there is no earlier checkpoint"
    return DiskError(error.errno, f"{error.strerror}; {kept}. Once this is mended, continue with --resume")
