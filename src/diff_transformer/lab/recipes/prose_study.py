"""The prose study: one loss is the objective, and every side is swept on it.

Two sizes on prose alone; then the desk study's main setting, prose and needles together, on the same books. Sides,
outcomes and the order of the runs were fixed before the runs, in figures/prose/preregistration.md.
"""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

from diff_transformer.lab.recipes.desk import demo
from diff_transformer.lab.recipes.recall_study import at_rate
from diff_transformer.lab.spec import Choices, RunSpec, Study, seeds, side_model
from diff_transformer.train.config import RunConfig

LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
HIGHER_RATES = (1.6e-2, 3.2e-2)  # tried after all runs, at the small size, for the sides that were best at 8e-3
SEEDS = range(5)
SWEEP_SEEDS = range(100, 101)
# Sides: a variant of ``model/matching.py`` (at equal cost) and further fields.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "diff": ("diff", {"head_norm_init": 0.1}),
    "softmax_norm": ("softmax_norm", {"head_norm_init": 0.1}),
    "softmax_half_heads": ("softmax_norm", {"head_norm_init": 0.1}),
    "diff_no_subtraction": ("fixed_lambda", {"head_norm_init": 0.1, "lambda_init": 0.0}),
    "diff_norm1": ("diff", {"head_norm_init": 1.0}),
}
HIGHER = tuple(side for side in SIDES if side != "diff_norm1")
RAISED = {"softmax": 1.6e-2, "diff_no_subtraction": 1.6e-2}  # better there: trained again with all seeds
# The sizes: fields of the model, steps of 16 rows of 128 tokens. 21 and 7 tokens for each parameter.
SIZES: dict[str, tuple[dict[str, int], int]] = {
    "small": ({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, 2400),
    "medium": ({"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8}, 3000),
}

# Prose and needles together, at the medium size: every side at every rate with all seeds.
MIXED = "mixed"
MIXED_RATES = (2e-3, 1e-3, 4e-3)  # the desk study's first
MIXED_SIDES = ("softmax", "diff", "softmax_norm", "diff_no_subtraction", "diff_norm1")


def base(corpus: str, size: str) -> RunConfig:
    """A size of the study on prose alone: maps of width 16, rows of 128 tokens, 2048 tokens of vocabulary."""
    config, (fields, steps) = demo(), SIZES[size]
    config.name = "prose"
    config.model |= {**fields, "max_position_embeddings": 512}
    config.data.corpus, config.data.max_bytes = corpus, None
    config.data.mixture, config.data.loss = {"text": 1.0}, "tokens"
    config.train.steps, config.train.validate_every, config.train.checkpoint_every = steps, steps // 15, steps // 3
    config.train.checkpoint_keep, config.train.validation_rows = 1, 128
    books = {"samples": 64, "length": 512}
    config.evaluation = dataclasses.replace(config.evaluation, loss_rows=512, recall_steps=0, more={"long_nll": books})
    return config


def mixed(corpus: str) -> RunConfig:
    """The medium size as the desk study trains it: half prose and half needles, 1500 steps."""
    config = base(corpus, "medium")
    config.data.mixture, config.data.loss = {"text": 0.5, "needles": 0.5}, "sources"
    config.data.needles.queries = (1, 2)
    config.train.steps, config.train.validate_every, config.train.checkpoint_every = 1500, 50, 500
    config.evaluation.needles, config.evaluation.samples = ((1, 1), (2, 1), (4, 1), (4, 2)), 50
    return config


def prose_study(corpus: str) -> Study:
    """The prose study; see the module. ``corpus``: a folder with train/ and val/ inside, val/ by other authors.

    Command: ``diff-transformer study prose --corpus FOLDER --out runs/prose --minutes 60``, repeated until it reports
    that all runs are finished. Hardware: two CPU cores. Time: six hours for prose alone, three more with needles.
    """

    def sweep(size: str, sides: Iterable[str] = SIDES, rates: tuple[float, ...] = LEARNING_RATES) -> list[RunSpec]:
        return [
            dataclasses.replace(spec, setting=f"sweep/{size}_lr{rate:g}")
            for side in sides
            for rate in rates
            for spec in seeds(size, side, _side(base(corpus, size), side, rate), SWEEP_SEEDS, measured=False)
        ]

    def runs(size: str):
        def chosen(rates: Choices) -> list[RunSpec]:
            made = (seeds(size, side, _side(base(corpus, size), side, rates[side]), SEEDS) for side in SIDES)
            return sorted((_measured(spec) for of_side in made for spec in of_side), key=lambda spec: spec.seed)

        return chosen

    def raised(_: Choices) -> list[RunSpec]:
        made = (
            seeds("small_higher", side, _side(base(corpus, "small"), side, rate), SEEDS)
            for side, rate in RAISED.items()
        )
        again = sorted((_measured(spec) for of_side in made for spec in of_side), key=lambda spec: spec.seed)
        return sweep("small", HIGHER, HIGHER_RATES) + again

    def together(_: Choices) -> list[RunSpec]:
        made = [
            spec
            for rate in MIXED_RATES
            for side in MIXED_SIDES
            for spec in seeds(at_rate(MIXED, rate), side, _side(mixed(corpus), side, rate), SEEDS)
        ]
        made.sort(key=lambda spec: (spec.config.optim.lr != MIXED_RATES[0], spec.seed))
        return [_measured(spec, "needle") for spec in made]

    higher = Study("prose", [], raised, then=Study("prose", [], together))
    medium = Study("prose", sweep("medium"), runs("medium"), then=higher)
    return Study("prose", sweep("small"), runs("small"), then=medium)


def rates_of(size: str, side: str) -> tuple[float, ...]:
    """The learning rates at which a side is swept."""
    return LEARNING_RATES + (HIGHER_RATES if size == "small" and side in HIGHER else ())


def _measured(spec: RunSpec, *more: str) -> RunSpec:
    return dataclasses.replace(spec, measure=("associative_recall", "long_nll", *more))


def _side(config: RunConfig, side: str, rate: float) -> RunConfig:
    made, (name, fields) = copy.deepcopy(config), SIDES[side]
    made.optim.lr = rate
    if side == "softmax_half_heads":  # as many heads as DIFF has, and as wide
        made.model["num_attention_heads"] //= 2
    made.model |= fields
    made.model |= side_model(made, name)
    return made
