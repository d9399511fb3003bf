"""``study``: train many small models with several seeds, over as many calls as needed.

A study is a list of stages (``lab/stages.py``); the pool runs those up to a sweep at once. Each run has a folder
``OUT/SETTING/SIDE-seedK`` with its ``rows.jsonl.gz``.
"""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from diff_transformer.checks import require_known, require_positive
from diff_transformer.durable import require_writable
from diff_transformer.errors import UserError
from diff_transformer.lab.announce import announced_runs
from diff_transformer.lab.pool import Executor, default_jobs, progress_bars, run_pool
from diff_transformer.lab.record import load_run
from diff_transformer.lab.rows import EXPLORER, finished
from diff_transformer.lab.spec import REQUEST, RunSpec, check_folders
from diff_transformer.lab.stages import Stage
from diff_transformer.train.config import NO_CORPUS
from diff_transformer.train.run_folder import LOCK, locked

_UNKNOWN_RATE = 1e-3  # stands for one that a sweep is yet to choose


@dataclass(frozen=True)
class Progressed:
    """Progress of a study: ``finished`` of ``total`` runs."""

    finished: int
    total: int


def run_study(
    stages: Sequence[Stage],
    out: Path | str,
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    dry_run: bool = False,
) -> Progressed:
    """Run the unfinished runs of a study in ``out``; stop after ``minutes``.

    At the end of the time, or after Ctrl-C, active runs save their state, and the next call continues them. Finished
    runs are kept.

    Args:
        jobs: runs at a time; by default one per core, one on a GPU, or all with an ``executor``.
        executor: of the runs, for example ``RayTasks``; processes on this machine by default.
        dry_run: only say what would be done.

    Raises:
        RunFailed: if a run fails, with the end of its log; the others save and stop.
        ValueError: if ``out`` holds a run with another configuration, or for an invalid model.
        FileExistsError: if ``out`` is not empty and holds no study.
        FileNotFoundError: if the corpus does not exist.
        UserError: if ``out`` is not writable, or another study is running in it.
    """
    require_positive(minutes=minutes, jobs=jobs)
    console, out = Console(), Path(out)
    require_writable(out)
    if executor is None:
        jobs = jobs or default_jobs(os.cpu_count() or 1)
    until = time.monotonic() + 60 * minutes if minutes else math.inf
    if out.is_dir() and any(out.iterdir()) and not _holds_runs(out):
        raise UserError(f"{out.absolute()} is not empty and holds no study; choose another folder")
    first, *more = _parts(stages)
    specs, rates = [spec for stage in first for spec in stage.specs({})], {}
    every: dict[str, RunSpec] = {}
    for spec in _all_specs(stages):
        if every.setdefault(spec.key, spec).config.to_dict() != spec.config.to_dict():
            raise UserError(f"two runs of the plan have the folder {spec.key}; put {{setting}} or {{rate}} into it")
    _check(specs, out)
    _check_measured([*every.values()])
    unfinished = [spec for key, spec in every.items() if not finished(out / key)]
    console.print(announced_runs(unfinished, here=executor is None), soft_wrap=True)
    if dry_run:
        return Progressed(len(every) - len(unfinished), len(every))
    out.mkdir(parents=True, exist_ok=True)
    pool = partial(run_pool, jobs=jobs, until=until, executor=executor, resume_hint="the same command goes on")
    with locked(out):
        _run(specs, out, pool, console)
        for before, part in zip([first, *more], more, strict=False):
            if not all(finished(out / spec.key) for spec in specs):
                break
            rates |= best_rates(before[-1], rates, out)
            specs = [spec for stage in part for spec in stage.specs(rates)]
            _check(specs, out)
            _run(specs, out, pool, console)
        return Progressed(sum(finished(out / key) for key in every), len(every))


def _parts(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """The stages up to each sweep, which can run at once, and those after the last."""
    part = []
    for stage in stages:
        part.append(stage)
        if stage.score:
            yield part
            part = []
    if part:
        yield part


def _all_specs(stages: Sequence[Stage]) -> Iterator[RunSpec]:
    """The runs of all stages, at any rate where a sweep is yet to choose it."""
    rates: dict[str, float] = {}
    for stage in stages:
        yield from stage.specs(rates)
        if stage.score:
            rates |= dict.fromkeys(stage.sides, _UNKNOWN_RATE)


def _check_measured(specs: Sequence[RunSpec]) -> None:
    """Raise UserError for an experiment, or settings of one, that would fail after training."""
    from diff_transformer.lab.worker import more_experiments, settings_of_run

    for spec in specs:
        known = [*settings_of_run(spec.config), EXPLORER, *more_experiments(spec.config)]
        for name in spec.measure or ():
            require_known("experiment of `measure`", name, known, "; others are settings of evaluation.more")


def best_rates(sweep: Stage, rates: dict[str, float], out: Path) -> dict[str, float]:
    """For each side of a finished sweep the learning rate of the lowest score; a run that diverged has the highest."""
    assert sweep.score is not None  # it makes the stage a sweep
    scores: dict[tuple[str, float], list[float]] = defaultdict(list)
    for spec in sweep.specs(rates):
        record = load_run(out / spec.key)
        score = math.inf if record.diverged else sweep.score(record)
        scores[spec.side, spec.config.optim.lr].append(score if math.isfinite(score) else math.inf)
    means = {key: sum(of) / len(of) for key, of in scores.items()}
    return {side: min((mean, rate) for (of, rate), mean in means.items() if of == side)[1] for side, _ in means}


def _holds_runs(out: Path) -> bool:
    """True if a study began in ``out``, or runs of one were put there."""
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
    from diff_transformer.train.plan import resolve

    check_folders({out / spec.key: spec for spec in specs})
    missing = [spec.config for spec in specs if not finished(out / spec.key)]
    models = {json.dumps([config.model, config.train.initial_model], sort_keys=True): config for config in missing}
    for config in models.values():
        resolve(config)
    for source in {config.data.corpus for config in missing} - {"python", NO_CORPUS}:
        load_corpus(source)
