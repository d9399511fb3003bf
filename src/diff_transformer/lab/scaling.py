"""Scaling laws (section 3.2, Figure 3): loss against parameters and against tokens, and the matched-loss ratio.

    loss  \\  Transformer
           \\..........\\
             \\ DIFF     \\            ratio = x of DIFF / x of the Transformer
    --------- x -------- x ---->      at which both curves have the same loss

The paper reads off 6.8B against 11B parameters (62.2 %), 7.8B against 13.1B (59.5 %), and 160B against 251B tokens
(63.7 %). It does not publish its losses as numbers, so a made-up table with such a ratio checks this code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from diff_transformer.checks import require_extra
from diff_transformer.errors import UserError
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result
from diff_transformer.lab.power_law import (
    FORMS,
    HUBER,
    Ends,
    Points,
    PowerLaw,
    exponent_interval,
    fit_power_law,
    match_interval,
)
from diff_transformer.lab.run_tables import Run, canonical, read_runs
from diff_transformer.lab.stats import SEEDS_FOR_AN_INTERVAL, over_seeds

NEEDS_MODEL = False
SYNTHETIC = "synthetic"
Fit = Callable[[Sequence[float], Sequence[float]], PowerLaw]  # of x and losses
FITS: dict[str, Callable[[Run], float]] = {"parameters": lambda run: run.parameters, "tokens": lambda run: run.tokens}


@dataclass(frozen=True)
class Settings:
    """The settings of a fit. The comment at each field documents it."""

    # tables of runs, separated by commas: CSV or JSON with model, parameters, tokens, loss; folders of comparisons or
    # studies; or "synthetic", a made-up table with the paper's ratios, which only checks the fit
    runs: str = ""
    ours: str = "diff"  # model of the table to compare, or "DIFF"
    reference: str = "softmax"  # model that it is compared with, or "Transformer"
    form: str = "offset"  # "offset" for a x^-b + c, "plain" for a x^-b
    huber: float = HUBER  # size, in log loss, from which a residual counts linearly


QUICK: dict = {"runs": SYNTHETIC}


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Read the tables and fit them; ``lm`` is not used."""
    if not settings.runs.strip():
        raise UserError(
            "scaling needs a table of runs: --set runs=FILE.csv (model, parameters, tokens, loss), a .json, or a "
            "folder of comparisons"
        )
    tables = [path.strip() for path in settings.runs.split(",") if path.strip()]
    table = synthetic_runs() if settings.runs == SYNTHETIC else read_runs(tables)
    return evaluate_scaling(table, settings, samples)


def require_installed() -> None:
    """Raise RuntimeError without the extra ``report``, whose scipy fits the curves."""
    require_extra("report", "a fit of scaling laws", "scipy")


def evaluate_scaling(
    runs: Sequence[Run],
    settings: Settings = Settings(),
    samples: Samples | None = None,
) -> Result:
    """Fit L(parameters) and L(tokens) of both models, as far as the runs allow, and match their losses.

    ``metrics``, for each fit ("parameters", "tokens"):

    - ``{fit}_{model}_{a,b,c}``: the parameters of each model's law, with ``_low`` and ``_high`` of b, and its range of
      x as ``_first`` and ``_last``;
    - ``{fit}_ratio_from_reference``: the ratio at the reference's largest run with a match within our runs (59.5 % in
      the paper);
    - ``{fit}_ratio_from_ours``: the ratio at our largest run with a match within the reference's runs (62.2 %).

    A ratio beyond the runs is called ``..._extrapolated`` instead. With enough runs, both ratios have ``_low`` and
    ``_high``. For finished runs, it is by profile likelihood; along training curves, over at least three pairs of
    trainings. ``rows``: the runs with their fitted loss, and the match of every run's size.

    Raises:
        ValueError: if a model has no runs, or if the runs vary too little in size and in tokens to fit.
    """
    samples, form, huber, source = samples or Samples(), settings.form, settings.huber, settings.runs
    if form not in FORMS:
        raise UserError(f"form is {form!r}; accepted: {', '.join(map(repr, FORMS))}")
    names = (canonical(settings.ours), canonical(settings.reference))
    known = sorted({one.model for one in runs})
    for name in names:
        if name not in known:
            raise UserError(f"no run of {name!r}; the table has: {', '.join(known) or 'none'}; set ours and reference")
    metrics: dict[str, float] = {}
    rows: list[dict] = []
    refused: list[str] = []
    rises: list[str] = []
    law = partial(fit_power_law, form=form, huber=huber)
    for fit in FITS:
        chosen = _choose(runs, names, fit, FORMS[form])
        if isinstance(chosen, str):
            refused.append(chosen)
            continue
        rises += [words for name in names for words in _rises(fit, name, chosen[name])]
        try:
            found, fitted = _one_fit(fit, names, chosen, law, form, samples)
        except ValueError as error:
            raise UserError(f"loss against {fit}: {error}") from error
        metrics |= found
        rows += fitted
    if not metrics:
        raise UserError("nothing to fit. " + " ".join(refused))
    about = {"ours": names[0], "reference": names[1], "form": form, "huber": huber}
    source_of = {"runs": source, "synthetic": source == SYNTHETIC, "notes": refused + rises}
    title = ", ".join(Path(table).stem for table in source.split(",")) if source else " against ".join(names)
    return Result("scaling", title, metrics, rows, provenance(**about, **source_of))


