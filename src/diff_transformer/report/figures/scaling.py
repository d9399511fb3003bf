"""Power laws of the loss in parameters and tokens, and the share of each that DIFF needs for the Transformer's loss."""

import re

from diff_transformer.lab.paper import SAID
from diff_transformer.report.charts import NAMES, Line, line_chart
from diff_transformer.report.figure import Figure, Finding, key, legend, panels
from diff_transformer.report.markup import Html, is_number, join, number, short, table, tag
from diff_transformer.report.models import Results, Series, legend_of, models_in
from diff_transformer.report.render import Chart, panel

EVAL = "scaling"
FITS = {"parameters": "Loss against parameters", "tokens": "Loss against training tokens"}
LAW = re.compile(r"(parameters|tokens)_(.+)_a")
_POINTS = 40  # of a drawn curve


def build(results: Results) -> Figure | None:
    """A panel for each fit: the runs, both curves on logarithmic axes, and the level at which they are compared."""
    tables = [one for one in models_in(results, EVAL) if _laws(one)]
    if not tables:
        return None
    shown = []
    for one in tables:
        drawn = [
            panel(f"{title}, nats per token", _chart(one, fit), _matched(one, fit))
            for fit, title in FITS.items()
            if any(which == fit for which, _ in _laws(one))
        ]
        shown.append(join([tag("h3", one.label) if len(tables) > 1 else None, panels(*drawn)]))
    pair = {name for one in tables for _, name in _laws(one)} <= set(NAMES)
    names = [Series(_side(one, name), _name(name), None) for one in tables[:1] for name in _models(one)]
    note = key("dashed", "the loss at which sizes are compared")
    return Figure(
        id="scaling",
        title="Scaling",
        source=("Fig. 3",),
        read="Each mark is a run. Each line is a power law a x^−b + c fitted to the runs of one model. Both axes "
        "are logarithmic. The ratio says what share of the Transformer's size DIFF needs for the same loss: "
        "below 100 %, DIFF needs less.",
        body=join(shown) + (legend(note) if pair else legend_of(names, note)),
        findings=[finding for one in tables for finding in _findings(one)],
        paper=SAID["scaling"],
        data=join([_data(one) for one in tables]),
    )


def _laws(one: Series) -> list[tuple[str, str]]:
    """(fit, model) of every law with all three parameters and its range."""
    found = [(m[1], m[2]) for m in map(LAW.fullmatch, one.names()) if m]
    return [law for law in found if None not in _law(one, *law)]


def _law(one: Series, fit: str, name: str) -> list[float | None]:
    return [one.mean(f"{fit}_{name}_{part}") for part in ("a", "b", "c", "first", "last")]


def _models(one: Series) -> list[str]:
    return list(dict.fromkeys(name for _, name in _laws(one)))


def _side(one: Series, name: str) -> str:
    return name if name in NAMES else f"s{_models(one).index(name) % 6 + 1}"


def _name(name: str) -> str:
    return NAMES.get(name, name)


def _chart(one: Series, fit: str) -> Chart:
    lines = []
    for which, name in _laws(one):
        if which != fit:
            continue
        a, b, c, first, last = (value or 0.0 for value in _law(one, fit, name))
        steps = [first * (last / first) ** (i / (_POINTS - 1)) for i in range(_POINTS)] if last > first else [first]
        lines.append(Line(_name(name), [(x, a * x**-b + c) for x in steps], _side(one, name)))
        points = [
            (float(row[fit]), float(row["loss"]))
            for row in one.rows()
            if row.get("fit") == fit and row.get("model") == name and is_number(row.get(fit)) and is_number(row["loss"])
        ]
        if points:
            lines.append(Line(_name(name), points, _side(one, name), marks=True, read=True, joined=False))
    level = _level(one, fit)
    return line_chart(
        f"{FITS[fit]}, with power laws",
        lines,
        x_label=f"{fit}, log axis",
        x_name=f"{fit}:",
        log_x=True,
        log_y=True,
        guides=[(level, "")] if level is not None else [],
    )


