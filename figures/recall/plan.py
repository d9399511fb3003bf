"""The recall study: does the subtraction help a model to find the right one of several facts in noise?

Key-value recall over a grid of pairs and noise. The questions, the outcomes and the order of the runs were fixed before
them, in preregistration.md. It reads no text.

Command: ``diff-transformer study recall --out runs/recall --minutes 60``, repeated until it reports that all runs are
finished. Hardware: two CPU cores.
"""

from collections.abc import Iterable
from typing import Any

from diff_transformer.lab.recipes.recall import MATCHED, NOISE_SYMBOLS, OWN_SCALE, recall
from diff_transformer.lab.record import Record
from diff_transformer.lab.rows import RECALL
from diff_transformer.lab.stages import SWEPT, Stage
from diff_transformer.train.config import RunConfig

# The grid: name of the setting -> pairs of a row, noise tokens for each pair.
GRID = {f"p{pairs}_n{noise}": (pairs, noise) for noise in (0, 2, 4) for pairs in (4, 8, 16)}
CENTRE = "p8_n2"  # where learning rates are chosen and other factors are varied
SEEDS = range(5)
LEARNING_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
SWEEP_SEEDS = (100,)
FURTHER_RATES = (3.5e-4, 7e-4, 1.4e-3, 4e-3)  # tried after all runs, for the sides that learned nothing at any rate
AT_RATE = "{setting}_lr{rate:g}"  # a setting at a rate that the sweep did not choose
# Those of the primary outcome first.
CORE: dict[str, dict[str, Any]] = {
    "softmax": {"variant": "softmax"},
    "diff_norm1": {"variant": "diff", "head_norm_init": 1.0},
    "softmax_norm1": {"variant": "softmax_norm", "head_norm_init": 1.0},
}
MORE: dict[str, dict[str, Any]] = {
    "diff_lambda0": {"variant": "fixed_lambda", "head_norm_init": 1.0, "lambda_init": 0.0},
    # as many heads as DIFF has, and as wide
    "softmax_wide_norm1": {"variant": "softmax_norm", "head_norm_init": 1.0, "num_attention_heads": 2},
    "diff": {"variant": "diff", "head_norm_init": 0.1},
    "softmax_norm": {"variant": "softmax_norm", "head_norm_init": 0.1},
    "diff_no_norm": {"variant": "diff", "head_norm": False},
    "diff_matched": {"variant": "diff", "head_norm_init": MATCHED},
    # controls of "diff_matched", planned after its runs: with its weights, and with its scale
    "softmax_norm_matched": {"variant": "softmax_norm", "head_norm_init": MATCHED},
    "diff_lambda0_matched": {"variant": "fixed_lambda", "head_norm_init": MATCHED, "lambda_init": 0.0},
    "softmax_norm_own_scale": {"variant": "softmax_norm", "head_norm_init": OWN_SCALE},
    "diff_lambda0_own_scale": {"variant": "fixed_lambda", "head_norm_init": OWN_SCALE, "lambda_init": 0.0},
    "diff_v2": {"variant": "diff_v2"},
    "dint": {"variant": "dint", "head_norm_init": 1.0},
    "grouped_diff": {"variant": "grouped_diff", "head_norm_init": 1.0},
}
RETRIED_RATE = 7e-4
RETRIED = {f"{side}_7e-4": MORE[side] for side in ("softmax_norm_matched", "softmax_norm_own_scale")}  # better there
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


def setting(name: str) -> RunConfig:
    """A setting of the grid, or around its centre."""
    if name in GRID:
        return recall(*GRID[name])
    fields = dict(FACTORS[name])
    config = recall(fields.pop("pairs", GRID[CENTRE][0]), fields.pop("noise", GRID[CENTRE][1]))
    config.data.recall.distractors = fields.pop("distractors", 0.0)
    config.data.recall.noise_symbols = fields.pop("noise_symbols", NOISE_SYMBOLS)
    config.model |= fields
    return config


def shortfall(record: Record, curve: str = "recall_curve") -> float:
    """What a sweep minimises: 1 less the final accuracy; a hundredth of the mean accuracy so far breaks ties."""
    accuracy = [*record.rows[curve]["accuracy"]]
    return 1 - accuracy[-1] - 0.01 * sum(accuracy) / len(accuracy)


def sweep(name: str, config: RunConfig, sides: dict, rates: Iterable[float] = LEARNING_RATES, score=shortfall) -> Stage:
    """Every rate with the sweep's seed; runs lie in sweep/NAMElrRATE."""
    return Stage({"": config}, sides, SWEEP_SEEDS, rates, f"sweep/{name}lr{{rate:g}}", (), score)


def every_rate(name: str, config: RunConfig, sides: Iterable[str], chosen: dict[str, float]) -> Stage:
    """All seeds at every rate of the sweep but the one that it chose for a side."""
    rates = {side: [rate for rate in LEARNING_RATES if rate != chosen.get(side)] for side in sides}
    return Stage({name: config}, {side: SIDES[side] for side in rates}, SEEDS, rates, AT_RATE, (RECALL,))


def stages(corpus: str) -> list[Stage]:
    """Not read: ``corpus``."""
    grid, centre = {name: setting(name) for name in GRID}, setting(CENTRE)
    column = {name: grid[name] for name, (pairs, _) in GRID.items() if pairs == GRID[CENTRE][0]}
    factors = {name: setting(name) for name in FACTORS}
    where, sides = AS_IN_DEMO
    return [
        sweep("", centre, CORE),
        Stage(grid, CORE, SEEDS, SWEPT, measure=(RECALL,)),
        sweep("", centre, MORE),
        Stage(column, MORE, SEEDS, SWEPT, measure=(RECALL,)),
        Stage(factors, CORE, SEEDS, SWEPT, measure=(RECALL,)),
        sweep("", centre, {side: SIDES[side] for side in UNLEARNED}, FURTHER_RATES, score=None),
        Stage(column, RETRIED, SEEDS, RETRIED_RATE, measure=(RECALL,)),
        *(every_rate(where, setting(where), sides, CHOSEN) for where, sides in EVERY_RATE),
        every_rate(where, setting(where), sides, {}),
    ]
