"""The recall study: does the subtraction help a model to find the right one of several facts in noise?

Key-value recall over a grid of pairs and noise. The questions, the outcomes and the order of the runs were fixed before
them, in figures/recall/preregistration.md.
"""

import copy
from collections.abc import Iterable
from typing import Any

from diff_transformer.lab.record import Record
from diff_transformer.lab.spec import RECALL, Choices, RunSpec, Study, side_model, with_seed
from diff_transformer.train.config import OptimConfig, RunConfig, TrainConfig
from diff_transformer.train.data_config import NO_CORPUS, DataConfig, RecallConfig

# The grid: name of the setting -> pairs of a row, noise tokens for each pair.
GRID = {f"p{pairs}_n{noise}": (pairs, noise) for noise in (0, 2, 4) for pairs in (4, 8, 16)}
CENTRE = "p8_n2"  # where learning rates are chosen and other factors are varied
QUESTIONS = 16  # of a row
NOISE_SYMBOLS = 2
SEEDS = range(5)
LEARNING_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
SWEEP_SEED = 100
FURTHER_RATES = (3.5e-4, 7e-4, 1.4e-3, 4e-3)  # tried after all runs, for the sides that learned nothing at any rate
# Sides: a variant of ``model/matching.py`` (at equal cost) and further fields. First those of the primary outcome.
CORE: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "diff_norm1": ("diff", {"head_norm_init": 1.0}),
    "softmax_norm1": ("softmax_norm", {"head_norm_init": 1.0}),
}
# DIFF's heads start with the Transformer's RMS in that layer: ``matched_head_norm_init`` on rows of ``base``.
MATCHED = [0.2, 0.49]
# That RMS. The norm of a Transformer's head, or without lambda, is not multiplied by 1 - lambda_init.
OWN_SCALE = [0.16, 0.32]
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "diff_lambda0": ("fixed_lambda", {"head_norm_init": 1.0, "lambda_init": 0.0}),
    "softmax_wide_norm1": ("softmax_norm", {"head_norm_init": 1.0}),
    "diff": ("diff", {"head_norm_init": 0.1}),
    "softmax_norm": ("softmax_norm", {"head_norm_init": 0.1}),
    "diff_no_norm": ("diff", {"head_norm": False}),
    "diff_matched": ("diff", {"head_norm_init": MATCHED}),
    # controls of "diff_matched", planned after its runs: with its weights, and with its scale
    "softmax_norm_matched": ("softmax_norm", {"head_norm_init": MATCHED}),
    "diff_lambda0_matched": ("fixed_lambda", {"head_norm_init": MATCHED, "lambda_init": 0.0}),
    "softmax_norm_own_scale": ("softmax_norm", {"head_norm_init": OWN_SCALE}),
    "diff_lambda0_own_scale": ("fixed_lambda", {"head_norm_init": OWN_SCALE, "lambda_init": 0.0}),
    "diff_v2": ("diff_v2", {}),
    "dint": ("dint", {"head_norm_init": 1.0}),
    "grouped_diff": ("grouped_diff", {"head_norm_init": 1.0}),
}
RETRIED = {f"{side}_7e-4": MORE[side] for side in ("softmax_norm_matched", "softmax_norm_own_scale")}  # better there
RETRIED_RATES = dict.fromkeys(RETRIED, 7e-4)
SIDES = CORE | MORE | RETRIED
UNLEARNED = (
    *("softmax_norm1", "softmax_wide_norm1", "softmax_norm", "softmax_norm_matched", "softmax_norm_own_scale"),
    *("diff_lambda0", "dint"),
)
FACTORS: dict[str, dict[str, Any]] = {
    "distractors": {"distractors": 0.5},
    "p8_n16": {"noise": 16},
    "p32_n2": {"pairs": 32},
    "noise16": {"noise_symbols": 16},
    "layers4": {"num_hidden_layers": 4},
    "head8": {"num_attention_heads": 8},
    "head32": {"num_attention_heads": 2},
    "width128": {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8},
    "width256": {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16},
}
# Sides that run at every rate with all seeds, and the rate that the sweep chose, at which their other runs count.
CHOSEN = {
    "softmax": 5e-4,
    "diff_norm1": 5e-4,
    "diff_matched": 1e-3,
    "softmax_norm_own_scale": 5e-4,
    "diff_lambda0_own_scale": 5e-4,
    "diff_no_norm": 5e-4,
    "diff_v2": 5e-4,
}
PAIR, OTHERS = list(CHOSEN)[:2], list(CHOSEN)[2:]
# Where: the settings of the grid that tell the accuracies of the pair apart, and some of ``FACTORS``; then the other
# settings in which runs of the pair reach 0.9.
EVERY_RATE = [
    *(("p8_n2", PAIR), ("p8_n4", PAIR), ("p4_n4", PAIR), ("p8_n2", OTHERS), ("p8_n4", OTHERS)),
    *(("layers4", PAIR), ("distractors", PAIR), ("noise16", PAIR), ("head32", PAIR), ("width128", PAIR)),
    *(("p4_n0", PAIR), ("p8_n0", PAIR), ("p4_n2", PAIR)),
]
AS_IN_DEMO = ("p4_n4", ["diff_matched", "softmax_norm_own_scale"])  # the setting of ``recall_run``
# The confirmation: the settings that tell the accuracies of the pair apart, on seeds that no choice above has seen.
INFORMATIVE = ("p8_n2", "p8_n4", "p4_n4")
CONFIRMED = ("softmax", "diff_norm1", "diff_matched", "softmax_norm_own_scale")
FRESH_SEEDS = range(200, 230)


