"""The driver of a study: cells a few at a time, finished ones skipped, within a given time."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diff_transformer.checks import differences, require_positive
from diff_transformer.durable import require_writable
from diff_transformer.lab.spec import Cell, Study
from diff_transformer.train.checkpoint import latest_checkpoint
from diff_transformer.train.config import RunConfig
from diff_transformer.train.signals import once_saved

_POLL_SECONDS = 0.5
_STOP_SECONDS = 120


@dataclass(frozen=True)
class Progressed:
    """Where a study stands: cells ``finished`` of ``total``. Before its sweep is finished, the total is not known."""

    finished: int
    total: int | None


def run_study(
    study: Study, out: Path | str, *, minutes: float | None = None, jobs: int | None = None, console=None
) -> Progressed:
    """Do what is not done yet of ``study`` in ``out``, cell by cell; stop after ``minutes``.

    Each cell has a folder ``out/SETTING/SIDE-seedK`` with its run and its ``result.json``. A cell that the end of the
    time (or Ctrl-C) finds at work saves its state, and the next call goes on with it; a finished one is not run again.

    Args:
        jobs: cells at a time; one a core by default.

    Raises:
        RuntimeError: if a cell fails, with the end of its log; the others are asked to save and stop.
        ValueError: if ``out`` holds a cell of another configuration, or for models that cannot be made.
        FileNotFoundError: if there is no such corpus.
    """
    require_positive(minutes=minutes, jobs=jobs)
    console, out = console or Console(), Path(out)
    require_writable(out)
    jobs = jobs or os.cpu_count() or 1
    _check(study.sweep, out)
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    _run_cells(study.sweep, out, jobs, end, console)
    if not all(_finished(out, cell) for cell in study.sweep):
        return Progressed(_count(out, study.sweep), None)
    cells = study.cells(study.choose(sweep_losses(study, out)))
    _check(cells, out)
    _run_cells(cells, out, jobs, end, console)
    return Progressed(_count(out, [*study.sweep, *cells]), len(study.sweep) + len(cells))


def sweep_losses(study: Study, out: Path) -> dict[str, float]:
    """Final validation loss of the sweep's cells that are finished, by key; of one that diverged infinity."""
    losses = {}
    for cell in study.sweep:
        if _finished(out, cell):
            record = json.loads((out / cell.key / "result.json").read_text())
            losses[cell.key] = math.inf if record.get("diverged") else record["validation"]["loss"][-1]
    return losses


def _check(cells: list[Cell], out: Path) -> None:
    """Refuse, before anything is written, cells of another configuration, models and text that cannot be had."""
    from diff_transformer.data.corpus import load_corpus
    from diff_transformer.train.initial_model import check_model

    for cell in cells:
        different = _differences(cell, out / cell.key)
        if different:
            listed = "\n  ".join(different)
            raise ValueError(
                f"{out / cell.key} is of another configuration (there against here):\n  {listed}\n"
                "give the corpus it was made with, or choose another folder"
            )
    missing = [cell for cell in cells if not _finished(out, cell)]
    for model in {json.dumps(cell.config.model, sort_keys=True): cell.config for cell in missing}.values():
        check_model(model)
    for source in {cell.config.data.corpus for cell in missing} - {"python"}:
        load_corpus(source)


def _differences(cell: Cell, folder: Path) -> list[str]:
    """In what ``folder``, if it holds a cell, was trained otherwise than ``cell``. How it is measured may differ."""
    request, result, here = folder / "request.json", folder / "result.json", cell.config.to_dict()
    if request.exists():
        there = RunConfig.load(request).to_dict()
        return differences({**there, "evaluation": {}}, {**here, "evaluation": {}})
    if result.exists():  # of a record, which says less
        record = json.loads(result.read_text())
        wanted = {"model": here["model"], "lr": here["optim"]["lr"], **{k: here["train"][k] for k in ("seed", "steps")}}
        return differences({key: record[key] for key in wanted}, wanted)
    return []


def _run_cells(cells: list[Cell], out: Path, jobs: int, end: float, console: Console):
    waiting = [cell for cell in cells if not _finished(out, cell)]
    running: dict[str, subprocess.Popen] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    if not waiting:
        return
    with Progress(*columns, console=console, refresh_per_second=1) as bar:
        task = bar.add_task("cells", total=len(cells), completed=len(cells) - len(waiting), note="")
        try:
            while (waiting or running) and time.monotonic() < end:
                while waiting and len(running) < jobs:
                    cell = waiting.pop(0)
                    running[cell.key] = _start(cell, out)
                time.sleep(_POLL_SECONDS)
                for key, process in list(running.items()):
                    if process.poll() is not None:
                        del running[key]
                        if process.returncode:
                            raise RuntimeError(_failure(out / key, process.returncode))
                        bar.advance(task)
                bar.update(task, note=", ".join(running))
        except KeyboardInterrupt as stopped:
            _stop(list(running.values()))
            saved = any(latest_checkpoint(out / cell.key / "run") for cell in cells)
            raise once_saved(stopped, saved, "the same command goes on") from None
        finally:
            _stop(list(running.values()))


def _finished(out: Path, cell: Cell) -> bool:
    return (out / cell.key / "result.json").exists()


def _count(out: Path, cells: list[Cell]) -> int:
    return sum(_finished(out, cell) for cell in cells)


def _start(cell: Cell, out: Path) -> subprocess.Popen:
    folder = out / cell.key
    folder.mkdir(parents=True, exist_ok=True)
    cell.config.save(folder / "request.json")
    command = [
        sys.executable, "-m", "diff_transformer.lab.cell", str(folder), "measured" if cell.measured else "curve",
    ]  # fmt: skip
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "cell.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _stop(processes: list[subprocess.Popen]):
    """Ask each to save and stop, and wait for it."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _failure(folder: Path, code: int) -> str:
    lines = (folder / "cell.log").read_text().strip().splitlines()
    return f"{folder} failed with exit code {code}; the end of its cell.log:\n" + "\n".join(lines[-12:])
