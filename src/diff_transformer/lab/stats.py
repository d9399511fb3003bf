"""Statistics: paired differences with 95 % intervals, tests and power."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

SEEDS_FOR_AN_INTERVAL = 3
MOST_SEEDS = 1000  # that ``seeds_to_decide`` looks for
_RESAMPLES = 2000


class Interval(NamedTuple):
    """A 95 % interval. ``over``: the units of the spread, "seeds", "examples" or "seeds and examples"."""

    mean: float
    low: float | None
    high: float | None
    over: str


def over_seeds(differences: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval of paired differences, one per independent unit: a seed, or a book."""
    values = np.asarray(differences, dtype=float)
    centre, count = float(values.mean()), len(values)
    if count < 2:
        return Interval(centre, None, None, "seeds")
    half = _student_quantile(count - 1) * float(values.std(ddof=1)) / count**0.5
    return Interval(centre, centre - half, centre + half, "seeds")


@cache
def _student_quantile(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t, to three decimals as printed tables have it."""
    from scipy.stats import t

    return round(float(t.ppf(0.975, freedom)), 3)


def paired_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the paired t-test, with one difference a seed; 1 for a single or a non-finite one."""
    from scipy.stats import t

    values = np.asarray(differences, dtype=float)
    centre, count = float(values.mean()), len(values)
    if count < 2 or not math.isfinite(centre):
        return 1.0
    error = float(values.std(ddof=1)) / count**0.5
    if not error:  # the same in every pair
        return float(centre == 0)
    return float(2 * t.sf(abs(centre) / error, count - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted by Holm's step-down method, in the same order.

    Rejecting where the adjusted value is at most 0.05 keeps the chance of any false rejection at 5 %. Source: Holm,
    A simple sequentially rejective multiple test procedure, 1979.
    """
    count, largest = len(p_values), 0.0
    adjusted = [1.0] * count
    for rank, place in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, (count - rank) * p_values[place])
        adjusted[place] = min(1.0, largest)
    return adjusted


def seeds_to_decide(differences: Sequence[float], threshold: float = 0.0, *, fixed: float = 0.0) -> int | None:
    """The smallest number of seeds whose 95 % interval would exclude ``threshold``, if mean and spread stayed the same.

    This is the smallest n with ``t(n - 1) sqrt(s² / n + fixed) < |mean - threshold|``. With so many new seeds, the
    interval excludes the threshold in about half of all repetitions.

    Args:
        fixed: the variance that more seeds do not lower, as that of few examples.

    Returns:
        The number, or None if it is above ``MOST_SEEDS``.

    Raises:
        ValueError: for fewer than two differences, which have no spread.
    """
    values = np.asarray(differences, dtype=float)
    if len(values) < 2:
        raise ValueError(f"{len(values)} differences have no spread; give at least 2")
    distance, deviation = abs(float(values.mean()) - threshold), float(values.std(ddof=1))
    counts = range(2, MOST_SEEDS + 1)

    def decides(count: int) -> bool:
        return _student_quantile(count - 1) * math.sqrt(deviation**2 / count + fixed) < distance

    place = bisect_left(counts, True, key=decides)
    return counts[place] if place < len(counts) else None


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
    observed = _difference(first, second, [slice(None)] * len(first), reduce, relative)
    if min(len(a) for a in first) < 2:
        return Interval(observed, None, None, "examples")
    rng = np.random.default_rng(0)
    draws = [
        _difference(first, second, [rng.integers(len(a), size=len(a)) for a in first], reduce, relative)
        for _ in range(_RESAMPLES)
    ]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return Interval(observed, float(low), float(high), "examples")


def over_seeds_and_examples(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    reduce: Callable[[np.ndarray], float] = mean,
    *,
    relative: bool = False,
) -> tuple[Interval, float]:
    """Interval of the mean difference for new seeds *and* new examples, where all seeds share the same examples.

    The variance is the sum of that over seeds, ``s² / n``, and that of the mean over seeds when the examples are
    resampled for all seeds together (bootstrap). The interaction counts twice, so the interval is a little wide. The
    degrees of freedom are Satterthwaite's (Biometrics Bulletin, 1946).

    Returns:
        The interval, over seeds alone where seeds have other numbers of examples, or one; and the variance over
        examples.

    Raises:
        ValueError: for fewer than two seeds.
    """
    seeds = range(len(first))
    if len(first) < 2:
        raise ValueError(f"{len(first)} seeds have no spread; give at least 2")
    by_seed = [_difference([first[k]], [second[k]], [slice(None)], reduce, relative) for k in seeds]
    count = len(first[0])
    if count < 2 or any(len(scores) != count for scores in (*first, *second)):
        return over_seeds(by_seed), 0.0
    rng = np.random.default_rng(0)
    together = ([rng.integers(count, size=count)] * len(first) for _ in range(_RESAMPLES))
    draws = [_difference(first, second, indices, reduce, relative) for indices in together]
    of_seeds, of_examples = float(np.var(by_seed, ddof=1)) / len(first), float(np.nanvar(draws))
    total, centre = of_seeds + of_examples, float(np.mean(by_seed))
    if not total:
        return Interval(centre, centre, centre, "seeds and examples"), 0.0
    freedom = total**2 / (of_seeds**2 / (len(first) - 1) + of_examples**2 / (count - 1))
    half = _student_quantile(freedom) * math.sqrt(total)
    return Interval(centre, centre - half, centre + half, "seeds and examples"), of_examples


def _difference(first, second, indices, reduce: Callable[[np.ndarray], float], relative: bool) -> float:
    """The mean over seeds of ``reduce`` at each seed's ``indices``, of the first less the second, or over it less 1."""
    pairs = zip(first, second, indices, strict=True)
    ends = [(reduce(a[i]), reduce(b[i])) for a, b, i in pairs]
    return float(np.mean([x / y - 1 if relative else x - y for x, y in ends]))


def verdict(interval: Interval, better: str, margin: float = 0.0) -> str:
    """Judge a claim: "held" if the whole interval is on the claimed side of zero, "did not hold" if it is on the other
    side, else "undecided". A claim of "no worse than" has a positive ``margin``."""
    if interval.low is None or interval.high is None:
        return "undecided"
    low, high = (interval.low, interval.high) if better == "higher" else (-interval.high, -interval.low)
    if low > -margin:
        return "held"
    return "did not hold" if high < -margin else "undecided"