def base(pairs: int = GRID[CENTRE][0], noise: int = GRID[CENTRE][1]) -> RunConfig:
    """Two layers of width 64, 4 maps of width 16, on rows of recall alone; bytes serve as symbols.

    1000 steps take half a minute to two minutes of one core. The feed-forward is as wide as the model: recall does not
    need it, and at 8/3 it would be most of the cost. In trials with noise of 32 symbols instead of 2, or at a rate of
    3e-3, a model learned which values a row has, and nothing else in 1500 steps.
    """
    return RunConfig(
        name="recall",
        model={
            "vocab_size": 258,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
            "initializer_range": 0.05,
            "attention": "diff",
        },
        data=DataConfig(
            corpus=NO_CORPUS,
            tokenizer="bytes",
            length=pairs * (2 + noise) + 2 * QUESTIONS,
            mixture={"recall": 1.0},
            recall=RecallConfig(pairs=pairs, symbols=max(16, pairs), noise_symbols=NOISE_SYMBOLS, questions=QUESTIONS),
        ),
        optim=OptimConfig(betas=(0.9, 0.98), warmup_steps=50),
        train=TrainConfig(
            steps=1000,
            batch_size=32,
            log_every=25,
            validate_every=25,
            validation_rows=64,
            checkpoint_every=500,
            checkpoint_keep=1,
            checkpoint_best=False,
            threads=1,
        ),
    )


def recall_run(side: str, train: TrainConfig, steps: int) -> RunConfig:
    """A small model on recall alone, beside each model of a comparison (``evaluation.recall_steps``).

    4 pairs with 4 noise tokens each, at the rate that the sweep chose for the Transformer and for DIFF; over five seeds
    the control does about as well there as at its best rate. In this setting of the grid the two differ soonest. Head
    norms start at the Transformer's scale: from 1, as published, the control (the Transformer with DIFF's head norm)
    learns nothing at any rate of the sweep.
    """
    config = base(4, 4)
    config.optim.lr = 5e-4
    config.train.steps, config.train.seed, config.train.threads = steps, train.seed, train.threads
    config.model["head_norm_init"] = MATCHED
    config.model |= side_model(config, side)
    if config.model.get("softmax_head_norm"):
        config.model["head_norm_init"] = OWN_SCALE
    return config.validate()


