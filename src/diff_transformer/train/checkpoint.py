"""Run folders and checkpoints: a run is never overwritten, and an interrupted one goes on where it stopped."""

import json
import os
import shutil
from pathlib import Path

from diff_transformer.train.config import RunConfig, differences


def open_run_folder(folder: Path, config: RunConfig, *, resume: bool) -> None:
    """Make ``folder`` the home of a run of ``config``, or check that it already is and may go on.

    Raises:
        FileExistsError: if the folder holds anything and ``resume`` is False.
        ValueError: if it holds a run of another configuration.
    """
    path = folder / "config.json"
    if path.exists():
        if not resume:
            raise FileExistsError(f"{folder} holds a run already; resume it (--resume) or choose another folder")
        different = differences(json.loads(path.read_text()), config.to_dict())
        if different:
            listed = "\n  ".join(different)
            raise ValueError(f"{folder} holds a run of another configuration (there against here):\n  {listed}")
        return
    if folder.exists() and any(entry.name != "train.log" for entry in folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and holds no run; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    config.save(path)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    found = sorted((folder / "checkpoints").glob("step-*.ckpt"))
    return found[-1] if found else None


def save_checkpoint(fabric, folder: Path, step: int, state: dict, keep: int = 2) -> Path:
    """Write ``state`` beside its final place and rename it, so that a checkpoint is whole or absent; keep the last."""
    path = checkpoint_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    fabric.save(partial, state)
    if fabric.is_global_zero:
        _flush(partial)
        os.replace(partial, path)
        for old in sorted(path.parent.glob("step-*.ckpt"))[:-keep]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    fabric.barrier()
    return path


def _flush(path: Path):
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
