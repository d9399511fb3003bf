"""Run many specs, a few at a time. No other module starts training processes.

``run_pool`` starts, watches, resumes and stops the runs of every plan (``compare``, ``study``, ``ablation``). Each run
is a worker (``lab/worker.py``) that an ``Executor`` starts: ``LocalProcesses`` here, or ``RayTasks`` on the nodes of a
cluster (``lab/ray_pool.py``).
"""

import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diff_transformer.errors import UserError
from diff_transformer.lab.processes import INTERRUPTED, LOG, TERMINATED, read_status, start_worker
from diff_transformer.lab.rows import finished
from diff_transformer.lab.spec import RunSpec
from diff_transformer.train.checkpoint import latest_checkpoint
from diff_transformer.train.signals import Interrupted, Stopped

_POLL_SECONDS = 0.5
_END = 12  # lines of a log in an error
_FEW = 8  # runs that each have a progress bar from the start

Runs = Mapping[Path, RunSpec]  # by folder, in the order in which they start
Show = Callable[[Path, dict], None]  # called with the folder and status of an active run


class RunFailed(UserError):
    """A run ended with an error. The message holds the end of its log."""


class Worker(Protocol):
    """A running process with the interface of ``subprocess.Popen``. ``poll`` and ``wait`` return the exit code."""

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def wait(self) -> int: ...


class Executor(Protocol):
    """Starts workers."""

    def start(self, folder: Path) -> Worker: ...


class LocalProcesses:
    """Start workers as processes on this machine. They end with this process."""

    def start(self, folder: Path) -> Worker:
        return start_worker(folder)


def default_jobs(runs: int) -> int:
    """Default number of concurrent runs: one on a GPU, one per core on a CPU.

    Fewer than two per core run all at once: they end together, and no core waits for the last ones.
    """
    import torch

    cores = os.cpu_count() or 1
    return 1 if torch.cuda.is_available() else max(1, runs if runs < 2 * cores else cores)


def run_pool(
    runs: Runs,
    *,
    jobs: int | None,
    show: Show,
    resume_hint: str = "continue with --resume",
    until: float = float("inf"),
    executor: Executor | None = None,
) -> None:
    """Train and measure every run that has no record yet, ``jobs`` at a time.

    Args:
        jobs: None starts all; an executor for a cluster queues those that do not fit.
        show: reports progress; made by ``progress_bars``.
        resume_hint: how to resume, for the message of an interrupted run.
        until: time of ``time.monotonic()`` at which all runs save and stop, and the function returns.
        executor: of the runs; processes on this machine by default.

    Raises:
        RunFailed: if a run fails; the others save and stop.
        Interrupted: after Ctrl-C or SIGTERM, once the runs have saved their states. If no run had a state to save,
            KeyboardInterrupt or another subclass of it.
    """
    executor = executor or LocalProcesses()
    waiting, working = [folder for folder in runs if not finished(folder)], {}
    try:
        while (waiting or working) and time.monotonic() < until:
            while waiting and (jobs is None or len(working) < jobs):
                folder = waiting.pop(0)
                runs[folder].save(folder)
                working[folder] = executor.start(folder)
            time.sleep(_POLL_SECONDS)
            for folder, worker in list(working.items()):
                code = worker.poll()
                show(folder, read_status(folder))
                if code is not None:
                    del working[folder]
                    _check(code, runs[folder], folder)
    except KeyboardInterrupt as stopped:
        _stop(working)
        if not any(latest_checkpoint(folder / "run") for folder in runs):
            raise
        number = getattr(stopped, "number", signal.SIGINT)
        raise Interrupted(f"stopped, state saved; {resume_hint}", number) from None
    finally:
        _stop(working)


def _check(code: int, spec: RunSpec, folder: Path) -> None:
    if code in (TERMINATED, -signal.SIGTERM):  # the signal itself: the worker was still starting
        raise Stopped
    if code in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    if code:
        lines = (folder / LOG).read_text(errors="replace").strip().splitlines()[-_END:]
        name = spec.key.lstrip("/")
        raise RunFailed("\n".join([f"{name} failed with exit code {code}; the end of {folder / LOG}:", *lines]))


def _stop(working: dict[Path, Worker]) -> None:
    """Ask each worker to save and stop, and wait for it, however long its step takes."""
    workers = [working.pop(folder) for folder in list(working)]
    for worker in workers:
        if worker.poll() is None:
            with suppress(ProcessLookupError):
                worker.send_signal(signal.SIGTERM)
    for worker in workers:
        worker.wait()


@contextmanager
def progress_bars(runs: Runs, console: Console) -> Generator[Show]:
    """Show a bar per run with its stage or loss. With many runs: one bar for all, and one per active run."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    done = {folder for folder in runs if finished(folder)}
    many = len(runs) > _FEW
    with Progress(*columns, console=console, refresh_per_second=2) as bars:
        total = bars.add_task("runs", total=len(runs), completed=len(done), note="", visible=many)
        tasks = {
            folder: bars.add_task(
                spec.key.lstrip("/"),
                total=spec.config.train.steps,
                completed=spec.config.train.steps if folder in done else 0,
                note="done" if folder in done else "waiting",
                start=False,
                visible=not many,
            )
            for folder, spec in runs.items()
        }

        def show(folder: Path, status: dict) -> None:
            task, ended = tasks[folder], status["stage"] == "done"
            if status["stage"] == "starting":  # or in the queue of a cluster
                return
            note = status["stage"] if status["loss"] is None else f"loss {status['loss']:.3f}"
            bars.start_task(task)
            bars.update(task, completed=status["step"], note=note, visible=not (many and ended))
            if ended and folder not in done:
                done.add(folder)
                bars.stop_task(task)
                bars.update(total, completed=len(done))

        yield show
