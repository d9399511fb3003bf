"""Statistics: paired differences with 95 % intervals, tests and power."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from diff_transformer.errors import UserError

SEEDS_FOR_AN_INTERVAL = 3
MOST_SEEDS = 1000  # that ``seeds_to_decide`` looks for
_RESAMPLES = 2000


class Interval(NamedTuple):
    """A 95 % interval. ``over``: the units of the spread, "seeds", "examples" or "seeds and examples"."""

    mean: float
    low: float | None
    high: float | None
    over: str


class OverExamples(NamedTuple):
    """The variance of a mean over seeds that more seeds do not lower: that of the examples, which all seeds share."""

    variance: float = 0.0
    count: int = 0


def over_seeds(differences: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval of paired differences, one per independent unit: a seed, or a book."""
    values = np.asarray(differences, dtype=float)
    centre, count = float(values.mean()), len(values)
    if count < 2:
        return Interval(centre, None, None, "seeds")
    half = _student_quantile(count - 1) * float(values.std(ddof=1)) / count**0.5
    return Interval(centre, centre - half, centre + half, "seeds")


@cache
def _student_quantile(freedom: float, level: float = 0.05) -> float:
    """Two-sided quantile of Student's t, to three decimals as printed tables have it."""
    from scipy.stats import t

    return round(float(t.ppf(1 - level / 2, freedom)), 3)


def paired_p_value(differences: Sequence[float], threshold: float = 0.0, examples: OverExamples | None = None) -> float:
    """Two-sided p-value of the paired t-test against ``threshold``, with one difference a seed.

    It belongs to the interval of ``over_seeds``; with ``examples`` to that of ``over_seeds_and_examples``. 1 for a
    single or a non-finite difference.
    """
    from scipy.stats import t

    values = np.asarray(differences, dtype=float)
    distance, count = abs(float(values.mean()) - threshold), len(values)
    if count < 2 or not math.isfinite(distance):
        return 1.0
    error, freedom = _error(float(values.var(ddof=1)) / count, count, examples or OverExamples())
    if not error:  # the same in every pair
        return float(distance == 0)
    return float(2 * t.sf(distance / error, freedom))


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


def seeds_to_decide(
    differences: Sequence[float], threshold: float = 0.0, *, examples: OverExamples | None = None, tests: int = 1
) -> int | None:
    """The smallest number of seeds whose interval would exclude ``threshold``, if mean and spread stayed the same.

    With so many new seeds, the interval excludes the threshold in about half of all repetitions.

    Args:
        examples: for an interval of ``over_seeds_and_examples``; without it, for one of ``over_seeds``.
        tests: of a table that is corrected: the interval is one of 1 - 0.05 / ``tests``, which Holm's correction never
            exceeds.

    Returns:
        The number, or None if it is above ``MOST_SEEDS``.

    Raises:
        ValueError: for fewer than two differences, which have no spread.
    """
    values = np.asarray(differences, dtype=float)
    if len(values) < 2:
        raise UserError(f"{len(values)} differences have no spread; give at least 2")
    distance, variance = abs(float(values.mean()) - threshold), float(values.var(ddof=1))
    counts = range(2, MOST_SEEDS + 1)

    def decides(count: int) -> bool:
        return _half_width(variance / count, count, examples or OverExamples(), 0.05 / tests) < distance

    place = bisect_left(counts, True, key=decides)
    return counts[place] if place < len(counts) else None


def _half_width(of_seeds: float, seeds: int, examples: OverExamples, level: float = 0.05) -> float:
    """Half of an interval, from the variance of its mean over seeds and that over examples."""
    error, freedom = _error(of_seeds, seeds, examples)
    return _student_quantile(freedom, level) * error if error else 0.0


def _error(of_seeds: float, seeds: int, examples: OverExamples) -> tuple[float, float]:
    """The standard error of both variances, and Satterthwaite's degrees of freedom."""
    total = of_seeds + examples.variance
    if not total:
        return 0.0, math.inf
    freedom = of_seeds**2 / (seeds - 1) + (examples.variance**2 / (examples.count - 1) if examples.variance else 0.0)
    return math.sqrt(total), total**2 / freedom


def mean(values: np.ndarray) -> float:
    return float(np.mean(values))


def over_examples(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    reduce: Callable[[np.ndarray], float] = mean,
    *,
    relative: bool = False,
) -> Interval:
    """Bootstrap interval of ``reduce(first) - reduce(second)``, resampling examples in pairs; if ``relative``, of
    ``reduce(first) / reduce(second) - 1``. Seeds that have the same number of examples share them.

    Args:
        first, second: for each seed, an array whose first dimension counts examples, in the same order on both sides.
        reduce: from such an array to a number; draws for which it is NaN are left out. Not a largest value: what is
            largest in a draw is at most what was, so the interval covers too seldom.

    Returns:
        The interval, without ends where a seed has one example or the sides have other numbers of them.
    """
    observed = _difference(first, second, [slice(None)] * len(first), reduce, relative)
    counts = [len(scores) for scores in first]
    if min(counts) < 2 or counts != [len(scores) for scores in second]:
        return Interval(observed, None, None, "examples")
    draws = _draws(first, second, counts, reduce, relative)
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return Interval(observed, float(low), float(high), "examples")


def over_seeds_and_examples(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    reduce: Callable[[np.ndarray], float] = mean,
    *,
    relative: bool = False,
) -> tuple[Interval, OverExamples]:
    """Interval of the mean difference for new seeds *and* new examples, where all seeds share the same examples.

    The variance is the sum of that over seeds, ``s² / n``, and that of the mean over seeds when the examples are
    resampled for all seeds together (bootstrap). The interaction counts twice, so the interval is a little wide. The
    degrees of freedom are Satterthwaite's (Biometrics Bulletin, 1946).

    Returns:
        The interval, over seeds alone where seeds have other numbers of examples, or one; and what of its variance is
        over examples.

    Raises:
        ValueError: for fewer than two seeds.
    """
    seeds = range(len(first))
    if len(first) < 2:
        raise UserError(f"{len(first)} seeds have no spread; give at least 2")
    by_seed = [_difference([first[k]], [second[k]], [slice(None)], reduce, relative) for k in seeds]
    count = len(first[0])
    if count < 2 or any(len(scores) != count for scores in (*first, *second)):
        return over_seeds(by_seed), OverExamples()
    draws = _draws(first, second, [count] * len(first), reduce, relative)
    examples = OverExamples(float(np.nanvar(draws)), count)
    centre = float(np.mean(by_seed))
    half = _half_width(float(np.var(by_seed, ddof=1)) / len(first), len(first), examples)
    return Interval(centre, centre - half, centre + half, "seeds and examples"), examples


def _draws(first, second, counts: list[int], reduce: Callable[[np.ndarray], float], relative: bool) -> list[float]:
    """The difference in resampled examples: the same ones in every seed, unless seeds have other numbers of them."""
    rng, shared = np.random.default_rng(0), len(set(counts)) == 1
    drawn = (
        [rng.integers(counts[0], size=counts[0])] * len(counts)
        if shared
        else [rng.integers(count, size=count) for count in counts]
        for _ in range(_RESAMPLES)
    )
    return [_difference(first, second, indices, reduce, relative) for indices in drawn]


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
