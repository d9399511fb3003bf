"""Several experiments on several models, into one folder: ``diff-transformer eval all``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from diff_transformer.durable import require_writable
from diff_transformer.evals.command import EXPERIMENTS, experiment, label_of, load_lm, run_eval, settings_of
from diff_transformer.evals.types import Result

Bar = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """What to run, and on what.

    Attributes:
        names: experiments.
        models: folders, names on the hub or presets.
        options: settings by name, of every experiment that has them; None leaves the experiment's own.
        assignments: ``"field=value"`` of ``--set``; with several experiments, ``"experiment.field=value"``.
        quick, limit: as in ``settings_of`` and ``run_eval``.
        device, dtype, batch_size: as in ``load_lm``.
    """

    names: Sequence[str]
    models: Sequence[str]
    options: dict[str, Any] = field(default_factory=dict)
    assignments: Sequence[str] = ()
    quick: bool = False
    limit: int | None = None
    device: str | None = None
    dtype: str | None = None
    batch_size: int = 32


@dataclass(frozen=True)
class Outcome:
    """One experiment on one model: its file, and the result or why there is none."""

    name: str
    model: str | None
    path: Path
    result: Result | None = None
    error: str | None = None


def names_of(name: str, quick: bool) -> tuple[str, ...]:
    """The experiments that a name on the command line stands for.

    "all" is every experiment on a model; with ``quick`` also those that train or read tables instead.
    """
    if name == "all":
        return tuple(n for n in EXPERIMENTS if quick or getattr(experiment(n), "NEEDS_MODEL", True))
    experiment(name)
    return (name,)


def check_models(plan: Plan) -> None:
    """Check that there is a model for an experiment that needs one, and none, nor settings of one, where none does.

    Raises:
        ValueError: otherwise.
    """
    if any(_needs_model(name) for name in plan.names):
        if not plan.models:
            raise ValueError("no model; give --model with a folder, a name on the hub or a preset")
        return
    given = {
        "--model": bool(plan.models),
        "--device": plan.device is not None,
        "--dtype": plan.dtype is not None,
        "--batch-size": plan.batch_size != Plan.batch_size,
    }
    refused = [option for option, is_given in given.items() if is_given]
    if refused:
        name = ", ".join(plan.names)
        settings = ", ".join(field.name for field in fields(experiment(plan.names[0]).Settings))
        raise ValueError(
            f"{name} takes no model, so {', '.join(refused)} would change nothing; leave out what is of a model, and "
            f"set with --set what {name} has: {settings}"
        )


def run_suite(plan: Plan, out: Path, *, resume: bool = False, bar: Callable[[str], Bar] | None = None) -> list[Outcome]:
    """Run every experiment of ``plan`` on every model; write ``out/EXPERIMENT/MODEL.json``.

    With a single experiment an error is raised as it is; with several it is kept with its outcome, and the others run.

    Args:
        resume: go on in a folder: finished results are kept, interrupted ones continued.
        bar: makes the progress bar of one experiment on one model from its title.

    Raises:
        FileExistsError: if ``out`` is not empty and ``resume`` is False, or holds a run of another plan.
        DiskError: if ``out`` is a file, or may not be written to.
        ValueError: for names, settings or models that do not exist; nothing has run then.
    """
    settings = {name: _settings(plan, name) for name in plan.names}
    check_models(plan)
    labels = [label_of(model) for model in plan.models]
    if len(set(labels)) < len(labels):
        labels = [str(Path(model)).strip("./~").replace("/", "_") for model in plan.models]
    _open_folder(out, plan, resume)
    outcomes = []
    for model, label in [*zip(plan.models, labels, strict=True), (None, None)]:
        mine = [name for name in plan.names if _needs_model(name) == (model is not None)]
        lm = None
        for name in mine:
            path = out / name / f"{label or 'runs'}.json"
            if path.exists():
                outcomes.append(Outcome(name, label, path, Result.load(path)))
                continue
            if model is not None and lm is None:
                lm = load_lm(model, device=plan.device, dtype=plan.dtype, batch_size=plan.batch_size)
                lm.name = str(label)
            show = bar(f"{name} {label or ''}".strip()) if bar else None
            try:
                result = run_eval(name, lm, settings[name], path, limit=plan.limit, resume=resume, bar=show)
                outcomes.append(Outcome(name, label, path, result))
            except Exception as error:
                if len(plan.names) == 1:
                    raise
                outcomes.append(Outcome(name, label, path, error=f"{type(error).__name__}: {error}"))
    return outcomes


def _needs_model(name: str) -> bool:
    return getattr(experiment(name), "NEEDS_MODEL", True)


def _settings(plan: Plan, name: str) -> Any:
    assignments = []
    for assignment in plan.assignments:
        key, _, value = assignment.partition("=")
        head, dot, tail = key.partition(".")
        if len(plan.names) == 1 and not dot:
            assignments.append(assignment)
        elif dot and head not in plan.names:
            raise ValueError(f"--set {assignment}: {head!r} is not among the experiments: {', '.join(plan.names)}")
        elif dot and head == name:
            assignments.append(f"{tail}={value}")
        elif not dot:
            raise ValueError(
                f"--set {assignment}: with several experiments name one: --set {plan.names[0]}.{assignment}"
            )
    return settings_of(name, plan.options, assignments, quick=plan.quick, lenient=len(plan.names) > 1)


def _open_folder(out: Path, plan: Plan, resume: bool) -> None:
    request = json.loads(json.dumps({**plan.__dict__, "names": list(plan.names), "models": list(plan.models)}))
    path = out / "request.json"
    require_writable(out)
    if path.exists() and resume:
        from diff_transformer.checks import differences

        different = differences(json.loads(path.read_text()), request)
        if different:
            listed = "\n  ".join(different)
            raise FileExistsError(f"{out} holds experiments with other settings (there against here):\n  {listed}")
        return
    if out.is_file() or (out.exists() and any(out.iterdir())):
        hint = "resume it (--resume) or choose another" if path.exists() else "choose another"
        raise FileExistsError(f"{out} is not an empty folder; {hint}")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(request, indent=1) + "\n")
