"""Power laws of the loss: fits, and intervals of the exponent and of the ratio at which two curves meet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diff_transformer.checks import require_positive

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