def _level(one: Series, fit: str) -> float | None:
    """The loss at which the headline ratio compares."""
    for side in ("ours", "reference"):
        at, ratio = (one.mean(f"{fit}_ratio_from_{side}{end}") for end in ("_at", ""))
        for row in one.rows():
            if ratio is not None and (row.get("fit"), row.get("at"), row.get("ratio")) == (fit, at, ratio):
                return float(row["loss"])
    return None


def _matched(one: Series, fit: str) -> str:
    """The headline ratio in words."""
    ratio = next((r for side in ("ours", "reference") if (r := one.mean(f"{fit}_ratio_from_{side}")) is not None), None)
    ours, reference = (_name(name) for name in _pair(one))
    return "" if ratio is None else f"{ours} needs {_share(ratio)} of the {fit} for the same loss as {reference}."


def _pair(one: Series) -> tuple[str, str]:
    """Names of the compared model and of the reference model."""
    said = one.parts[0].provenance
    return str(said.get("ours", "diff")), str(said.get("reference", "softmax"))


def _findings(one: Series) -> list[Finding | None]:
    said: list[Finding | None] = []
    settings = [part.provenance for part in one.parts]
    if _synthetic(one):
        said.append(Finding("alarm", "These runs are made up: they check the fit and say nothing of any model."))
    for fit in FITS:
        for side, name in zip(("ours", "reference"), _pair(one), strict=True):
            said += [_ratio(one, fit, f"{fit}_ratio_from_{side}{end}", _name(name)) for end in ("", "_extrapolated")]
    said += [Finding("note", str(words)) for entry in settings for words in entry.get("notes") or []]
    return said


def _ratio(one: Series, fit: str, metric: str, name: str) -> Finding | None:
    ratio, at = one.mean(metric), one.mean(f"{metric}_at")
    if ratio is None:
        return None
    low, high = one.mean(f"{metric}_low"), one.mean(f"{metric}_high")
    words = "no interval" if low is None else f"95 % CI {_share(low)} to {_share(high)}"
    beyond = metric.endswith("_extrapolated")
    text = f"{fit.capitalize()} for the same loss: {_share(ratio)} ({words}), at the run of {name} with {short(at)}"
    return Finding(_outcome(one, low, high), text + (" (beyond the other's runs)." if beyond else "."), weak=beyond)


def _synthetic(one: Series) -> bool:
    return any(part.provenance.get("synthetic") for part in one.parts)


def _outcome(one: Series, low: float | None, high: float | None) -> str:
    """Which model is ahead if the whole interval is on one side of 1; only for the paper's pair."""
    if low is None or high is None or set(_models(one)) != set(NAMES) or _synthetic(one):
        return "note"
    return "diff" if high < 1 else "softmax" if low > 1 else "level"


def _share(value: float | None) -> str:
    return f"{number(None if value is None else 100 * value, 1)} %"


def _data(one: Series) -> Html:
    head: list[object] = [one.label, "a", "b", "b, 95 %", "c", "from", "to"]
    laws: list[list[object]] = []
    for fit, name in _laws(one):
        a, b, c, first, last = _law(one, fit, name)
        ends = [number(one.mean(f"{fit}_{name}_b_{end}")) for end in ("low", "high")]
        laws.append(
            [f"{_name(name)}, {fit}", number(a), number(b), " to ".join(ends), number(c), short(first), short(last)]
        )
    runs: list[list[object]] = [
        [
            _name(str(row.get("model"))),
            *(short(row.get(k)) for k in FITS),
            number(row.get("loss"), 4),
            row.get("part", ""),
        ]
        for row in one.rows()
        if "model" in row
    ]
    shown = [table(head, laws, "Power laws")]
    if runs:
        shown.append(table(["run", "parameters", "tokens", "loss", "part"], runs[:200], "Runs"))
    return join(shown)
