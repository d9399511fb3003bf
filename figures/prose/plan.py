"""The prose study: one loss is the objective, and every side is swept on it.

Two sizes on prose alone; then the desk study's main setting, prose and needles together, on the same books. Sides,
outcomes and the order of the runs were fixed before the runs, in preregistration.md.

Command: ``diff-transformer study prose --corpus FOLDER --out runs/prose --minutes 60``, repeated until it reports that
all runs are finished. Hardware: two CPU cores. Time: six hours for prose alone, three more with needles.
"""

import dataclasses
from typing import Any

from diff_transformer.lab.recipes.desk import demo
from diff_transformer.lab.record import Record
from diff_transformer.lab.stages import SWEPT, Rate, Stage
from diff_transformer.train.config import RunConfig

LEARNING_RATES = (1e-3, 2e-3, 4e-3, 8e-3)
HIGHER_RATES = (1.6e-2, 3.2e-2)  # tried after all runs, at the small size, for the sides that were best at 8e-3
SEEDS = range(5)
SWEEP_SEEDS = (100,)
SIDES: dict[str, dict[str, Any]] = {
    "softmax": {"variant": "softmax"},
    "diff": {"variant": "diff", "head_norm_init": 0.1},
    "softmax_norm": {"variant": "softmax_norm", "head_norm_init": 0.1},
    "softmax_half_heads": {"variant": "softmax_norm", "head_norm_init": 0.1},  # as many heads as DIFF has, and as wide
    "diff_no_subtraction": {"variant": "fixed_lambda", "head_norm_init": 0.1, "lambda_init": 0.0},
    "diff_norm1": {"variant": "diff", "head_norm_init": 1.0},
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


def final_loss(record: Record) -> float:
    """The last validation loss, nats a token: what a sweep minimises."""
    return record.metrics["validation_loss"]


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


def stages(corpus: str) -> list[Stage]:
    """``corpus``: a folder with train/ and val/ inside, val/ by other authors."""
    small, medium, together = base(corpus, "small"), base(corpus, "medium"), mixed(corpus)
    measure = ("associative_recall", "long_nll")

    def at(config: RunConfig, names) -> dict[str, dict[str, Any]]:
        half = {"num_attention_heads": config.model["num_attention_heads"] // 2}
        return {name: SIDES[name] | (half if name == "softmax_half_heads" else {}) for name in names}

    def sweep(config: RunConfig, name: str, rates: Rate, names=tuple(SIDES), score=None) -> Stage:
        return Stage({name: config}, at(config, names), SWEEP_SEEDS, rates, "sweep/{setting}_lr{rate:g}", (), score)

    made = []
    for name, config in (("small", small), ("medium", medium)):
        made.append(sweep(config, name, LEARNING_RATES, score=final_loss))
        made.append(Stage({name: config}, at(config, SIDES), SEEDS, SWEPT, measure=measure))
    made.append(sweep(small, "small", HIGHER_RATES, HIGHER))
    made.append(Stage({"small_higher": small}, at(small, RAISED), SEEDS, RAISED, measure=measure))
    for rates in (MIXED_RATES[:1], MIXED_RATES[1:]):
        settings = {f"{MIXED}_lr{rate:g}": _with_rate(together, rate) for rate in rates}
        made.append(Stage(settings, at(together, MIXED_SIDES), SEEDS, measure=(*measure, "needle")))
    return made


def _with_rate(config: RunConfig, rate: float) -> RunConfig:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate))
