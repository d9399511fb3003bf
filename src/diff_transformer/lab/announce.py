"""Announcement of a command: its work, how much, about how long; printed before it starts, or with ``--dry-run``."""

from collections.abc import Sequence
from typing import Any

from diff_transformer.lab.evaluate import Plan, check_models, experiment, settings_for
from diff_transformer.lab.sides import SOURCE, name_of
from diff_transformer.lab.spec import RunSpec
from diff_transformer.model.card import label_of
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.from_softmax import nearest
from diff_transformer.model.cost import model_cost
from diff_transformer.model.loading import configuration_of
from diff_transformer.train.config import RunConfig
from diff_transformer.train.estimate import about, training_flops
from diff_transformer.train.plan import resolve

_SHOWN = 8  # models that are named


def announced_runs(specs: Sequence[RunSpec], *, here: bool = True) -> str:
    """Models, tokens of training, experiments and time of runs.

    Args:
        here: they run on this machine, whose speed is known.
    """
    sides = list(dict.fromkeys(name_of(spec.side) for spec in specs))
    shown = ", ".join(sides) if len(sides) <= _SHOWN else f"{len(sides)} models"
    tokens = [
        spec.config.train.steps * spec.config.train.batch_size * spec.config.data.length * (spec.side != SOURCE)
        for spec in specs
    ]
    named = f" ({shown})" if specs else ""
    words = f"{len(specs)} run{'s' * (len(specs) != 1)}{named}: {sum(tokens):,} tokens of training"
    if here and specs:
        trained = (spec.config for spec in specs if spec.side != SOURCE)
        words += f", {about(sum(training_flops(config, _flops_per_token(config)) for config in trained))}"
    experiments = ", ".join(dict.fromkeys(name for spec in specs for name in spec.measure or ()))
    return f"{words}, then {experiments}" if experiments else words


def _flops_per_token(config: RunConfig) -> int:
    """Training FLOPs a token of the model of a run."""
    own = config.train.initial_model is None or "hidden_size" in config.model
    model = DiffTransformerConfig(**config.model) if own else resolve(config).model
    return model_cost(nearest(model), length=config.data.length).training_flops_per_token


def announced_experiments(plan: Plan) -> tuple[str, int]:
    """Experiments, models, prompts, tokens and time of a plan of ``eval``, a line for each experiment; and the prompts
    on all models, as far as their number is known.

    Raises:
        UserError: for an unknown setting, or models where an experiment takes none.
    """
    check_models(plan)
    models = {name: _text_configuration(name) for name in plan.models}
    named = ", ".join(_named(name, config) for name, config in models.items())
    lines = [f"{len(plan.names)} experiment{'s' * (len(plan.names) != 1)} on {named or 'no model'}"]
    every, flops, partly = 0, 0.0, ""
    for name in plan.names:
        words = []
        for config in models.values() or [None]:
            prompts, tokens = amount(plan, name, config)
            counted = "all of its data" if prompts is None else f"{prompts:,} prompts or rows"
            words.append(counted if tokens is None else f"{counted}, {tokens:,} tokens")
            every += prompts or 0
            if prompts and tokens and config is not None:
                flops += tokens * model_cost(nearest(config), length=tokens // prompts).flops_per_token
            else:
                partly = " whose length is known"
        of_model = "" if len(models) < 2 else " on each model" if len({*words}) == 1 else ", by model"
        lines.append(f"  {name}: {'; '.join(dict.fromkeys(words))}{of_model}")
    return "\n".join([*lines, *([f"{about(flops)} of forward passes over prompts{partly}"] if flops else [])]), every


def amount(plan: Plan, name: str, config: Any) -> tuple[int | None, int | None]:
    """Prompts or rows of one experiment of ``plan`` on a model, and their tokens in all; None for an unknown number.

    By ``amount(settings, config)`` of the experiment's module, else by its settings ``samples`` and ``length``.

    Args:
        config: of the model; None if it is unknown.
    """
    settings: Any = settings_for(plan, name)
    if hasattr(experiment(name), "amount"):
        return experiment(name).amount(settings, config)
    prompts, length = getattr(settings, "samples", None), getattr(settings, "length", None)
    return prompts, prompts * length if prompts and length else None


def _text_configuration(name: str) -> Any:
    config = configuration_of(name)
    return config and config.get_text_config()


def _named(name: str, config: Any) -> str:
    if config is None:
        return label_of(name)
    near = nearest(config)
    about = "" if near is config else "about "  # of another library's architecture
    return f"{label_of(name)} ({about}{model_cost(near).total_parameters:,} parameters)"