def _one_fit(
    fit: str, names: tuple[str, str], chosen: dict[str, list[Run]], law_of: Fit, form: str, samples: Samples
) -> tuple[dict[str, float], list[dict]]:
    """The metrics and rows of one fit, ``"parameters"`` or ``"tokens"``, to the runs ``chosen`` of both models."""
    x_of, metrics, rows = FITS[fit], {}, []
    laws: dict[str, PowerLaw] = {}
    points: dict[str, Points] = {}
    trainings: dict[str, list[PowerLaw]] = {}
    along = any(one.part == "curve" for one in chosen[names[0]])
    for name in names:
        points[name] = [x_of(one) for one in chosen[name]], [one.loss for one in chosen[name]]
        law = laws[name] = law_of(*points[name])
        values = {"a": law.a, "b": law.b, "c": law.c, "first": law.low, "last": law.high, "residual": law.residual}
        metrics |= {f"{fit}_{name}_{key}": value for key, value in values.items()}
        if along:
            trainings[name] = _a_law_each(x_of, names, chosen, name, law_of)
            low, high = _over_pairs([one.b for one in trainings[name]])
        else:
            low, high = exponent_interval(*points[name], form=form)
        if low is not None and high is not None:
            metrics |= {f"{fit}_{name}_b_low": low, f"{fit}_{name}_b_high": high}
        rows += [{"fit": fit, **one.to_dict(), "fitted": law.loss(x_of(one))} for one in chosen[name]]

    def interval(name: str, x: float) -> Ends:
        """That of the ratio at ``x``, where the curve of ``name`` gives the loss."""
        other = names[1] if name == names[0] else names[0]
        if along:
            return _over_pairs([
                _ratio(name == names[0], x, theirs.inverse(mine.loss(x)))
                for mine, theirs in zip(trainings[name], trainings[other], strict=True)
            ])  # fmt: skip
        ends = match_interval(points[name], points[other], x, form=form)
        if None in ends:
            return None, None
        low, high = sorted(_ratio(name == names[0], x, end) for end in ends if end is not None)
        return low, high

    matches = [(name, x) for name in names for x in sorted({x_of(one) for one in chosen[name]})]
    matched = samples.rows(
        f"{fit} matches",
        matches,
        lambda batch: [_match(fit, name, x, names, laws, interval) for name, x in batch],
    )
    rows += matched
    for name, side in zip(names, ("ours", "reference"), strict=True):
        found = [row for row in matched if row["measured"] == name and row["ratio"] is not None]
        within = [row for row in found if not row["extrapolated"]]
        if found:
            best = (within or found)[-1]
            key = f"{fit}_ratio_from_{side}" + ("" if within else "_extrapolated")
            metrics[key] = best["ratio"]
            metrics[f"{key}_at"] = best["at"]
            if best["low"] is not None:
                metrics |= {f"{key}_low": best["low"], f"{key}_high": best["high"]}
    return metrics, rows


def _a_law_each(x_of, names, chosen, name: str, law_of: Fit) -> list[PowerLaw]:
    """Fit the curve of each training that both models have.

    Points of one curve are not independent, so the interval needs several trainings.
    """
    shared = {one.pair for one in chosen[names[0]]} & {one.pair for one in chosen[names[1]]} - {""}
    curves = [[one for one in chosen[name] if one.pair == pair] for pair in sorted(shared)]
    if len(curves) < SEEDS_FOR_AN_INTERVAL:
        return []
    return [law_of([x_of(p) for p in curve], [p.loss for p in curve]) for curve in curves]


def _over_pairs(values: Sequence[float]) -> Ends:
    """Student's 95 % interval of the mean over trainings."""
    if len(values) < SEEDS_FOR_AN_INTERVAL or not np.isfinite(values).all():
        return None, None
    found = over_seeds(values)
    return found.low, found.high


