"""The experiments of ``eval`` on several models: here, one after another, or as tasks of the pool on a cluster.

The task of a model has the folder ``OUT/tasks/MODEL``. Results lie in the same places either way.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.durable import write_whole
from diff_transformer.errors import UserError
from diff_transformer.evals.types import Result
from diff_transformer.lab.evaluate import (
    Bar,
    Outcome,
    Plan,
    check_models,
    experiment,
    on_model,
    open_folder,
    require_installed,
    result_path,
    settings_for,
)
from diff_transformer.lab.pool import Executor, run_pool
from diff_transformer.lab.spec import REQUEST
from diff_transformer.model.card import label_of

_ERRORS = "errors.json"  # of the experiments that failed, by name


@dataclass(frozen=True)
class EvalSpec:
    """The experiments of ``plan`` on one of its models, as a task of the pool."""

    plan: Plan
    model: str
    label: str
    out: str

    @property
    def key(self) -> str:
        return self.label

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / REQUEST, json.dumps(asdict(self), indent=1) + "\n")


def run_suite(
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    bar: Callable[[str], Bar] | None = None,
    executor: Executor | None = None,
) -> list[Outcome]:
    """Run every experiment of ``plan`` on every model; write ``out/EXPERIMENT/MODEL.json``.

    With a single experiment, an error is raised unchanged. With several, it is kept in the outcome, and the others run.

    Args:
        resume: continue in an existing folder: finished results are kept, interrupted ones continued.
        bar: makes the progress bar of one experiment on one model from its title.
        executor: runs each model as a task of its own, for example ``RayTasks``; by default they run here, in turn.

    Raises:
        FileExistsError: if ``out`` is not empty and ``resume`` is False, or holds a run of another plan.
        UserError: if ``out`` is a file, or is not writable.
        ValueError: for unknown names, settings or models, before anything runs.
        RuntimeError: if the single experiment needs an extra that is not installed, before anything is written.
    """
    for name in plan.names:
        settings_for(plan, name)
    check_models(plan)
    if len(plan.names) == 1:
        require_installed(plan.names[0])
    labels = labels_of(plan.models)
    open_folder(out, plan, resume)
    models = list(zip(plan.models, labels, strict=True))
    if executor is None:
        outcomes = [outcome for model in models for outcome in on_model(plan, *model, out, resume=resume, bar=bar)]
    else:
        outcomes = run_models(plan, models, out, executor, bar)
    return outcomes + on_model(plan, None, None, out, resume=resume, bar=bar, executor=executor)


def labels_of(models: Sequence[str]) -> list[str]:
    """A name for each model, by which its results are called; all differ.

    Raises:
        ValueError: for a model that is given twice.
    """
    twice = [model for place, model in enumerate(models) if model in models[:place]]
    if twice:
        raise UserError(f"--model {twice[0]} is given twice; give each model once")
    for name in (label_of, lambda model: str(Path(model)).strip("./~").replace("/", "_")):
        labels = [name(model) for model in models]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label}-{number}" for number, label in enumerate(labels, 1)]


def run_models(
    plan: Plan,
    models: Sequence[tuple[str, str]],
    out: Path,
    executor: Executor,
    bar: Callable[[str], Bar] | None = None,
) -> list[Outcome]:
    """Run the experiments of ``plan`` on every model, at once where ``executor`` has room. Results in ``out`` are kept.

    Args:
        models: each with the label that names its files.

    Raises:
        RunFailed: if a model cannot be loaded, or the only experiment of the plan fails.
    """
    names = [name for name in plan.names if getattr(experiment(name), "NEEDS_MODEL", True)]
    paths = {label: [result_path(out, name, label) for name in names] for _, label in models}
    runs = {
        out / "tasks" / label: EvalSpec(plan, model, label, str(out.absolute()))
        for model, label in models
        if not all(path.exists() for path in paths[label])
    }
    shown = bar("experiments") if bar else None

    def show(*_) -> None:
        if shown:
            shown("finished", sum(path.exists() for mine in paths.values() for path in mine), len(names) * len(models))

    run_pool(runs, jobs=None, show=show, executor=executor)
    return [_outcome(name, label, out) for _, label in models for name in names]


def _outcome(name: str, label: str, out: Path) -> Outcome:
    path = result_path(out, name, label)
    if path.exists():
        return Outcome(name, label, path, Result.load(path))
    errors = read_json(out / "tasks" / label / _ERRORS)
    return Outcome(name, label, path, error=errors[name])


# ---- in the worker


def is_eval(folder: Path) -> bool:
    """True if ``folder`` holds an ``EvalSpec``."""
    return "plan" in read_json(folder / REQUEST)


def run_on_model(folder: Path) -> None:
    """Run the experiments of the ``EvalSpec`` in ``folder`` that have no result yet, and write their errors."""
    spec = read_json(folder / REQUEST)
    outcomes = on_model(Plan(**spec["plan"]), spec["model"], spec["label"], Path(spec["out"]), resume=True)
    errors = {outcome.name: outcome.error for outcome in outcomes if outcome.error}
    write_whole(folder / _ERRORS, json.dumps(errors))
