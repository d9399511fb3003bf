"""Worker processes of this machine. The module is light, as each run on a Ray cluster has a process that imports it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.durable import write_whole

LOG, STATUS = "worker.log", "status.json"
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes of a worker that was stopped
ENDS_WITH_INPUT = "--ends-with-input"


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
    write_whole(folder / STATUS, json.dumps({"stage": stage, "step": step, "loss": loss}))


def read_status(folder: Path) -> dict:
    """``stage``, ``step`` and ``loss`` (None outside training) of the run in ``folder``."""
    path = folder / STATUS
    return read_json(path) if path.exists() else {"stage": "starting", "step": 0, "loss": None}
