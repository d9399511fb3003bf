"""Differences between the two models with 95 % intervals."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Two-sided 95 % quantiles of Student's t for 1 to 20 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
        2.110, 2.101, 2.093, 2.086)  # fmt: skip
SEEDS_FOR_AN_INTERVAL = 3
_RESAMPLES = 2000


class Interval(NamedTuple):
    """``over``: "seeds" or "examples", what the spread was taken over."""

    mean: float
    low: float | None
    high: float | None
    over: str


def over_seeds(differences: Sequence[float]) -> Interval:
    """Mean and Student's interval of one paired difference a seed (or a book, whatever is independent)."""
    values = np.asarray(differences, dtype=float)
    centre, count = float(values.mean()), len(values)
    if count < 2:
        return Interval(centre, None, None, "seeds")
    half = _T95[min(count - 1, len(_T95)) - 1] * float(values.std(ddof=1)) / count**0.5
    return Interval(centre, centre - half, centre + half, "seeds")


def mean(values: np.ndarray) -> float:
    return float(np.mean(values))


def over_examples(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    reduce: Callable[[np.ndarray], float] = mean,
    *,
    relative: bool = False,
) -> Interval:
    """Bootstrap interval of ``reduce(first) - reduce(second)``, resampling examples in pairs, seeds kept apart; if
    ``relative``, of ``reduce(first) / reduce(second) - 1``.

    Args:
        first, second: for each seed, an array whose first dimension counts examples, in the same order on both sides.
        reduce: from such an array to a number; draws for which it is NaN are left out.
    """
    rng = np.random.default_rng(0)

    def difference(indices: Sequence[np.ndarray]) -> float:
        pairs = zip(first, second, indices, strict=True)
        ends = [(reduce(a[i]), reduce(b[i])) for a, b, i in pairs]
        return float(np.mean([x / y - 1 if relative else x - y for x, y in ends]))

    observed = difference([np.arange(len(a)) for a in first])
    if min(len(a) for a in first) < 2:
        return Interval(observed, None, None, "examples")
    draws = [difference([rng.integers(len(a), size=len(a)) for a in first]) for _ in range(_RESAMPLES)]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return Interval(observed, float(low), float(high), "examples")


def verdict(interval: Interval, better: str, margin: float = 0.0) -> str:
    """ "held" if the whole interval is on the claimed side of zero, "did not hold" if it is on the other, else
    "undecided". ``margin`` is what the claim concedes: "no worse than" has a positive one."""
    if interval.low is None or interval.high is None:
        return "undecided"
    low, high = (interval.low, interval.high) if better == "higher" else (-interval.high, -interval.low)
    if low > -margin:
        return "held"
    return "did not hold" if high < -margin else "undecided"
