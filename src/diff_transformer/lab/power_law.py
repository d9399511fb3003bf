"""Power laws of the loss: fits, and intervals of the exponent and of the ratio at which two curves meet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diff_transformer.checks import require_positive
from diff_transformer.errors import UserError

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
        """True if x lies in the range that was fitted."""
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
    scale = _middle(xs)
    theta = _fit(np.log(xs / scale), np.log(losses), form, huber)
    a, b, c = math.exp(theta[0] + math.exp(theta[1]) * math.log(scale)), math.exp(theta[1]), _offset(theta)
    residual = np.log(a * xs**-b + c) - np.log(losses)
    return PowerLaw(a, b, c, float(xs.min()), float(xs.max()), float(np.sqrt(np.mean(residual**2))))


Points = tuple[Sequence[float], Sequence[float]]  # x and the losses there
Ends = tuple[float | None, float | None]
Residuals = Callable[[np.ndarray], np.ndarray]


def exponent_interval(x: Sequence[float], loss: Sequence[float], *, form: str = "offset") -> Ends:
    """The 95 % interval of b by profile likelihood; None for an end that the data leave open.

    The errors of log L are taken to be normal and independent, with the same spread at each x. The interval holds every
    b for which the best sum of squares stays below that of the best fit times ``1 + F / (n - p)``, where F is the 95 %
    quantile of F(1, n - p), n the number of losses and p of parameters. Both ends are None if n <= p.
    """
    xs, losses = _checked(x, loss, form, HUBER)
    u, logs = np.log(xs / _middle(xs)), np.log(losses)
    best = _fit(u, logs, form, _SQUARES)
    return _profile(lambda theta: _log_loss(theta, u) - logs, best, 1, _bounds(logs, form), len(logs))


def match_interval(mine: Points, theirs: Points, at: float, *, form: str = "offset") -> Ends:
    """The 95 % interval of the x at which the curve of ``theirs`` has the loss that that of ``mine`` has at ``at``.

    By profile likelihood, as ``exponent_interval``, over both curves, whose errors have the same spread.
    """
    (x, loss), (their_x, their_loss) = (_checked(*points, form, HUBER) for points in (mine, theirs))
    u, logs, their_u, their_logs = np.log(x / at), np.log(loss), np.log(their_x / at), np.log(their_loss)
    ours, best = _fit(u, logs, form, _SQUARES), _fit(their_u, their_logs, form, _SQUARES)
    count = FORMS[form]

    def gap(theta: np.ndarray, offset: float) -> float:
        """The loss of our curve at ``at``, above the offset of theirs."""
        return math.exp(min(700.0, float(_log_loss(theta, np.zeros(1))[0]))) - offset

    def residuals(theta: np.ndarray) -> np.ndarray:
        """By our parameters, the logarithm of the match over ``at``, and their parameters but the height."""
        place, rest = theta[count], theta[count + 1 :]
        height = math.log(max(gap(theta[:count], _offset([0.0, *rest])), 1e-12)) + math.exp(rest[0]) * place
        found = _log_loss(theta[:count], u) - logs, _log_loss(np.array([height, *rest]), their_u) - their_logs
        return np.concatenate(found)

    here = gap(ours, _offset(best))
    if here <= 0:
        return None, None
    place = (best[0] - math.log(here)) / math.exp(best[1])
    bounds = np.concatenate((_bounds(logs, form), _bounds(their_logs, form)), axis=1)  # a place may be anywhere
    theta = np.array([*ours, place, *best[1:]])
    low, high = _profile(residuals, theta, count, bounds, len(logs) + len(their_logs))
    return None if low is None else at * low, None if high is None else at * high


def _profile(residuals: Residuals, best: np.ndarray, index: int, bounds: np.ndarray, count: int) -> Ends:
    """The exponentials of where the least sum of squares at fixed ``theta[index]`` passes the threshold."""
    from scipy.optimize import brentq
    from scipy.stats import f

    free = count - len(best)
    if free <= 0:
        return None, None
    others, least = np.delete(bounds, index, axis=1), float((residuals(best) ** 2).sum())
    limit = max(least, count * _EXACT**2) * (1 + float(f.ppf(0.95, 1, free)) / free)

    def excess(value: float) -> float:
        rest = np.delete(best, index)
        found = _minimise(lambda rest: residuals(np.insert(rest, index, value)), rest, others, max_nfev=200)
        return 2 * float(found.cost) - limit

    def end(step: float) -> float | None:
        inside = float(best[index])
        while abs(inside - best[index]) < _FARTHEST:
            if excess(inside + step) > 0:
                return math.exp(brentq(excess, inside, inside + step, xtol=1e-10, rtol=1e-10))
            inside, step = inside + step, 2 * step
        return None

    return end(-0.02), end(0.02)


def _checked(x: Sequence[float], loss: Sequence[float], form: str, huber: float) -> tuple[np.ndarray, np.ndarray]:
    require_positive(huber=huber)
    if form not in FORMS:
        raise UserError(f"form is {form!r}; accepted: {', '.join(map(repr, FORMS))}")
    xs, losses = np.asarray(x, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    if xs.shape != losses.shape or xs.ndim != 1:
        raise UserError(f"{xs.size} values of x and {losses.size} losses; give one loss for each x")
    if not (np.isfinite(xs).all() and np.isfinite(losses).all() and (xs > 0).all() and (losses > 0).all()):
        raise UserError("x and losses must be positive and finite")
    distinct = np.unique(xs)
    if len(distinct) < FORMS[form]:
        hint = ", or fit form='plain', which needs 2" if form == "offset" and len(distinct) == 2 else ""
        raise UserError(f"{len(distinct)} distinct x; {form!r} needs at least {FORMS[form]}: give more runs{hint}")
    first, last = losses[xs == distinct[0]].mean(), losses[xs == distinct[-1]].mean()
    if last >= first:
        raise UserError(
            f"the loss does not fall: {first:.4g} at x = {distinct[0]:.4g}, {last:.4g} at {distinct[-1]:.4g}; a power "
            f"law of this kind needs runs that gain from size"
        )
    return xs, losses


def _middle(x: np.ndarray) -> float:
    return float(np.exp(np.log(x).mean()))


def _fit(u: np.ndarray, logs: np.ndarray, form: str, huber: float) -> np.ndarray:
    """The best (log a, log b[, log c]) for the logarithms of losses ``logs`` [n] at ``u`` [n]."""
    return _minimise(
        lambda theta: _log_loss(theta, u) - logs, _start(u, np.exp(logs), form), _bounds(logs, form), _TOLERANCE,
        loss="huber", f_scale=huber,
    ).x  # fmt: skip


def _minimise(residuals: Residuals, start: np.ndarray, bounds: np.ndarray, tolerance: float = 1e-10, **options):
    from scipy.optimize import least_squares

    inside = np.clip(start, bounds[0] + 1e-9, bounds[1] - 1e-9)  # the solver starts within its bounds
    tolerances = dict.fromkeys(("xtol", "ftol", "gtol"), tolerance)
    return least_squares(residuals, inside, "3-point", (bounds[0], bounds[1]), "dogbox", **tolerances, **options)


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
