"""The registry of experiments, and ``diff-transformer eval``: run any of them on any causal language model.

An experiment is a module with

    Settings            a frozen dataclass, filled by options and ``--set``; comments above the fields document them
    QUICK               the fields that ``--quick`` changes, to try everything in minutes on a small model
    run(lm, settings, samples) -> Result
    amount(settings, config)  prompts and their tokens in all, for ``--dry-run`` and progress; None for an unknown
                        number. ``config``: of the model; None if it is unknown. By default ``samples`` of ``length``

An experiment with ``NEEDS_MODEL = False`` gets None as ``lm``. ``run_eval`` runs one experiment on one model,
``run_suite`` several experiments on several models. One of yours is named by its file, ``path/to/mine.py``;
``examples/my_experiment.py`` is one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diff_transformer.checks import differences, read_json, require_known
from diff_transformer.durable import require_writable, write_whole
from diff_transformer.errors import UserError
from diff_transformer.evals.lm import load_lm, settings_of_lm
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.samples import Samples
from diff_transformer.lab.record import Record, records_of
from diff_transformer.lab.rows import CIRCUMSTANCES, ENDING, REQUEST, Rows, read_file, rows_of, write_rows
from diff_transformer.lab.user_code import load_file
from diff_transformer.model.card import label_of
from diff_transformer.model.loading import configuration_of
from diff_transformer.settings import build, parse

if TYPE_CHECKING:
    from diff_transformer.evals.lm import CausalLM

EXPERIMENTS = {  # in the order of the paper
    "harness": "Tables 1 and 8: lm-evaluation-harness, zero- and five-shot",
    "scaling": "Figure 3: power-law fits and the matched-loss ratio, from a table of runs",
    "long_nll": "Figure 4: negative log-likelihood by position",
    "needle": "Table 2, Figure 5: multi-needle retrieval",
    "allocation": "Table 3, Figure 1: attention on the answer and on the noise",
    "many_shot": "Figures 6, 7 and 9: many-shot classification and its robustness to order",
    "hallucination": "Table 4: contextual hallucination, by a judge",
    "outliers": "Table 5: largest attention logits and hidden states",
    "quantization": "Figure 8: quantised attention logits",
    "associative_recall": "Table 6: loss where the context can be recalled, and elsewhere",
    "recall": "key-value recall in noise, at the trained length and beyond",
    "ruler": "RULER's synthetic tasks, without a download",
    "anatomy": "attention, redundancy and importance of every head",
    "gradient_flow": "Appendix F: magnitudes of gradients, in a model and in its pair",
}
_MODULES = {"associative_recall": "repeat_loss", "recall": "kv_recall"}  # where the name is another


@cache
def experiment(name: str) -> ModuleType:
    """The module of an experiment of this package, or in a file of Python.

    Raises:
        ValueError: for an unknown name, or a module that is not an experiment.
    """
    if name in EXPERIMENTS:
        return import_module(f"diff_transformer.{'lab' if name == 'scaling' else 'evals'}.{_MODULES.get(name, name)}")
    if not (name.endswith(".py") and Path(name).is_file()):
        require_known("experiment", name, EXPERIMENTS, ", a file of Python, or all")
    module = load_file(name)
    if not is_dataclass(getattr(module, "Settings", None)) or not callable(getattr(module, "run", None)):
        raise UserError(
            f"{name} is no experiment; give it a frozen dataclass Settings and run(lm, settings, samples), which "
            "returns a Result (examples/my_experiment.py)"
        )
    if taken := {field.name for field in fields(module.Settings)} & {*CIRCUMSTANCES} - {"seed"}:
        raise UserError(f"{name} has the setting {', '.join(taken)}, a fact of every measurement; give it another name")
    return module


def label_of_experiment(name: str) -> str:
    """The name of an experiment in paths: of a file, that without its folder and ending."""
    return Path(name).stem if name.endswith(".py") else name


def settings_of(
    name: str, options: dict[str, Any], assignments: Sequence[str] = (), *, quick: bool = False, lenient: bool = False
) -> Any:
    """The ``Settings`` of an experiment: defaults, then ``QUICK``, then ``options`` that are not None, then ``--set``.

    Args:
        options: by field name. An option that the experiment lacks is an error; ``lenient`` ignores it.
        assignments: ``"field=value"``, the value as JSON or text.

    Raises:
        ValueError: for an unknown field (the message lists the known ones), or a value of another type.
    """
    module = experiment(name)
    known = {field.name for field in fields(module.Settings)}
    accepted = {
        key: value for key, value in options.items() if value is not None and not (lenient and key not in known)
    }
    accepted |= dict(parse(assignment) for assignment in assignments)
    values = (dict(getattr(module, "QUICK", {})) if quick else {}) | accepted
    return build(module.Settings, values, f"{name}.")


def run_eval(
    name: str,
    lm: "CausalLM | Path | str | None",
    settings: Any,
    out: Path | str,
    *,
    quick: bool = False,
    bar: "Bar | None" = None,
    identity: tuple[str, int, str] | None = None,
) -> Record:
    """Run one experiment on one model and write its rows to ``out``.

    Args:
        name: of an experiment, or a file of Python with one.
        lm: a model's folder, hub name or preset; or a ``diff_transformer.evals.lm.CausalLM``, which has a model, its
            tokenizer and the batch size. None for an experiment without a model.
        settings: what differs from the experiment's defaults, by name, as ``{"samples": 20}``; or its ``Settings``.
        out: file to write (``.jsonl.gz``), which ``load_records`` and ``diff-transformer report`` read.
        quick: start from the experiment's quick settings, for small models, where ``settings`` are given by name.
        identity: side, training seed and setting of the model; by default those of the training run that wrote its
            folder, else its name.

    Returns:
        The record of the model: its rows, and the numbers that are made of them (``metrics``).

    Raises:
        UserError: for an unknown experiment or setting, an ``out`` that exists or has another ending, or an extra that
            is not installed; nothing is written then.
    """
    module, out = experiment(name), Path(out)
    if not out.name.endswith(ENDING):
        raise UserError(f"{out} does not end with {ENDING}, as files of rows do; choose another name")
    if out.exists():
        raise UserError(f"{out} exists; choose another file")
    if isinstance(settings, Mapping):
        settings = settings_of(name, dict(settings), quick=quick)
    settings = build(module.Settings, asdict(settings), f"{name}.")
    if lm is None and _needs_model(name):
        raise UserError(f"{name} measures a model; give its folder, a name on the hub, a preset or a CausalLM")
    require_writable(out.parent)
    if isinstance(lm, str | Path):
        lm = load_lm(str(lm))
    model = settings_of_lm(lm)  # before an experiment can change it
    result = module.run(lm, settings, Samples(bar))
    facts = provenance(**asdict(settings)) | result.about | model
    who = identity or _identity("" if lm is None else lm.name, model.get("path", ""))
    rows = [*rows_of(result.experiment, result.rows, facts, *who)]
    write_rows(out, rows)
    return records_of(Rows(read_file(out)))[0]


def _identity(name: str, path: str) -> tuple[str, int, str]:
    """Side, training seed and setting of the model in the folder ``path``: of the run that wrote it, else its name."""
    folder = Path(path)
    for place in (folder, *folder.parents[:2]) if folder.is_absolute() else ():  # not of a hub name or a preset
        if (place / REQUEST).is_file():
            run = read_json(place / REQUEST)
            if isinstance(run, dict) and "side" in run:
                return run["side"], run["seed"], run["setting"]
    return name, 0, ""


Bar = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """Which experiments to run on which models.

    Attributes:
        names: experiments.
        models: folders, names on the hub or presets.
        options: settings by name, for every experiment that has them; None leaves the experiment's default.
        assignments: ``"field=value"`` of ``--set``; with several experiments, ``"experiment.field=value"``.
        quick: as in ``settings_of``.
        device, dtype, batch_size: as in ``load_lm``.
    """

    names: Sequence[str]
    models: Sequence[str]
    options: dict[str, Any] = field(default_factory=dict)
    assignments: Sequence[str] = ()
    quick: bool = False
    device: str | None = None
    dtype: str | None = None
    batch_size: int = 32


@dataclass(frozen=True)
class Outcome:
    """One experiment on one model: its file, the record if it was measured by this call, or the error."""

    name: str
    model: str | None
    path: Path
    record: Record | None = None
    error: str | None = None


def names_of(name: str) -> tuple[str, ...]:
    """The experiments that a name on the command line stands for: "all" for every one that measures a model, but for
    RULER, whose prompts are too long for small models."""
    if name == "all":
        return tuple(n for n in EXPERIMENTS if _needs_model(n) and n != "ruler")
    experiment(name)
    return (name,)


def check_models(plan: Plan) -> None:
    """Check that models are given exactly where an experiment needs one.

    Raises:
        UserError: if a model is missing, or is given to experiments without one.
    """
    needed = any(_needs_model(name) for name in plan.names)
    if needed and not plan.models:
        raise UserError("no model; give --model with a folder, a name on the hub or a preset")
    if plan.models and not needed:
        raise UserError(f"{', '.join(plan.names)} takes no model; leave --model out")


def run_suite(
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    bar: Callable[[str], Bar] | None = None,
) -> list[Outcome]:
    """Run every experiment of ``plan`` on every model, one after another; write ``out/EXPERIMENT/MODEL.jsonl.gz``.

    With a single experiment, an error is raised unchanged. With several, it is kept in the outcome, and the others run.

    Args:
        resume: continue in an existing folder, whose finished results are kept.
        bar: makes the progress bar of one experiment on one model from its title.

    Raises:
        UserError: before anything runs, for unknown names, settings or models, an extra that is missing, or an ``out``
            that is not empty and not to be resumed, or holds a run of another plan.
    """
    for name in plan.names:
        settings_for(plan, name)
    check_models(plan)
    if len(plan.names) == 1:
        getattr(experiment(plan.names[0]), "require_installed", lambda: None)()
    labels = labels_of(plan.models)
    require_writable(out)
    for model in () if resume else plan.models:
        if configuration_of(model) is None:
            load_lm(model)  # which says why it cannot be
    open_folder(out, plan, resume)
    outcomes: list[Outcome] = []
    for model, label in [*zip(plan.models, labels, strict=True), (None, None)]:
        lm = None
        for name in (name for name in plan.names if _needs_model(name) == (model is not None)):
            path = out / label_of_experiment(name) / f"{label or 'runs'}{ENDING}"
            if path.exists():
                outcomes.append(Outcome(name, label, path))
                continue
            try:
                if model is not None and lm is None:
                    lm = load_lm(model, device=plan.device, dtype=plan.dtype, batch_size=plan.batch_size)
                    lm.name = str(label)
                show = bar(f"{name} {label or ''}".strip()) if bar else None
                settings = settings_for(plan, name)
                record = run_eval(name, lm, settings, path, bar=show)
                outcomes.append(Outcome(name, label, path, record))
            except Exception as error:
                if len(plan.names) == 1:
                    raise
                message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                outcomes.append(Outcome(name, label, path, error=message))
    return outcomes


def labels_of(models: Sequence[str]) -> list[str]:
    """A name for each model, by which its results are called; all differ.

    Raises:
        UserError: for a model that is given twice.
    """
    twice = [model for place, model in enumerate(models) if model in models[:place]]
    if twice:
        raise UserError(f"--model {twice[0]} is given twice; give each model once")
    for name in (label_of, lambda model: str(Path(model)).strip("./~").replace("/", "_")):
        labels = [name(model) for model in models]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{label}-{number}" for number, label in enumerate(labels, 1)]


def _needs_model(name: str) -> bool:
    return getattr(experiment(name), "NEEDS_MODEL", True)


def settings_for(plan: Plan, name: str) -> Any:
    """The settings of one experiment of ``plan``; ValueError for an assignment that it does not take."""
    assignments = []
    for assignment in plan.assignments:
        key, _, value = assignment.partition("=")
        head, dot, tail = key.partition(".")
        if len(plan.names) == 1 and not dot:
            assignments.append(assignment)
        elif dot and head not in plan.names:
            raise UserError(f"--set {assignment}: {head!r} is not among the experiments: {', '.join(plan.names)}")
        elif dot and head == name:
            assignments.append(f"{tail}={value}")
        elif not dot:
            raise UserError(
                f"--set {assignment}: with several experiments name one: --set {plan.names[0]}.{assignment}"
            )
    return settings_of(name, plan.options, assignments, quick=plan.quick, lenient=len(plan.names) > 1)


def open_folder(out: Path, plan: Plan, resume: bool) -> None:
    """Make ``out`` the folder of ``plan``, or check that it is; raises as ``run_suite``."""
    request = json.loads(json.dumps({**plan.__dict__, "names": list(plan.names), "models": list(plan.models)}))
    del request["batch_size"], request["device"]  # a resumed run may change them, as after one out of memory
    path = out / REQUEST
    if path.exists() and resume:
        different = differences(read_json(path), request)
        if different:
            listed = "\n  ".join(different)
            raise UserError(f"{out} holds experiments with other settings (saved against given):\n  {listed}")
        return
    if out.is_file() or (out.exists() and any(out.iterdir())):
        hint = "resume it (--resume) or choose another" if path.exists() else "choose another"
        raise UserError(f"{out} is not an empty folder; {hint}")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(request, indent=1) + "\n")
