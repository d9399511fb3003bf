"""Worker processes of this machine. The module is light, as each run on a Ray cluster has a process that imports it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from diff_transformer.checks import read_json
from diff_transformer.durable import write_whole

LOG, STATUS = "worker.log", "status.json"
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes of a worker that was stopped
ENDS_WITH_INPUT = "--ends-with-input"
_LOCK_SECONDS = 120  # for the process of a lost attempt to end
_SEE_SECONDS = 10  # for a new file to reach a node


def start_worker(folder: Path) -> subprocess.Popen:
    """Start the worker of ``folder``. It shares the terminal, so Ctrl-C reaches it too.

    It has a pipe from this process, which closes when this process ends, even if it is killed. The worker then exits,
    so that its folder is free when the plan is resumed.
    """
    command = [sys.executable, "-m", "diff_transformer.lab.worker", str(folder), ENDS_WITH_INPUT]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "true"}
    with (folder / LOG).open("a") as log:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=log, stderr=subprocess.STDOUT, env=environment)


def write_status(folder: Path, stage: str, step: int = 0, loss: float | None = None) -> None:
    write_whole(folder / STATUS, json.dumps({"stage": stage, "step": step, "loss": loss}), durable=False)


def read_status(folder: Path) -> dict:
    """``stage``, ``step`` and ``loss`` (None outside training) of the run in ``folder``."""
    path = folder / STATUS
    return read_json(path) if path.exists() else {"stage": "starting", "step": 0, "loss": None}


class NodeProcess:
    """The actor of a run on a cluster: a worker on its node. Its methods run once the worker is started.

    Args:
        working: directory of the driver, for relative paths in the configuration; skipped if the node lacks it.
        gpus: of the run; with 0 it sees none, also on a node that has some.
    """

    def __init__(self, folder: Path, working: Path, gpus: float):
        if not gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if working.is_dir():
            os.chdir(working)
        if (folder / "run").is_dir():  # the process of a lost attempt may still be ending
            lock = FileLock(folder / "run" / "run.lock", timeout=_LOCK_SECONDS, fallback_to_soft=False)
            with suppress(OSError), lock:  # some file systems have no locks
                pass
        self._worker = start_worker(folder)

    def begun(self) -> None:
        """Return, as the worker is started."""

    def wait(self) -> int:
        return self._worker.wait()

    def send_signal(self, sig: int) -> None:
        self._worker.send_signal(sig)


def reads(path: Path, content: str) -> bool:
    """True if this machine reads ``content`` in ``path``. A network file system may show a new file late."""
    end = time.monotonic() + _SEE_SECONDS
    while time.monotonic() < end:
        if path.exists() and path.read_text() == content:
            return True
        time.sleep(0.2)
    return False
