"""Verdicts on claims as objects, from rows. The page has the words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from diff_transformer.lab.quantities import Quantity, registered
from diff_transformer.lab.rows import PART_OF, SETTINGS, Rows, told
from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL, Difference, holm, paired


class Outcome(StrEnum):
    """HELD if the whole interval is on the claimed side of the threshold, FAILED if it is on the other."""

    HELD = "held"
    FAILED = "did not hold"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Verdict:
    """A quantity of one side against another, over the training seeds that both have.

    Attributes:
        ours, other: the sides.
        ours_by_seed, other_by_seed: their numbers.
        untested: why the claim is not tested; "" if it is.
        holm: p-value adjusted over the claims of the paper against the same side.
    """

    quantity: Quantity
    ours: str
    other: str
    ours_by_seed: dict[int, float]
    other_by_seed: dict[int, float]
    difference: Difference
    outcome: Outcome
    untested: str = ""
    holm: float | None = None

    @property
    def few(self) -> bool:
        """True if there are too few seeds for an interval over seeds: the verdict is about these models alone."""
        return self.difference.seeds < SEEDS_FOR_AN_INTERVAL

    @property
    def here(self) -> tuple[float, float]:
        """The means over seeds of the other side and of ours."""
        return float(np.mean([*self.other_by_seed.values()])), float(np.mean([*self.ours_by_seed.values()]))


Verdicts = dict[str, dict[str, Verdict]]  # by id of the quantity, then by the other side


def judge(rows: Rows, ours: str, others: Iterable[str], quantities: Sequence[Quantity] | None = None) -> Verdicts:
    """Judge each quantity that both sides have.

    Args:
        rows: of one setting.
        quantities: by default, all that have a claim.
    """
    verdicts: Verdicts = {}
    chosen = [quantity for quantity in registered(rows) if quantity.claim] if quantities is None else quantities
    lost = diverged(rows)
    for quantity in chosen:
        for other in others:
            if verdict := _judge(rows, quantity, ours, other, lost):
                verdicts.setdefault(quantity.id, {})[other] = verdict
    for other in {other for of in verdicts.values() for other in of}:
        tested = [v for of in verdicts.values() if (v := of.get(other)) and v.difference.p is not None]
        own = quantities is not None  # then a family of its own, with those that the paper does not claim
        tested = [v for v in tested if not v.untested and v.quantity.better and (own or not v.quantity.ours)]
        adjusted = holm([v.difference.p or 0.0 for v in tested])
        for verdict, p in zip(tested, adjusted, strict=True):
            verdicts[verdict.quantity.id][other] = replace(verdict, holm=p)
    return verdicts


def diverged(rows: Rows) -> set[tuple[str, int]]:
    """Side and training seed of each run that diverged."""
    about = rows["about"]
    lost = about[(about["of"] == "run") & (about["key"] == "diverged") & about["value"].notna()]
    return {(side, int(seed)) for side, seed in zip(lost["side"], lost["seed"], strict=True)}


def _judge(rows: Rows, quantity: Quantity, ours: str, other: str, gone: set) -> Verdict | None:
    every = quantity.pairs(rows, ours, other)
    pairs = {seed: both for seed, both in every.items() if not gone & {(ours, seed), (other, seed)}}
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {seed: tuple(float(quantity.reduce(scores)) for scores in both) for seed, both in pairs.items()}
        known = [seed for seed, both in values.items() if np.isfinite(both).all()]
        if not known:
            return None
        difference = paired(
            {seed: pairs[seed] for seed in known}, quantity.reduce, relative=quantity.relative,
            bootstrap=quantity.bootstrap, threshold=quantity.threshold,
        )  # fmt: skip
    untested = quantity.untested(rows, other) if quantity.untested else ""
    untested = untested or _other_settings(rows, quantity.experiment, ours, other)
    lost = sorted({seed for side, seed in gone if side in (ours, other)})
    if lost:  # the remaining seeds are not a fair sample
        untested = f"training diverged with seed{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
    elif len(known) < len(values):
        untested = f"{len(values) - len(known)} of {len(values)} seeds have no number of it"
    elif not np.isfinite(difference.mean):
        untested = "the other model's number is 0"
    outcome = Outcome.INCONCLUSIVE if untested else _outcome(quantity, difference)
    a, b = ({seed: values[seed][place] for seed in known} for place in (0, 1))
    return Verdict(quantity, ours, other, a, b, difference, outcome, untested)


def _other_settings(rows: Rows, experiment: str, ours: str, other: str) -> str:
    """Why two sides cannot be compared, if they were measured with other settings; "" if not."""
    first, second = (rows.about(PART_OF.get(experiment, experiment), side=side) for side in (ours, other))
    for key in SETTINGS:
        if key in first and key in second and first[key] != second[key]:
            return f"measured with other settings: {key} {told(first[key])} and {told(second[key])}"
    return ""


def _outcome(quantity: Quantity, difference: Difference) -> Outcome:
    low, high = difference.low, difference.high
    if difference.seeds >= SEEDS_FOR_AN_INTERVAL and low == high:  # equal in every seed, which is no certainty
        return Outcome.INCONCLUSIVE
    if low is None or high is None or not quantity.better or low <= quantity.threshold <= high:
        return Outcome.INCONCLUSIVE
    return Outcome.HELD if (low > quantity.threshold) == (quantity.better == "higher") else Outcome.FAILED
