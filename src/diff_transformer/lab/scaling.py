"""Scaling laws (section 3.2, Figure 3): loss against parameters and against tokens, and the matched-loss ratio.

    loss  \\  Transformer
           \\..........\\
             \\ DIFF     \\            ratio = x of DIFF / x of the Transformer
    --------- x -------- x ---->      at which both curves have the same loss

The paper reads off 6.8B against 11B parameters (62.2 %), 7.8B against 13.1B (59.5 %), and 160B against 251B tokens
(63.7 %). It does not publish its losses as numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.checks import require_extra
from diff_transformer.errors import UserError
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result
from diff_transformer.lab.results import read_results
from diff_transformer.lab.rows import RECALL, SWEEPS, Rows
from diff_transformer.settings import PositiveFloat

if TYPE_CHECKING:
    import pandas as pd

NEEDS_MODEL = False
HUBER = 0.01
COLUMNS = ("model", "parameters", "tokens", "loss")
_SLOPES = np.geomspace(0.02, 2.0, 8)  # exponents from which a fit starts


@dataclass(frozen=True)
class Settings:
    """The settings of a fit. The comment at each field documents it."""

    # tables of runs, separated by commas: CSV with model, parameters, tokens, loss; folders of comparisons or studies
    runs: str = ""
    ours: str = "diff"  # model of the table to compare
    reference: str = "softmax"  # model that it is compared with
    huber: PositiveFloat = HUBER  # size, in log loss, from which a residual counts linearly


QUICK: dict = {}
NEEDED = 3  # sizes, as many as a fit has parameters


def require_installed() -> None:
    """Raise UserError without the extra ``report``, whose scipy fits the curves."""
    require_extra("report", "a fit of scaling laws", "scipy")


@dataclass(frozen=True)
class PowerLaw:
    """``L(x) = a x^-b + c``, fitted over x from ``low`` to ``high``.

    Attributes:
        theta: log a, at ``scale``; log b; log c.
        covariance: of ``theta``, from the fit's Jacobian.
        freedom: losses minus parameters; with 0 there are no intervals.
    """

    theta: np.ndarray
    covariance: np.ndarray
    scale: float
    low: float
    high: float
    freedom: int

    def loss(self, x: float, theta: np.ndarray | None = None) -> float:
        height, slope, offset = np.exp(self.theta if theta is None else theta)
        return height * (x / self.scale) ** -slope + offset

    def inverse(self, loss: float, theta: np.ndarray | None = None) -> float:
        """The x at which the curve has this loss; infinity where it never comes so low."""
        height, slope, offset = np.exp(self.theta if theta is None else theta)
        if loss <= offset:
            return math.inf
        power = -math.log((loss - offset) / height) / slope
        return self.scale * math.exp(power) if power < 600 else math.inf

    @property
    def exponent(self) -> float:
        return math.exp(self.theta[1])

    def covers(self, x: float) -> bool:
        """True if x lies in the range that was fitted."""
        return self.low * (1 - 1e-9) <= x <= self.high * (1 + 1e-9)


def fit_power_law(x: Sequence[float], loss: Sequence[float], *, huber: float = HUBER) -> PowerLaw:
    """Fit ``a x^-b + c`` to losses in nats (Figure 3).

    The fit minimises Huber's loss of ``log(a x^-b + c) - log L``: residuals below ``huber`` count as squares, larger
    ones linearly, so that one bad run does not bend the curve.

    Raises:
        UserError: for values that are not positive and finite, fewer than 3 distinct x, or losses that do not fall
            with x.
    """
    from scipy.optimize import least_squares, nnls

    xs, losses = np.asarray(x, float), np.asarray(loss, float)
    if not (np.isfinite([*xs, *losses]).all() and min(*xs, *losses) > 0):
        raise UserError("sizes and losses must be positive and finite; leave out runs that diverged")
    if len(set(xs)) < NEEDED:
        raise UserError(f"there are {len(set(xs))} different sizes; a fit needs {NEEDED}")
    order = np.argsort(xs)
    if np.polyfit(np.log(xs), np.log(losses), 1)[0] >= 0:
        raise UserError(f"the loss does not fall with size: {losses[order[0]]:.4g} to {losses[order[-1]]:.4g}")
    scale, logs = float(np.exp(np.log(xs).mean())), np.log(losses)
    ratio = xs / scale

    def residuals(theta: np.ndarray) -> np.ndarray:
        height, slope, offset = np.exp(np.clip(theta, -50, 50))
        with np.errstate(over="ignore"):  # on the way to the best fit
            return np.log(height * ratio**-slope + offset) - logs

    fits = []
    for slope in _SLOPES:  # for each exponent the best of the other two, which are linear
        (height, offset), _ = nnls(np.stack([ratio**-slope, np.ones_like(ratio)], axis=1), losses)
        start = np.log([max(height, 1e-9), slope, max(offset, 1e-9)])
        fits.append(least_squares(residuals, start, loss="huber", f_scale=huber, xtol=1e-12, ftol=1e-12, gtol=1e-12))
    best = min(fits, key=lambda fit: fit.cost)
    freedom = len(losses) - NEEDED
    spread = float(best.fun @ best.fun) / freedom if freedom else math.inf
    covariance = np.linalg.pinv(best.jac.T @ best.jac) * spread
    return PowerLaw(best.x, covariance, scale, float(xs.min()), float(xs.max()), freedom)


Ends = tuple[float | None, float | None]


def exponent_interval(law: PowerLaw) -> Ends:
    """The 95 % interval of b from the fit's covariance; None where there are as many parameters as losses."""
    return _interval(law.theta[1], law.covariance[1, 1], law.freedom)