def _match(
    fit: str, name: str, x: float, names: tuple[str, str], laws: dict, interval: Callable[[str, float], Ends]
) -> dict:
    """The size at which the other model's curve has the same loss as the curve of ``name`` at ``x``."""
    other = names[1] if name == names[0] else names[0]
    there = laws[other].inverse(laws[name].loss(x))
    row: dict = {"fit": fit, "measured": name, "at": x, "loss": laws[name].loss(x), "ratio": None, "low": None}
    row |= {"matched": None, "high": None, "extrapolated": not laws[other].covers(there)}
    if np.isfinite(there):
        row |= {"matched": there, "ratio": _ratio(name == names[0], x, there)}
        row["low"], row["high"] = interval(name, x)
    return row


def _ratio(ours: bool, x: float, there: float) -> float:
    """Our size over the reference's at equal loss, where ``ours`` says whether ``x`` is our size."""
    return x / there if ours else there / x


def _choose(runs: Sequence[Run], names: tuple[str, str], fit: str, needed: int) -> dict[str, list[Run]] | str:
    """The runs of a fit, which differ only in its x; or the reason why there are none, as text.

    A fit against parameters uses finished runs with equal tokens. A fit against tokens uses runs of one size (the two
    models' sizes differ slightly, by lambda and the head norm): points of training curves if there are any, else
    finished runs. Of several groups, the one with the most values of x is used; of those, the one with the largest
    models or the most tokens.
    """
    groups: list[tuple[int, float, dict[str, list[Run]]]] = []
    part = "curve" if fit == "tokens" and all(_of(runs, n, "curve") for n in names) else "final"
    pools = {name: _of(runs, name, part) for name in names}
    fixed = (lambda one: one.tokens) if fit == "parameters" else (lambda one: one.parameters)
    slack = 1e-9 if fit == "parameters" else 0.1
    for anchor in sorted({fixed(one) for one in pools[names[1]]}):
        nearest = min((fixed(one) for one in pools[names[0]]), key=lambda v: abs(v - anchor), default=0.0)
        if abs(nearest - anchor) > slack * anchor:
            continue
        group = {
            names[1]: [one for one in pools[names[1]] if fixed(one) == anchor],
            names[0]: [one for one in pools[names[0]] if fixed(one) == nearest],
        }
        sizes = min(len({FITS[fit](one) for one in found}) for found in group.values())
        groups.append((sizes, anchor, group))
    best = max(groups, key=lambda g: g[:2], default=(0, 0.0, {}))
    if best[0] < needed:
        alike = "tokens" if fit == "parameters" else "parameters"
        return (
            f"Loss against {fit}: both models need runs at {needed} values or more of {fit} and equal {alike}; "
            f"there are {best[0]}."
        )
    return best[2]


def _rises(fit: str, name: str, runs: list[Run]) -> list[str]:
    """A warning if a model's mean loss rises from one x to the next: noise, or runs that are not comparable."""
    x_of = FITS[fit]
    sizes = sorted({x_of(one) for one in runs})
    means = [float(np.mean([one.loss for one in runs if x_of(one) == x])) for x in sizes]
    places = [i for i in range(1, len(means)) if means[i] > means[i - 1]]
    if not places:
        return []
    at, steps = places[0], len(means) - 1
    return [
        f"The loss of {name} rises at {len(places)} of {steps} steps in {fit}, first from {means[at - 1]:.4g} to "
        f"{means[at]:.4g} between {sizes[at - 1]:.3g} and {sizes[at]:.3g}."
    ]


def _of(runs: Sequence[Run], name: str, part: str) -> list[Run]:
    return [one for one in runs if one.model == name and one.part == part]


def synthetic_runs() -> list[Run]:
    """A made-up table with the paper's sizes. DIFF needs exactly 62.2 % of the parameters and 63.7 % of the tokens for
    the Transformer's loss. The table checks the fit; its losses come from no model."""
    runs: list[Run] = []
    for name, share in (("softmax", (1.0, 1.0)), ("diff", (0.622, 0.637))):
        for size in (0.83e9, 1.4e9, 2.8e9, 6.8e9, 13.1e9):
            runs.append(Run(name, size, 10e9, 1.8 + 300 * (size / share[0]) ** -0.28))
        for tokens in range(40, 361, 40):
            runs.append(Run(name, 3e9, tokens * 1e9, 1.7 + 500 * (tokens * 1e9 / share[1]) ** -0.27))
    return runs
