"""The answer study: questions without an answer, and labelled examples of classes, in key-value recall.

Do models name a value where the row has none (hallucination, Table 4)? Do they learn from a few examples whose labels
are dealt anew in each row, and answer for a form of the class that the examples do not have (many shots, Figures 6, 7
and 9)? The questions, the outcomes and the order of the runs were fixed before them, in
figures/answers/preregistration.md.
"""

from diff_transformer.lab.recipes.recall_study import (
    LEARNING_RATES,
    SEEDS,
    SWEEP_SEED,
    base,
    cell,
    other_rates,
    shortfall,
)
from diff_transformer.lab.spec import Choices, RunSpec, Study
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
    config = base(*GROUNDED[where])
    config.data.recall.unanswerable = UNANSWERABLE
    return config


def shots(where: str) -> RunConfig:
    """Rows of labelled examples without noise: a class is any of four tokens, and has one or more examples in a row."""
    pairs, numbers = SHOTS[where]
    config = base(pairs, 0)
    config.data.recall.shots, config.data.recall.forms = numbers, FORMS
    config.train.steps = SHOT_STEPS
    return config


def answer_study(corpus: str) -> Study:
    """The answer study; see the module. It reads no text, so ``corpus`` is not used.

    Command: ``diff-transformer study answers --out runs/answers --minutes 60``, repeated until it reports that all runs
    are finished. Hardware: two CPU cores. Time: an hour and a half until the primary outcome; about five hours in all.
    """

    def part(name: str, settings: dict[str, RunConfig], then: Study | None = None) -> Study:
        first = next(iter(settings.values()))
        sweep = [
            cell(f"sweep/{name}_lr{rate:g}", side, SWEEP_SEED, first, {side: rate}, measured=False)
            for side in SIDES
            for rate in LEARNING_RATES
        ]

        def runs(chosen: Choices) -> list[RunSpec]:
            return [
                cell(where, side, seed, config, chosen)
                for seed in SEEDS
                for where, config in settings.items()
                for side in SIDES
            ]

        return Study("answers", sweep, runs, score=shortfall, then=then)

    def every_rate(_: Choices) -> list[RunSpec]:
        settings = [(where, grounded(where), CHOSEN["grounded"]) for where in GROUNDED]
        settings += [(where, shots(where), CHOSEN["shots"]) for where in SHOTS]
        at_all = [
            spec
            for sides in (CORE, OTHERS)
            for where, config, chosen in settings
            for spec in other_rates(where, config, sides, chosen)
        ]
        return at_all + [
            spec for where in LONGER for spec in other_rates(longer(where), _longer(where), LONGER[where], {})
        ]

    last = Study("answers", [], every_rate)
    then = part("shots", {where: shots(where) for where in SHOTS}, last)
    return part("grounded", {where: grounded(where) for where in GROUNDED}, then)


def longer(where: str) -> str:
    """The name of a setting with ``TIMES`` the steps."""
    return f"{where}_x{TIMES}"


def _longer(where: str) -> RunConfig:
    config = grounded(where) if where in GROUNDED else shots(where)
    config.train.steps *= TIMES
    return config