def ratio_interval(mine: PowerLaw, theirs: PowerLaw, x: float) -> Ends:
    """The 95 % interval of the size on ``theirs`` that matches the loss of ``mine`` at ``x``, over ``x``.

    By the delta method on both fits, in logarithms.
    """
    count = len(mine.theta)
    theta = np.concatenate((mine.theta, theirs.theta))

    def match(theta: np.ndarray) -> float:
        return math.log(theirs.inverse(mine.loss(x, theta[:count]), theta[count:]) / x)

    steps = 1e-5 * np.eye(len(theta))
    ends = np.array([[match(theta + step), match(theta - step)] for step in steps])
    if not np.isfinite(ends).all() or not min(mine.freedom, theirs.freedom):
        return None, None
    slope = (ends[:, 0] - ends[:, 1]) / 2e-5
    variance = slope[:count] @ mine.covariance @ slope[:count] + slope[count:] @ theirs.covariance @ slope[count:]
    return _interval(match(theta), variance, mine.freedom + theirs.freedom)


def _interval(logarithm: float, variance: float, freedom: int) -> Ends:
    from scipy.stats import t

    if not freedom or not math.isfinite(variance):
        return None, None
    half = t.ppf(0.975, freedom) * math.sqrt(variance)
    return math.exp(min(logarithm - half, 700)), math.exp(min(logarithm + half, 700))


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Read the tables and fit them; ``lm`` is not used."""
    require_installed()
    if not settings.runs.strip():
        raise UserError(
            "scaling needs a table of runs: --set runs=FILE.csv (model, parameters, tokens, loss), or a folder of "
            "comparisons or studies"
        )
    tables = [path.strip() for path in settings.runs.split(",") if path.strip()]
    return evaluate_scaling(read_runs(tables), settings)


def evaluate_scaling(runs: "pd.DataFrame", settings: Settings = Settings()) -> Result:
    """Fit L(parameters) and L(tokens) of both models, as far as the runs allow, and match their losses.

    Args:
        runs: with columns ``COLUMNS`` and ``part``: "final" for a finished run, "curve" for an earlier point.

    Returns:
        For each fit ("parameters", "tokens") and model a row with its ``exponent``; the row of ours also has ``ratio``,
        its size over the reference's at equal loss, at the largest run of ours whose match lies within the reference's
        runs, if there is one. The table ``scaling_runs`` has the runs of each fit with the fitted loss.

    Raises:
        UserError: if a model has no runs, or if the runs vary too little in size and in tokens to fit.
    """
    ours, reference = settings.ours, settings.reference
    known = sorted(runs["model"].unique())
    for name in (ours, reference):
        if name not in known:
            raise UserError(f"no run of {name!r}; the table has: {', '.join(known) or 'none'}; set ours and reference")
    rows: list[dict] = []
    refused: list[str] = []
    for fit, fixed in (("parameters", "tokens"), ("tokens", "parameters")):
        pair = _comparable(runs, (ours, reference), fit, fixed)
        if pair is None:
            refused.append(f"loss against {fit}: both models need {NEEDED} sizes at equal {fixed}")
            continue
        laws = {name: fit_power_law(of[fit], of["loss"], huber=settings.huber) for name, of in pair.items()}
        for name, of in pair.items():
            low, high = exponent_interval(laws[name])
            row = {"side": name, "fit": fit, "exponent": laws[name].exponent}
            ratio = _ratio(laws[ours], laws[reference], sorted(of[fit].unique())) if name == ours else {}
            rows.append({**row, "exponent_low": low, "exponent_high": high, **ratio})
            run = {"experiment": "scaling_runs", "side": name, "fit": fit}
            rows += [
                {**run, "x": x, "loss": loss, "fitted": laws[name].loss(x)}
                for x, loss in zip(of[fit], of["loss"], strict=True)
            ]
    if not rows:
        raise UserError(f"nothing to fit: {'; '.join(refused)}")
    return Result("scaling", rows, {"ours": ours, "reference": reference, "note": "; ".join(refused) or None})


def _ratio(ours: PowerLaw, reference: PowerLaw, sizes: Sequence[float]) -> dict[str, float]:
    """The ratio at our largest size whose match lies within the reference's runs."""
    matches = [(x, reference.inverse(ours.loss(x))) for x in sizes]
    within = [(x, there) for x, there in matches if reference.covers(there)]
    if not within:
        return {}
    x, there = within[-1]
    low, high = ratio_interval(ours, reference, x)
    ends = {} if low is None or high is None else {"ratio_low": 1 / high, "ratio_high": 1 / low}
    return {"ratio": float(x / there), "ratio_at": float(x), **ends}


