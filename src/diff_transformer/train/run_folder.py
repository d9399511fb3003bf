"""The folder of a run: never overwritten, used by one process (or one group of ranks) at a time.

It holds ``config.json``, ``metrics.jsonl``, ``checkpoints/`` and, at the end, ``model/`` in Hugging Face's format.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from diff_transformer.checks import differences
from diff_transformer.durable import PARTIAL, remove, replacing, require_writable
from diff_transformer.errors import UserError
from diff_transformer.train.config import RunConfig

LOCK = "run.lock"
# Settings that a resumed run may change: they affect results by rounding at most. evaluation.seed draws held-out rows.
_FREE = re.compile(
    r"evaluation\.(?!seed:)|train\.(checkpoint_\w+|parallel\.\w+|micro_batch_size|loss_chunk"
    r"|activation_checkpointing|compile|threads|log_every|validate_every|wandb):"
)


def changes_results(there: dict, here: dict) -> list[str]:
    """The settings in which two configurations differ that change results by more than rounding, a line each."""
    return [line for line in differences(there, here) if not _FREE.match(line)]


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Context in which no other process works in ``folder``; the system releases the lock if this process is killed.

    Raises:
        UserError: if another process does.
    """
    try:
        with FileLock(folder / LOCK, timeout=0, thread_local=False):
            yield
    except Timeout:
        raise UserError(f"another process works in {folder}; wait for it, stop it, or choose another --out") from None


def check_run_folder(folder: Path, config: RunConfig, *, resume: bool) -> None:
    """Check that ``folder`` can be the folder of a run of ``config``. Writes nothing.

    Raises:
        UserError: if the folder is not empty and ``resume`` is False, holds something else than a run or a run of
            another configuration, or cannot be written to.
    """
    require_writable(folder)
    path = folder / "config.json"
    if path.exists():
        if not resume:
            raise UserError(f"{folder} holds a run already; resume it (--resume) or choose another folder")
        if different := changes_results(RunConfig.load(path).to_dict(), config.to_dict()):
            lines = "\n  ".join(different)
            raise UserError(f"{folder} holds a run of another configuration (saved against given):\n  {lines}")
    elif folder.is_dir() and any(not _is_ours(entry.name) for entry in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run; choose another folder")


def _is_ours(name: str) -> bool:
    return name in (LOCK, "train.log") or name.endswith(PARTIAL)


@contextmanager
def run_folder(folder: Path, config: RunConfig, *, resume: bool) -> Generator[None]:
    """Context in which ``folder`` is that of a run of ``config`` and no other process works in it.

    A resumed run may change these settings: how often it logs, validates and saves, what is measured afterwards, the
    number of processes and of passes a step, and how a step is computed, up to rounding. ``config.json`` is updated
    with them, except for a finished run.

    Raises:
        UserError: as ``check_run_folder``, or if another process works in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_run_folder(folder, config, resume=resume)
        if not (folder / "model").is_dir():
            config.save(folder / "config.json")
        yield


def save_model(model, tokenizer, folder: Path) -> None:
    """Write model and tokenizer to ``folder`` in Hugging Face's format, atomically."""
    for unfinished in folder.parent.glob(f"{folder.name}.*{PARTIAL}"):
        remove(unfinished)
    with replacing(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        remove(folder)  # of a run that was finished and went back; its checkpoint is newer
