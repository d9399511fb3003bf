"""``eval`` of several models on a cluster: a task of the pool for each model, which runs every experiment on it.

The task of a model has the folder ``OUT/tasks/MODEL``. Results are where ``run_suite`` writes them without a cluster.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.durable import write_whole
from diff_transformer.evals.types import Result
from diff_transformer.lab.experiments import Bar, Outcome, Plan, experiment, on_model, result_path
from diff_transformer.lab.pool import Executor, run_pool
from diff_transformer.lab.spec import REQUEST

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
    """Whether ``folder`` holds an ``EvalSpec``."""
    return "plan" in read_json(folder / REQUEST)


def run_on_model(folder: Path) -> None:
    """Run the experiments of the ``EvalSpec`` in ``folder`` that have no result yet, and write their errors."""
    spec = read_json(folder / REQUEST)
    outcomes = on_model(Plan(**spec["plan"]), spec["model"], spec["label"], Path(spec["out"]), resume=True)
    errors = {outcome.name: outcome.error for outcome in outcomes if outcome.error}
    write_whole(folder / _ERRORS, json.dumps(errors))
