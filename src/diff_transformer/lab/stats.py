"""Statistics: paired differences with 95 % intervals, and power laws of the loss."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diff_transformer.checks import require_positive

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


FORMS = {"offset": 3, "plain": 2}  # parameters to be found: a, b, c; or a and b, with c = 0
HUBER = 0.01
_EXPONENTS = np.geomspace(0.005, 4.0, 120)  # where the search starts
_ITERATIONS = 60
_LEAST_OFFSET = 1e-9  # of the smallest loss


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
    """Fit ``a x^-b + c`` (``form="offset"``) or ``a x^-b`` (``"plain"``) to losses in nats.

    Raises:
        ValueError: for values that are not positive and finite, fewer distinct x than the form needs (3 and 2), losses
            that do not fall with x, or an unknown form.
    """
    xs, losses = _checked(x, loss, form, huber)
    a, b, c = (float(found[0]) for found in _solve(xs, np.log(losses)[None], form, huber))
    residual = np.log(a * xs**-b + c) - np.log(losses)
    return PowerLaw(a, b, c, float(xs.min()), float(xs.max()), float(np.sqrt(np.mean(residual**2))))


def bootstrap(
    x: Sequence[float],
    loss: Sequence[float],
    *,
    form: str = "offset",
    huber: float = HUBER,
    draws: int = 1000,
    seed: int = 0,
) -> list[PowerLaw]:
    """Fits to ``draws`` tables in which the residuals of the fit are drawn anew, with replacement.

    Residuals are widened by sqrt(n / (n - p)), p the number of parameters, for what the fit itself took up. Empty where
    n does not exceed p: such a curve goes through its points and says nothing of its own error.
    """
    require_positive(draws=draws)
    fitted = fit_power_law(x, loss, form=form, huber=huber)
    xs, losses = _checked(x, loss, form, huber)
    count, free = len(xs), FORMS[form]
    if count <= free:
        return []
    predicted = np.log([fitted.loss(v) for v in xs])
    residual = (np.log(losses) - predicted) * (count / (count - free)) ** 0.5
    picks = np.random.default_rng(seed).integers(count, size=(draws, count))
    a, b, c = _solve(xs, predicted + residual[picks], form, huber)
    return [PowerLaw(*(float(v) for v in law), fitted.low, fitted.high) for law in zip(a, b, c, strict=True)]


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


def _solve(x: np.ndarray, logs: np.ndarray, form: str, huber: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best (a, b, c), each ``[problems]``, for the logarithms of losses ``logs [problems, n]`` at ``x [n]``."""
    scale = np.exp(np.log(x).mean())  # a at scale 1 is the height of the curve in its middle
    u = np.log(x / scale)
    theta = _start(u, logs, form)
    damping = np.full(len(logs), 1e-3)
    value, jacobian = _model(u, theta)
    cost = _huber(value - logs, huber)
    for _ in range(_ITERATIONS):
        residual = value - logs
        weight = np.minimum(1.0, huber / np.maximum(np.abs(residual), 1e-300))
        normal = np.einsum("pni,pn,pnj->pij", jacobian, weight, jacobian)
        slope = np.einsum("pni,pn,pn->pi", jacobian, weight, residual)
        diagonal = np.einsum("pii->pi", normal)
        damped = normal + (damping[:, None] * (diagonal + 1e-12))[:, :, None] * np.eye(theta.shape[1])
        step = np.linalg.solve(damped, slope[:, :, None])[:, :, 0]
        trial = _bounded(theta - np.clip(step, -1.0, 1.0), logs)
        trial_value, trial_jacobian = _model(u, trial)
        trial_cost = _huber(trial_value - logs, huber)
        better = trial_cost <= cost
        theta = np.where(better[:, None], trial, theta)
        value, jacobian = (
            np.where(better[:, None], trial_value, value),
            np.where(better[:, None, None], trial_jacobian, jacobian),
        )
        cost, damping = np.where(better, trial_cost, cost), np.where(better, damping / 5, damping * 4)
        damping = np.clip(damping, 1e-12, 1e8)
    b = np.exp(theta[:, 1])
    c = np.exp(theta[:, 2]) if form == "offset" else np.zeros(len(b))
    return np.exp(theta[:, 0] + b * np.log(scale)), b, c


def _start(u: np.ndarray, logs: np.ndarray, form: str) -> np.ndarray:
    """For each problem the best of a grid of exponents, a and c by linear least squares: (log a, log b[, log c])."""
    losses = np.exp(logs)  # [problems, n]
    basis = np.exp(-np.outer(_EXPONENTS, u))  # [exponents, n]
    best = np.full(len(logs), np.inf)
    theta = np.zeros((len(logs), FORMS[form]))
    for exponent, shape in zip(_EXPONENTS, basis, strict=True):
        if form == "offset":
            centred = shape - shape.mean()
            a = (losses @ centred) / (centred @ centred)
            c = losses.mean(1) - a * shape.mean()
        else:
            a, c = np.exp((logs - np.log(shape)).mean(1)), np.zeros(len(logs))
        least = _LEAST_OFFSET * losses.min(1)
        c = np.clip(c, least, 0.999 * losses.min(1)) if form == "offset" else c
        a = np.maximum(np.where(c > 0, ((losses - c[:, None]) @ shape) / (shape @ shape), a), 1e-12)
        error = ((np.log(np.outer(a, shape) + c[:, None]) - logs) ** 2).sum(1)
        found = np.stack([np.log(a), np.full(len(a), np.log(exponent)), np.log(np.maximum(c, 1e-300))], axis=1)
        theta = np.where((error < best)[:, None], found[:, : theta.shape[1]], theta)
        best = np.minimum(error, best)
    return theta


def _model(u: np.ndarray, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log L ``[problems, n]`` and its derivatives by (log a, log b[, log c])."""
    exponent = np.exp(theta[:, 1:2])
    power = np.exp(theta[:, :1] - exponent * u)
    offset = np.exp(theta[:, 2:3]) if theta.shape[1] == 3 else np.zeros_like(power[:, :1])
    total = power + offset
    parts = [power / total, -power / total * exponent * u]
    if theta.shape[1] == 3:
        parts.append(offset / total)
    return np.log(total), np.stack(parts, axis=2)


def _bounded(theta: np.ndarray, logs: np.ndarray) -> np.ndarray:
    bounded = theta.copy()
    bounded[:, 1] = np.clip(bounded[:, 1], np.log(1e-4), np.log(20.0))
    if theta.shape[1] == 3:
        lowest = logs.min(1)
        bounded[:, 2] = np.clip(bounded[:, 2], lowest + np.log(_LEAST_OFFSET), lowest)
    return bounded


def _huber(residual: np.ndarray, width: float) -> np.ndarray:
    size = np.abs(residual)
    return np.where(size <= width, 0.5 * size**2, width * (size - 0.5 * width)).sum(1)
