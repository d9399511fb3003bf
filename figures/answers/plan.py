"""The answer study: questions without an answer, and labelled examples of classes, in key-value recall.

Do models name a value where the row has none (hallucination, Table 4)? Do they learn from a few examples whose labels
are dealt anew in each row, and answer for a form of the class that the examples do not have (many shots, Figures 6, 7
and 9)? The questions, the outcomes and the order of the runs were fixed before them, in preregistration.md. It reads no
text.

Command: ``diff-transformer study answers --out runs/answers --minutes 60``, repeated until it reports that all runs are
finished. Hardware: two CPU cores. Time: an hour and a half until the primary outcome; about five hours in all.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from recall import plan as recall_plan
from recall.plan import SEEDS, every_rate, sweep

from diff_transformer.lab.recipes.recall import recall
from diff_transformer.lab.spec import RECALL
from diff_transformer.lab.stages import SWEPT, Stage
from diff_transformer.train.config import RunConfig

GROUNDED = {"grounded_n2": (8, 2), "grounded_n4": (8, 4)}  # pairs, noise tokens for each
UNANSWERABLE = 0.1
SHOTS = {"shots_p4": (4, (1, 2)), "shots_p8": (8, (1, 2, 4))}  # pairs, and how many of them a class has
FORMS = 4
SHOT_STEPS = 2000
# The heads of "diff_matched" and of its two controls start at the Transformer's scale.
SIDES = ("softmax", "diff_matched", "softmax_norm_own_scale", "diff_lambda0_own_scale", "diff_norm1")
# The rate that the sweep of each task chose, in the order of ``SIDES``, at which the runs of the plan count.
CHOSEN = {
    "grounded": dict(zip(SIDES, (5e-4, 1e-3, 1e-3, 5e-4, 1e-3), strict=True)),
    "shots": dict(zip(SIDES, (1e-3, 2e-3, 1e-3, 1e-3, 1e-3), strict=True)),
}
CORE, OTHERS = SIDES[:3], SIDES[3:]  # the sides of the primary outcome, and the rest
LONGER = {"grounded_n2": SIDES[:2], "shots_p4": ("softmax", "softmax_norm_own_scale", "diff_norm1")}
TIMES = 3  # the steps of those


def grounded(where: str) -> RunConfig:
    """Rows of the recall study in which a tenth of the questions have no answer."""
    config = recall(*GROUNDED[where])
    config.data.recall.unanswerable = UNANSWERABLE
    return config


def shots(where: str) -> RunConfig:
    """Rows of labelled examples without noise: a class is any of four tokens, and has one or more examples in a row."""
    pairs, numbers = SHOTS[where]
    config = recall(pairs, 0)
    config.data.recall.shots, config.data.recall.forms = numbers, FORMS
    config.train.steps = SHOT_STEPS
    return config


def stages(corpus: str) -> list[Stage]:
    """Not read: ``corpus``."""
    sides = {side: recall_plan.SIDES[side] for side in SIDES}
    tasks = {
        "grounded": {where: grounded(where) for where in GROUNDED},
        "shots": {where: shots(where) for where in SHOTS},
    }
    made = []
    for task, settings in tasks.items():
        made.append(sweep(f"{task}_", next(iter(settings.values())), sides))
        made.append(Stage(settings, sides, SEEDS, SWEPT, measure=(RECALL,)))
    for some in (CORE, OTHERS):
        for task, settings in tasks.items():
            made += [every_rate(where, config, some, CHOSEN[task]) for where, config in settings.items()]
    return made + [every_rate(longer(where), _longer(where), some, {}) for where, some in LONGER.items()]


def longer(where: str) -> str:
    """The name of a setting with ``TIMES`` the steps."""
    return f"{where}_x{TIMES}"


def _longer(where: str) -> RunConfig:
    config = grounded(where) if where in GROUNDED else shots(where)
    config.train.steps *= TIMES
    return config
