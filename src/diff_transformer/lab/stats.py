"""Statistics: paired differences with 95 % intervals, tests and corrections.

With three training seeds or more, an interval is for new seeds *and* new examples, where all seeds share the examples.
Its variance is that over seeds, ``s² / n``, and that of the mean over seeds when the examples are resampled for all
seeds together (bootstrap). The interaction counts twice, so it is a little wide; the degrees of freedom are
Satterthwaite's (Biometrics Bulletin, 1946). With fewer seeds it is a bootstrap interval over examples, which covers
*these* models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SEEDS_FOR_AN_INTERVAL = 3
RESAMPLES = 2000
_AT_ONCE = 4_000_000  # numbers of resampled examples in memory
_FLIPS = 9999  # sign flips that are drawn where there are more

Reduce = Callable[[np.ndarray], np.ndarray]  # scores [..., examples, columns] -> numbers [...]
Pairs = Mapping[int, tuple[np.ndarray, np.ndarray]]  # seed -> [examples, columns] of both sides, the same examples


@dataclass(frozen=True)
class Difference:
    """A side minus another (or over it, minus 1), paired by training seed.

    Attributes:
        mean: over seeds.
        low, high: ends of the 95 % interval; None where there is none.
        over: units of the interval: "seeds", "examples", "seeds and examples", or "" without an interval.
        by_seed: the difference of each seed.
        examples: number of examples of a seed.
        p: two-sided p-value of the paired t-test against the threshold, with the interval's variance; None below three
            seeds.
        flips: p-value of the exact test by sign flips over seeds; with n seeds it is at least 2 / 2^n.
    """

    mean: float
    low: float | None
    high: float | None
    over: str
    by_seed: dict[int, float]
    examples: int
    p: float | None = None
    flips: float | None = None

    @property
    def seeds(self) -> int:
        return len(self.by_seed)


def paired(
    pairs: Pairs, reduce: Reduce, *, relative: bool = False, bootstrap: bool = True, threshold: float = 0.0
) -> Difference:
    """The mean difference of two sides over their seeds, with its interval.

    Args:
        pairs: scores of both sides by training seed. Where seeds have other numbers of examples, or one, the interval
            is over seeds alone.
        reduce: from scores to the number of a model.
        relative: ``first / second - 1`` instead of ``first - second``.
        bootstrap: False for a largest value: the largest of a draw is at most the largest there was, so that the
            interval would cover too seldom.
        threshold: of the tests.
    """

    from scipy.stats import t

    def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        a, b = reduce(first), reduce(second)
        return a / b - 1 if relative else a - b

    by_seed = {seed: float(difference(*both)) for seed, both in pairs.items()}
    values, counts = np.array([*by_seed.values()]), {len(scores) for both in pairs.values() for scores in both}
    mean, examples = float(values.mean()), min(counts)
    draws = None
    if bootstrap and len(counts) == 1 and examples > 1:
        draws = np.concatenate([
            np.mean([difference(a[drawn], b[drawn]) for a, b in pairs.values()], axis=0) for drawn in _draws(examples)
        ])  # fmt: skip
    if len(values) < SEEDS_FOR_AN_INTERVAL:
        if draws is None:
            return Difference(mean, None, None, "", by_seed, examples)
        low, high = np.nanpercentile(draws, [2.5, 97.5])
        return Difference(mean, float(low), float(high), "examples", by_seed, examples)
    variance = 0.0 if draws is None else float(np.nanvar(draws))
    error, freedom = _error(float(values.var(ddof=1)) / len(values), len(values), variance, examples)
    half = _quantile(freedom) * error
    over = "seeds and examples" if draws is not None else "seeds"
    flips = sign_flips(values - threshold)
    p = float(2 * t.sf(abs(mean - threshold) / error, freedom)) if error else flips
    return Difference(mean, mean - half, mean + half, over, by_seed, examples, p, flips)


def _draws(count: int):
    """Places of resampled examples, ``[draws, count]``, in parts that fit into memory."""
    rng, at_once = np.random.default_rng(0), max(1, _AT_ONCE // count)
    for start in range(0, RESAMPLES, at_once):
        yield rng.integers(count, size=(min(at_once, RESAMPLES - start), count))


def _error(of_seeds: float, seeds: int, of_examples: float, examples: int) -> tuple[float, float]:
    """The standard error of both variances of a mean, and Satterthwaite's degrees of freedom."""
    total = of_seeds + of_examples
    if not total:
        return 0.0, math.inf
    freedom = of_seeds**2 / (seeds - 1) + (of_examples**2 / (examples - 1) if of_examples else 0.0)
    return math.sqrt(total), total**2 / freedom


@cache
def _quantile(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t, to three decimals as printed tables have it."""
    from scipy.stats import t

    return round(float(t.ppf(0.975, freedom)), 3)


def sign_flips(differences: np.ndarray) -> float:
    """Two-sided p-value of the permutation test that flips signs of paired differences; exact for up to 13."""
    from scipy.stats import permutation_test

    if not np.isfinite(differences).all():
        return 1.0
    test = permutation_test(
        (np.asarray(differences, float),), np.mean, permutation_type="samples", vectorized=True, n_resamples=_FLIPS,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(test.pvalue)


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


@dataclass(frozen=True)
class Average:
    """A mean with its 95 % interval, and its numbers of examples and seeds."""

    mean: float
    low: float
    high: float
    examples: int
    seeds: int


def average(by_seed: Sequence[np.ndarray], proportion: bool = False) -> Average:
    """The mean of one score an example.

    The interval is Student's over seeds from three on, and over examples below; Wilson's if scores are 0 or 1
    (``proportion``). NaN scores are left out.
    """
    from scipy import stats

    finite = [known for of in by_seed if len(known := of[np.isfinite(of)])]
    if not finite:
        return Average(math.nan, math.nan, math.nan, 0, 0)
    count, many = sum(map(len, finite)), len(finite) >= SEEDS_FOR_AN_INTERVAL
    units = np.array([of.mean() for of in finite]) if many else np.concatenate(finite)
    mean = float(units.mean())
    proportion = proportion and bool(((units >= 0) & (units <= 1)).all())
    if proportion and not many and np.isin(units, (0, 1)).all():
        share = stats.binomtest(int(units.sum()), len(units)).proportion_ci(method="wilson")
        return Average(mean, float(share.low), float(share.high), count, len(finite))
    half = _quantile(len(units) - 1) * float(units.std(ddof=1)) / len(units) ** 0.5 if len(units) > 1 else math.nan
    low, high = mean - half, mean + half
    if proportion and len(units) > 1:
        low, high = max(low, 0.0), min(high, 1.0)
    return Average(mean, low, high, count, len(finite))
