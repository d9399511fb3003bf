"""Statistics: paired differences with 95 % intervals, tests and power, and power laws of the loss."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from diff_transformer.checks import require_positive

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


# ---- power laws of the loss

FORMS = {"offset": 3, "plain": 2}  # parameters to be found: a, b, c; or a and b, with c = 0
HUBER = 0.01
_EXPONENTS = np.geomspace(0.005, 4.0, 120)  # where the search starts
_LEAST_OFFSET = 1e-9  # of the smallest loss
_TOLERANCE = 1e-12
_SQUARES = 1e3  # a size of residuals that none reaches
_EXACT = 1e-9  # a residual of log L that is rounding
_FARTHEST = 12.0  # search for an end of an interval, in natural logarithms


@dataclass(frozen=True)
class PowerLaw:
    """``L(x) = a x^-b + c``, fitted over x from ``low`` to ``high``; ``residual`` is the root mean square of log L."""

    a: float
    b: float
    c: float
    low: float
    high: float
    residual: float = 0.0

    def loss(self, x: float) -> float:
        return self.a * x**-self.b + self.c

    def inverse(self, loss: float) -> float:
        """The x at which the curve has this loss; infinity where it never comes so low."""
        if loss <= self.c:
            return math.inf
        power = -math.log((loss - self.c) / self.a) / self.b
        return math.exp(power) if power < 700 else math.inf

    def covers(self, x: float) -> bool:
        """Whether x lies in the range that was fitted."""
        return self.low * (1 - 1e-9) <= x <= self.high * (1 + 1e-9)


def fit_power_law(x: Sequence[float], loss: Sequence[float], *, form: str = "offset", huber: float = HUBER) -> PowerLaw:
    """Fit ``a x^-b + c`` (``form="offset"``) or ``a x^-b`` (``"plain"``) to losses in nats (Figure 3).

    The fit minimises Huber's loss of ``log(a x^-b + c) - log L``: residuals below ``huber`` count as squares, larger
    ones linearly, so that one bad run does not bend the curve.

    Raises:
        ValueError: for values that are not positive and finite, fewer distinct x than the form needs (3 and 2), losses
            that do not fall with x, or an unknown form.
    """
    xs, losses = _checked(x, loss, form, huber)
    u, scale = _centred(xs)
    return _law(xs, losses, _solve(u, np.log(losses), _start(u, losses, form), huber), scale)


Points = tuple[Sequence[float], Sequence[float]]  # x and the losses there
Ends = tuple[float | None, float | None]


def exponent_interval(x: Sequence[float], loss: Sequence[float], *, form: str = "offset") -> Ends:
    """The 95 % interval of b by profile likelihood; None for an end that the data leave open.

    The errors of log L are taken to be normal and independent, with the same spread at each x. The interval holds every
    b for which the best sum of squares stays below that of the best fit times ``1 + F / (n - p)``, where F is the 95 %
    quantile of F(1, n - p), n the number of losses and p of parameters. Both ends are None if n <= p.
    """
    xs, losses = _checked(x, loss, form, HUBER)
    u, _ = _centred(xs)
    logs, free = np.log(losses), len(xs) - FORMS[form]
    if free <= 0:
        return None, None
    best = _solve(u, logs, _start(u, losses, form), _SQUARES)

    def squares(log_b: float) -> float:
        def residuals(rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            theta = np.array([rest[0], log_b, *rest[1:]])
            return _log_loss(theta, u) - logs, np.delete(_slopes(theta, u), 1, axis=1)

        return _least(residuals, np.delete(best, 1), np.delete(_bounds(logs, form), 1, axis=1))

    return _profile(squares, float(best[1]), float(((_log_loss(best, u) - logs) ** 2).sum()), free, len(xs))


def match_interval(mine: Points, theirs: Points, at: float, *, form: str = "offset") -> Ends:
    """The 95 % interval of the x at which the curve of ``theirs`` has the loss that that of ``mine`` has at ``at``.

    By profile likelihood, as ``exponent_interval``, over both curves, whose errors have the same spread.
    """
    sides = [_checked(*points, form, HUBER) for points in (mine, theirs)]
    u = [np.log(x / at) for x, _ in sides]
    logs = [np.log(loss) for _, loss in sides]
    both = np.concatenate(logs)
    count = len(both)
    free = count - 2 * FORMS[form]
    best = [_solve(u[i], logs[i], _start(u[i], sides[i][1], form), _SQUARES) for i in (0, 1)]
    least = sum(float(((_log_loss(theta, x) - log) ** 2).sum()) for theta, x, log in zip(best, u, logs, strict=True))
    here = np.zeros(1)
    level = math.exp(float(_log_loss(best[0], here)[0])) - _offset(best[1])
    if free <= 0 or level <= 0:
        return None, None
    first = FORMS[form]
    bounds = np.concatenate((_bounds(logs[0], form), _bounds(logs[1], form)[:, 1:]), axis=1)

    def squares(place: float) -> float:
        def residuals(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            ours, rest = theta[:first], theta[first:]
            level, offset = math.exp(min(700.0, float(_log_loss(ours, here)[0]))), _offset([0.0, *rest])
            gap = max(level - offset, 1e-12)
            theirs = np.array([math.log(gap) + math.exp(rest[0]) * place, *rest])  # it passes through the match
            of_ours, of_theirs = _slopes(ours, u[0]), _slopes(theirs, u[1])
            height = of_theirs[:, :1]  # by the height of their curve, which depends on all parameters
            slopes = np.zeros((count, len(theta)))
            slopes[: len(u[0]), :first] = of_ours
            slopes[len(u[0]) :, :first] = height * (level / gap * _slopes(ours, here))
            own = np.array([math.exp(rest[0]) * place, -offset / gap])[: first - 1]
            slopes[len(u[0]) :, first:] = of_theirs[:, 1:] + height * own
            return np.concatenate((_log_loss(ours, u[0]), _log_loss(theirs, u[1]))) - both, slopes

        return _least(residuals, np.concatenate((best[0], best[1][1:])), bounds)

    place = (float(best[1][0]) - math.log(level)) / math.exp(float(best[1][1]))
    low, high = _profile(squares, place, least, free, count)
    return None if low is None else at * low, None if high is None else at * high


def _profile(squares: Callable[[float], float], best: float, least: float, free: int, count: int) -> Ends:
    """The exponentials of where ``squares`` passes the threshold on both sides of ``best``."""
    from scipy.optimize import brentq
    from scipy.stats import f

    limit = max(least, count * _EXACT**2) * (1 + float(f.ppf(0.95, 1, free)) / free)

    def excess(value: float) -> float:
        return squares(value) - limit

    def end(step: float) -> float | None:
        inside = best
        while abs(inside - best) < _FARTHEST:
            if excess(inside + step) > 0:
                return math.exp(brentq(excess, inside, inside + step, xtol=1e-10, rtol=1e-10))
            inside, step = inside + step, 2 * step
        return None

    return end(-0.02), end(0.02)


def _least(
    residuals: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], start: np.ndarray, bounds: np.ndarray
) -> float:
    """The least sum of squares of ``residuals``, which also returns their derivatives."""
    from scipy.optimize import least_squares

    low, high = bounds
    inside = np.clip(start, low + 1e-9, high - 1e-9)
    found = least_squares(
        lambda theta: residuals(theta)[0], inside, lambda theta: residuals(theta)[1], (low, high), "dogbox",
        xtol=1e-10, ftol=1e-10, max_nfev=200,
    )  # fmt: skip
    return 2 * float(found.cost)


def _checked(x: Sequence[float], loss: Sequence[float], form: str, huber: float) -> tuple[np.ndarray, np.ndarray]:
    require_positive(huber=huber)
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; accepted: {', '.join(map(repr, FORMS))}")
    xs, losses = np.asarray(x, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if xs.shape != losses.shape or xs.ndim != 1:
        raise ValueError(f"{xs.size} values of x and {losses.size} losses; give one loss for each x")
    if not (np.isfinite(xs).all() and np.isfinite(losses).all() and (xs > 0).all() and (losses > 0).all()):
        raise ValueError("x and losses must be positive and finite")
    distinct = np.unique(xs)
    if len(distinct) < FORMS[form]:
        hint = ", or fit form='plain', which needs 2" if form == "offset" and len(distinct) == 2 else ""
        raise ValueError(f"{len(distinct)} distinct x; {form!r} needs at least {FORMS[form]}: give more runs{hint}")
    first, last = losses[xs == distinct[0]].mean(), losses[xs == distinct[-1]].mean()
    if last >= first:
        raise ValueError(
            f"the loss does not fall: {first:.4g} at x = {distinct[0]:.4g}, {last:.4g} at {distinct[-1]:.4g}; a power "
            f"law of this kind needs runs that gain from size"
        )
    return xs, losses


def _centred(x: np.ndarray) -> tuple[np.ndarray, float]:
    """log x less its mean, and the x of that mean: there the height of the curve is ``a`` at scale 1."""
    scale = float(np.exp(np.log(x).mean()))
    return np.log(x / scale), scale


def _law(x: np.ndarray, losses: np.ndarray, theta: np.ndarray, scale: float) -> PowerLaw:
    b = float(np.exp(theta[1]))
    a = float(np.exp(theta[0] + b * np.log(scale)))
    c = float(np.exp(theta[2])) if len(theta) == 3 else 0.0
    residual = np.log(a * x**-b + c) - np.log(losses)
    return PowerLaw(a, b, c, float(x.min()), float(x.max()), float(np.sqrt(np.mean(residual**2))))


def _solve(u: np.ndarray, logs: np.ndarray, start: np.ndarray, huber: float) -> np.ndarray:
    """The best (log a, log b[, log c]) for the logarithms of losses ``logs`` [n] at ``u`` [n]."""
    from scipy.optimize import least_squares

    low, high = _bounds(logs, "offset")[:, : len(start)]
    edge = 1e-9 * np.maximum(1.0, np.abs(start))  # the solver starts within its bounds
    inside = np.clip(start, np.add(low, edge), np.subtract(high, edge))
    found = least_squares(
        lambda theta: _log_loss(theta, u) - logs, inside, lambda theta: _slopes(theta, u), (low, high), "dogbox",
        loss="huber", f_scale=huber, xtol=_TOLERANCE, ftol=_TOLERANCE, gtol=_TOLERANCE,
    )  # fmt: skip
    return found.x


def _bounds(logs: np.ndarray, form: str) -> np.ndarray:
    """The lowest and the highest (log a, log b[, log c]) of a fit to ``logs``, [2, parameters]."""
    lowest = logs.min()
    low = [-np.inf, np.log(1e-4), lowest + np.log(_LEAST_OFFSET)]
    return np.array([low, [np.inf, np.log(20.0), lowest]])[:, : FORMS[form]]


def _offset(theta: Sequence[float] | np.ndarray) -> float:
    return math.exp(theta[2]) if len(theta) == 3 else 0.0


def _start(u: np.ndarray, losses: np.ndarray, form: str) -> np.ndarray:
    """The best of a grid of exponents, a and c by linear least squares: (log a, log b[, log c])."""
    best, theta = math.inf, np.zeros(FORMS[form])
    for exponent in _EXPONENTS:
        shape = np.exp(-exponent * u)
        if form == "offset":
            centred = shape - shape.mean()
            c = losses.mean() - (losses @ centred) / (centred @ centred) * shape.mean()
            c = float(np.clip(c, _LEAST_OFFSET * losses.min(), 0.999 * losses.min()))
            a = max(float((losses - c) @ shape / (shape @ shape)), 1e-12)
        else:
            a, c = float(np.exp(np.log(losses / shape).mean())), 0.0
        error = float(((np.log(a * shape + c) - np.log(losses)) ** 2).sum())
        if error < best:
            found = [math.log(a), math.log(exponent), math.log(max(c, 1e-300))]
            best, theta = error, np.array(found[: FORMS[form]])
    return theta


def _log_loss(theta: np.ndarray, u: np.ndarray) -> np.ndarray:
    """log L [n] of (log a, log b[, log c])."""
    log_power = theta[0] - np.exp(theta[1]) * u
    return np.logaddexp(log_power, theta[2]) if len(theta) == 3 else log_power


def _slopes(theta: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The derivatives of ``_log_loss`` by (log a, log b[, log c]), [n, parameters]."""
    exponent = np.exp(theta[1])
    power = np.exp(theta[0] - exponent * u)
    offset = np.exp(theta[2]) if len(theta) == 3 else 0.0
    share = power / (power + offset)
    parts = [share, -share * exponent * u, 1 - share]
    return np.stack(parts[: len(theta)], axis=1)
