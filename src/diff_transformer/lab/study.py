"""``study``: train many small models with several seeds, over as many calls as needed.

A study is a plan for the pool in two stages: a sweep of learning rates, then the runs that use the best ones. Each run
has a folder ``OUT/SETTING/SIDE-seedK`` with its ``record.json``.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from diff_transformer.checks import differences, require_positive
from diff_transformer.durable import require_writable
from diff_transformer.lab.pool import Executor, progress_bars, run_pool
from diff_transformer.lab.record import finished, load_run
from diff_transformer.lab.spec import REQUEST, RunSpec, Study
from diff_transformer.train.data_config import NO_CORPUS
from diff_transformer.train.run_folder import LOCK, RunLock


@dataclass(frozen=True)
class Progressed:
    """Progress of a study: ``finished`` of ``total`` runs."""

    finished: int
    total: int


def run_study(
    study: Study,
    out: Path | str,
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    console=None,
) -> Progressed:
    """Run the unfinished runs of ``study`` in ``out``; stop after ``minutes``.

    At the end of the time, or after Ctrl-C, active runs save their state, and the next call continues them. Finished
    runs are kept.

    Args:
        jobs: runs at a time; by default one per core, or all with an ``executor``.
        executor: of the runs, for example ``RayTasks``; processes on this machine by default.

    Raises:
        RunFailed: if a run fails, with the end of its log; the others save and stop.
        ValueError: if ``out`` holds a run with another configuration, or for an invalid model.
        FileExistsError: if ``out`` is not empty and holds no study.
        FileNotFoundError: if the corpus does not exist.
        DiskError: if ``out`` is not writable, or another study is running in it.
    """
    require_positive(minutes=minutes, jobs=jobs)
    console, out = console or Console(), Path(out)
    require_writable(out)
    if executor is None:
        jobs = jobs or os.cpu_count() or 1
    until = time.monotonic() + 60 * minutes if minutes else math.inf
    if out.is_dir() and any(out.iterdir()) and not _holds_runs(out):
        raise FileExistsError(f"{out.absolute()} is not empty and holds no study; choose another folder")
    _check(study.sweep, out)
    out.mkdir(parents=True, exist_ok=True)
    pool = partial(run_pool, jobs=jobs, until=until, executor=executor, resume_hint="the same command goes on")
    with RunLock(out):
        _run(study.sweep, out, pool, console)
        stage, known, rates = study, {spec.key for spec in study.sweep}, {}
        while all(finished(out / key) for key in known):
            rates |= stage.choose(sweep_scores(stage, out))
            specs = stage.runs(rates)
            _check(specs, out)
            known |= {spec.key for spec in specs}
            _run(specs, out, pool, console)
            if stage.then is None:
                break
            stage = stage.then
            known |= {spec.key for spec in stage.sweep}
            _check(stage.sweep, out)
            _run(stage.sweep, out, pool, console)
        every = study.keys()
        return Progressed(_count(out, every), len(every))


def sweep_scores(study: Study, out: Path) -> dict[str, float]:
    """The score of each finished run of the sweep, by key; infinity for one that diverged."""
    scores = {}
    for spec in study.sweep:
        if finished(out / spec.key):
            record = load_run(out / spec.key, spec.setting, spec.side, spec.seed)
            scores[spec.key] = math.inf if record.diverged else study.score(record)
    return scores


def _holds_runs(out: Path) -> bool:
    """Whether a study began in ``out``, or runs of one were put there."""
    folders = [*out.glob("*/*-seed*"), *out.glob("*/*/*-seed*")]
    if any((out / name).exists() for name in ("config.json", "compare.json")):  # a run of train, or of compare
        return False
    return (out / LOCK).exists() or any(finished(folder) or (folder / REQUEST).exists() for folder in folders)


def _run(specs: list[RunSpec], out: Path, pool: Callable, console: Console) -> None:
    runs = {out / spec.key: spec for spec in specs}
    if all(map(finished, runs)):
        return
    with progress_bars(runs, console) as show:
        pool(runs, show=show)


def _check(specs: list[RunSpec], out: Path) -> None:
    """Raise, before anything is written, for runs with another configuration, invalid models and missing text."""
    from diff_transformer.data.corpus import load_corpus
    from diff_transformer.train.initial_model import check_model

    for spec in specs:
        different = _differences(spec, out / spec.key)
        if different:
            listed = "\n  ".join(different)
            raise ValueError(
                f"{out / spec.key} has another configuration (saved against given):\n  {listed}\n"
                "give the corpus it was made with, or choose another folder"
            )
    missing = [spec.config for spec in specs if not finished(out / spec.key)]
    for config in {json.dumps(config.model, sort_keys=True): config for config in missing}.values():
        check_model(config)
    for source in {config.data.corpus for config in missing} - {"python", NO_CORPUS}:
        load_corpus(source)


def _differences(spec: RunSpec, folder: Path) -> list[str]:
    """The training settings in which a run in ``folder`` differs from ``spec``. Its measurements may differ."""
    if (folder / REQUEST).exists() or not finished(folder):
        return spec.differences(folder)
    record, here = load_run(folder, spec.setting, spec.side, spec.seed), spec.config  # a record holds fewer settings
    wanted = {"model": here.model, "lr": here.optim.lr, "seed": here.train.seed, "steps": here.train.steps}
    there = {"model": record.config["model"], "lr": record.lr, "seed": record.config["train"]["seed"]}
    return differences({**there, "steps": record.steps}, json.loads(json.dumps(wanted)))


def _count(out: Path, keys: Iterable[str]) -> int:
    return sum(finished(out / key) for key in keys)