def recall_study(corpus: str) -> Study:
    """The recall study; see the module. It reads no text, so ``corpus`` is not used.

    Command: ``diff-transformer study recall --out runs/recall --minutes 60``, repeated until it reports that all runs
    are finished. Hardware: two CPU cores.
    """

    def core(chosen: Choices) -> list[RunSpec]:
        return [cell(name, side, seed, _setting(name), chosen) for seed in SEEDS for name in GRID for side in CORE]

    def with_8_pairs() -> dict[str, RunConfig]:
        pairs = GRID[CENTRE][0]
        return {name: _setting(name) for name, where in GRID.items() if where[0] == pairs}

    def more(chosen: Choices) -> list[RunSpec]:
        column = with_8_pairs()
        varied = {name: _setting(name) for name in FACTORS}
        return [
            cell(name, side, seed, config, chosen)
            for settings, sides in ((column, MORE), (varied, CORE))
            for seed in SEEDS
            for name, config in settings.items()
            for side in sides
        ]

    def retried(chosen: Choices) -> list[RunSpec]:
        rates = RETRIED_RATES | chosen
        again = [
            cell(name, side, seed, config, rates)
            for seed in SEEDS
            for name, config in with_8_pairs().items()
            for side in RETRIED
        ]
        return _sweep(UNLEARNED, FURTHER_RATES) + again

    def every_rate(_: Choices) -> list[RunSpec]:
        more = [spec for where, sides in EVERY_RATE for spec in other_rates(where, _setting(where), sides, CHOSEN)]
        where, sides = AS_IN_DEMO
        return more + other_rates(where, _setting(where), sides, {})

    further = Study("recall", [], retried, then=Study("recall", [], every_rate))
    then = Study("recall", _sweep(MORE), more, score=shortfall, then=further)
    return Study("recall", _sweep(CORE), core, score=shortfall, then=then)


def recall_confirmation(corpus: str) -> Study:
    """Four sides of the recall study again, on thirty fresh seeds; figures/recall_confirmation has the plan.

    ``corpus`` is not used. Command: ``diff-transformer study recall_confirmation --out runs/confirmation --minutes
    60``, repeated until it reports that all 360 runs are finished. Hardware: two CPU cores, about two hours.
    """

    def runs(_: Choices) -> list[RunSpec]:
        return [
            cell(where, side, seed, _setting(where), CHOSEN)
            for seed in FRESH_SEEDS
            for where in INFORMATIVE
            for side in CONFIRMED
        ]

    return Study("recall_confirmation", [], runs)


def shortfall(record: Record) -> float:
    """What a sweep minimises: 1 less the final accuracy; a hundredth of the mean accuracy so far breaks ties."""
    accuracy = record.curves["recall"]["accuracy"]
    return 1 - accuracy[-1] - 0.01 * sum(accuracy) / len(accuracy)


def _sweep(sides: Iterable[str], rates: Iterable[float] = LEARNING_RATES) -> list[RunSpec]:
    return [
        cell(f"sweep/lr{rate:g}", side, SWEEP_SEED, base(), {side: rate}, measured=False)
        for side in sides
        for rate in rates
    ]


def cell(where: str, side: str, seed: int, config: RunConfig, rates: Choices, *, measured: bool = True) -> RunSpec:
    """One run: ``config`` for a side of ``SIDES``, at its rate. ``measured``: on recall, after training."""
    made, (name, fields) = copy.deepcopy(config), SIDES[side]
    made.optim.lr = rates[side]
    if side == "softmax_wide_norm1":  # as many heads as DIFF has, and as wide
        made.model["num_attention_heads"] //= 2
    made.model |= fields
    made.model |= side_model(made, name)
    return RunSpec(where, side, seed, with_seed(made, seed).validate(), (RECALL,) if measured else (), may_diverge=True)


def other_rates(where: str, config: RunConfig, sides: Iterable[str], chosen: Choices) -> list[RunSpec]:
    """The runs of ``sides`` with all seeds at every rate of the sweep but the one that it chose for a side."""
    return [
        cell(at_rate(where, rate), side, seed, config, {side: rate})
        for seed in SEEDS
        for side in sides
        for rate in LEARNING_RATES
        if rate != chosen.get(side)
    ]


def at_rate(setting: str, rate: float) -> str:
    """The name of ``setting`` at a rate that the sweep did not choose."""
    return f"{setting}_lr{rate:g}"


def _setting(name: str) -> RunConfig:
    """A setting of the grid, or around its centre."""
    if name in GRID:
        return base(*GRID[name])
    fields = dict(FACTORS[name])
    config = base(fields.pop("pairs", GRID[CENTRE][0]), fields.pop("noise", GRID[CENTRE][1]))
    config.data.recall.distractors = fields.pop("distractors", 0.0)
    config.data.recall.noise_symbols = fields.pop("noise_symbols", NOISE_SYMBOLS)
    config.model |= fields
    return config
