"""Run the members of a comparison in processes of their own, a few at a time, with one progress bar each."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diff_transformer.lab.worker import INTERRUPTED, TERMINATED, read_status
from diff_transformer.train.checkpoint import latest_checkpoint
from diff_transformer.train.signals import Stopped, once_saved

_POLL_SECONDS = 0.5


class MemberFailed(RuntimeError):
    """A member's process ended with an error; the message holds the end of its log."""


def run_pool(folders: list[Path], steps: int, *, jobs: int, console: Console) -> None:
    """Train and measure every member; ``folders[0:2]`` also write their attention maps for the report.

    Ctrl-C reaches the members too: each saves its state, and the comparison can be resumed.

    Raises:
        MemberFailed: if a process fails; the others are asked to save and stop.
        Interrupted: after Ctrl-C or SIGTERM, once the members have saved their states; another KeyboardInterrupt
            where none had come as far as that.
    """
    waiting, running = list(folders), {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, refresh_per_second=2) as bars:
        tasks = {f: bars.add_task(f.name, total=steps, note="waiting", start=False) for f in folders}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    folder = waiting.pop(0)
                    running[folder] = _start(folder, explorer=folder in folders[:2])
                    bars.start_task(tasks[folder])
                time.sleep(_POLL_SECONDS)
                for folder, process in list(running.items()):
                    status = read_status(folder)
                    note = status["stage"] if status["loss"] is None else f"loss {status['loss']:.3f}"
                    bars.update(tasks[folder], completed=status["step"], note=note)
                    if process.poll() is not None:
                        del running[folder]
                        bars.stop_task(tasks[folder])
                        if process.returncode == TERMINATED:
                            raise Stopped
                        if process.returncode == INTERRUPTED:
                            raise KeyboardInterrupt
                        if process.returncode:
                            raise MemberFailed(_failure(folder, process.returncode))
        except KeyboardInterrupt as stopped:
            _stop(list(running.values()))
            saved = any(latest_checkpoint(folder / "run") for folder in folders)
            raise once_saved(stopped, saved, "continue with --resume") from None
        except BaseException:
            _stop(list(running.values()))
            raise


def _start(folder: Path, *, explorer: bool) -> subprocess.Popen:
    command = [sys.executable, "-m", "diff_transformer.lab.worker", str(folder), "explorer" if explorer else "-"]
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "true"}
    with (folder / "member.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _stop(processes: list[subprocess.Popen]):
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()


def _failure(folder: Path, code: int) -> str:
    lines = (folder / "member.log").read_text().strip().splitlines()
    return f"{folder.name} failed with exit code {code}; the end of {folder / 'member.log'}:\n" + "\n".join(lines[-12:])