def _comparable(runs: "pd.DataFrame", names: tuple[str, str], fit: str, fixed: str) -> "dict[str, pd.DataFrame] | None":
    """The runs of a fit by model; None where there are too few.

    A fit against tokens takes points of training curves where both models have some, else finished runs. The runs of a
    model are equal in ``fixed``; the models' sizes may differ by 10 %, by lambda and the head norm. Of several groups,
    that with the most values of x is taken, of those the largest.
    """
    curve = runs["part"] == "curve"
    part = curve if fit == "tokens" and all((runs[curve]["model"] == name).any() for name in names) else ~curve
    ours, reference = (runs[part & (runs["model"] == name)] for name in names)
    slack = 0.1 if fixed == "parameters" else 1e-9
    best, most = None, NEEDED
    for anchor in sorted(reference[fixed].unique()):
        nearest = min(ours[fixed].unique(), key=lambda value: abs(value - anchor), default=math.inf)
        if abs(nearest - anchor) <= slack * anchor:
            group = {names[0]: ours[ours[fixed] == nearest], names[1]: reference[reference[fixed] == anchor]}
            sizes = min(of[fit].nunique() for of in group.values())
            if sizes >= most:
                best, most = group, sizes
    return best


# ---- tables of runs


def read_runs(paths: Sequence[Path | str]) -> "pd.DataFrame":
    """The runs of CSV tables, and of folders of comparisons and studies.

    Raises:
        UserError: for a missing path, a table without the columns, or a number that is not positive.
    """
    import pandas as pd

    parts = []
    for path in map(Path, paths):
        if path.suffix.lower() == ".csv":
            parts.append(_from_csv(path))
        else:
            parts.append(runs_of(read_results(path)))
    return pd.concat(parts, ignore_index=True)


def _from_csv(path: Path) -> "pd.DataFrame":
    import pandas as pd

    if not path.is_file():
        raise UserError(f"no table of runs at {path}; give a .csv or a folder of comparisons")
    frame = pd.read_csv(path, encoding="utf-8-sig", skipinitialspace=True)
    if missing := [name for name in COLUMNS if name not in frame]:
        raise UserError(f"{path} has no {', '.join(missing)}; needed: {', '.join(COLUMNS)}")
    for column in COLUMNS[1:]:
        numbers = pd.to_numeric(frame[column], errors="coerce")
        if not (numbers > 0).all():
            wrong = frame[column][~(numbers > 0)].iloc[0]
            raise UserError(f"{path}: {column} is {wrong}; give a positive number, for example 3.06 or 6.8e9")
        frame[column] = numbers
    return frame[[*COLUMNS]].assign(part="final")


def runs_of(rows: Rows) -> "pd.DataFrame":
    """The validation losses of trained models as a table of runs, without sweeps of learning rates and small models of
    recall, and without runs that diverged."""
    import pandas as pd

    made = []
    for key, curve in rows["validation"].groupby(["setting", "side", "seed"], sort=False):
        setting, side, seed = key  # ty: ignore[not-iterable]
        of = {"setting": setting, "side": side, "seed": seed}
        run, parameters = rows.about("run", **of), rows.only(**of)["model"]["parameters"].max()
        config = run.get("config")
        apart = setting == RECALL or str(setting).startswith(SWEEPS)
        if apart or not config or run.get("diverged") or parameters != parameters:
            continue
        tokens = config["train"]["batch_size"] * config["data"]["length"]
        points = curve[curve["step"] > 0].sort_values("step")
        for place, (step, loss) in enumerate(zip(points["step"], points["loss"], strict=True)):
            part = "final" if place == len(points) - 1 else "curve"
            made.append(
                {
                    "model": side,
                    "parameters": parameters,
                    "tokens": step * tokens,
                    "loss": loss,
                    "part": part,
                }
            )
    frame = pd.DataFrame(made, columns=[*COLUMNS, "part"])
    finished = frame[frame["part"] == "final"].assign(part="curve")  # a curve has its end too
    return pd.concat([frame, finished], ignore_index=True)
