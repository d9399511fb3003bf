"""The folder of a run: never overwritten, written to by one process (or one group of ranks) at a time."""

import errno
import json
import logging
import os
import platform
import re
from pathlib import Path
from typing import IO

from diff_transformer.checks import differences
from diff_transformer.durable import DiskError, explained, require_writable
from diff_transformer.train.config import RunConfig

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

logger = logging.getLogger("diff_transformer")

LOCK = "run.lock"
_OURS = {LOCK, "train.log"}
_FREE = re.compile(  # what changes nothing that is trained, but for rounding
    r"evaluation\.|train\.(checkpoint_\w+|parallel\.\w+|prefetch|peak_flops|accumulate|micro_rows|loss_chunk"
    r"|activation_checkpointing|compile|threads|log_every|validate_every):"
)


class RunLock:
    """A folder's lock, which the operating system releases when the process ends, however it ends."""

    def __init__(self, folder: Path):
        self._file: IO[str] | None = None
        path = folder / LOCK
        file = path.open("a+", encoding="utf-8")
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    file.seek(0)
                    owner = file.read().strip() or "an unknown process"
                    file.close()
                    raise DiskError(
                        errno.EBUSY, f"{folder} is in use by {owner}; wait for it, stop it, or choose another --out"
                    ) from None
                logger.warning("%s cannot be locked (%s): let no other process train in it", folder, error.strerror)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_run_folder(folder: Path, *, resume: bool) -> None:
    """Check, before anything is loaded, that ``folder`` can be the home of a run; write nothing.

    Raises:
        FileExistsError: if the folder holds anything and ``resume`` is False, or holds no run.
        DiskError: if it cannot be written to.
    """
    _refuse_strangers(folder, resume)
    require_writable(folder)


def open_run_folder(folder: Path, config: RunConfig, *, resume: bool) -> RunLock:
    """Make ``folder`` the home of a run of ``config``, or check that it already is and may go on; lock it.

    In a resumed run may differ: how often it logs, validates and saves, what is measured afterwards, over how many
    processes and in how many passes a step is spread, and how it is computed but for rounding. Nothing else may.
    ``config.json`` has the settings with which the run went on last; that of a finished run stays as it is.

    Returns:
        The lock, held until ``release`` (it is also a context manager) or the end of the process.

    Raises:
        FileExistsError: if the folder holds anything and ``resume`` is False.
        ValueError: if it holds a run of another configuration.
        DiskError: if it cannot be written to, or another process trains in it.
    """
    check_run_folder(folder, resume=resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(error.errno, f"{folder} cannot be written to: {error.strerror}; choose another --out") from None
    try:
        _refuse_strangers(folder, resume)
        path = folder / "config.json"
        if path.exists():
            _refuse_other_run(folder, path, config)
        if not (folder / "model").is_dir():
            config.save(path)
    except FileExistsError:
        lock.release()
        raise
    except OSError as error:
        lock.release()
        raise explained(error, folder, len(json.dumps(config.to_dict())), path.name) from error
    except BaseException:
        lock.release()
        raise
    return lock


def _refuse_strangers(folder: Path, resume: bool) -> None:
    if (folder / "config.json").exists():
        if not resume:
            raise FileExistsError(f"{folder} holds a run already; resume it (--resume) or choose another folder")
    elif folder.is_dir() and any(not _is_ours(entry.name) for entry in folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty and holds no run; choose another folder")


def _is_ours(name: str) -> bool:
    return name in _OURS or name == "config.json.partial"


def _refuse_other_run(folder: Path, path: Path, config: RunConfig) -> None:
    try:
        there = RunConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))).to_dict()
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); put the run's configuration back, or start anew") from None
    here = config.to_dict()
    different = [line for line in differences(there, here) if not _FREE.match(line)]
    if different:
        listed = "\n  ".join(different)
        raise ValueError(f"{folder} holds a run of another configuration (there against here):\n  {listed}")
