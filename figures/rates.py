"""Sides that run at every learning rate with every seed, compared at the rates that the other seeds choose."""

from collections.abc import Callable, Iterable
from statistics import fmean

from recall.plan import AT_RATE, LEARNING_RATES, SEEDS, shortfall

from diff_transformer.lab.measures import Measure, Row, compared, trained
from diff_transformer.lab.record import Cells, Record

Runs = dict[float, dict[int, Record]]  # of a side in a setting, by learning rate and seed
Score = Callable[[Record], float]  # what a choice of a rate minimises


def by_rate(cells: Cells, where: str, side: str, rates: Iterable[float] = LEARNING_RATES) -> Runs:
    """The runs of a side in a setting; empty unless every rate has all seeds and none diverged."""
    found: Runs = {rate: {} for rate in sorted(rates)}
    for name in (where, *(AT_RATE.format(setting=where, rate=rate) for rate in found)):
        for seed, record in trained(cells.get(name, {}).get(side, {})).items():
            if record.lr in found:
                found[record.lr][seed] = record
    return found if all(set(SEEDS) <= of.keys() for of in found.values()) else {}


def of_others(runs: Runs, seed: int, score: Score = shortfall) -> float:
    """The rate that the other seeds choose: that of the lowest mean ``score``, by default as the sweep chooses."""
    return min(runs, key=lambda rate: fmean(score(runs[rate][other]) for other in SEEDS if other != seed))


def at_others(runs: Runs, score: Score = shortfall) -> list[Record]:
    """A run of each seed, at the rate that the others choose."""
    return [runs[of_others(runs, seed, score)][seed] for seed in SEEDS]


def difference(cells: Cells, places: list[str], sides: tuple[str, str], measure: Measure, name: str) -> Row | None:
    """A measure of the first side less that of the second, averaged over ``places`` by seed, as row ``name``.

    Both are at the rates that the other seeds choose in each place. None if runs are missing.
    """
    both = [[by_rate(cells, where, side) for where in places] for side in sides]
    if not places or not all(map(all, both)):
        return None
    ours, theirs = ([at_others(runs) for runs in side] for side in both)
    return averaged(ours, theirs, measure, name)


def averaged(ours: list[list[Record]], theirs: list[list[Record]], measure: Measure, name: str) -> Row:
    """``measure`` of our runs less that of theirs, paired by seed; each list has the runs of one setting."""
    first, second = (
        [fmean(map(measure.read, of_seed)) for of_seed in zip(*side, strict=True)] for side in (ours, theirs)
    )
    by_seed = [a - b for a, b in zip(first, second, strict=True)]
    return compared(name, fmean(second), fmean(first), by_seed, measure.better)
