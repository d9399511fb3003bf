"""Charts: panels of data, drawn by one function as declarative Altair charts, and as SVG without a browser.

Colours are CSS variables, so that one drawing serves light and dark pages; each side has its colour, mark and dashes on
the whole page.
"""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from markupsafe import Markup

from diff_transformer.lab.sides import name_of
from diff_transformer.lab.stats import average
from diff_transformer.lab.verdicts import Outcome, Verdicts

alt.data_transformers.disable_max_rows()

WIDE, NARROW = 1140, 350  # pixels
COLOURS = [f"var(--s{i})" for i in range(8)]
MARKS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-right", "triangle-left"]
DASHES = [[1, 0], [7, 3], [2, 3], [11, 3, 2, 3], [4, 3], [14, 4], [7, 2, 2, 2], [3, 1]]
_CHANNELS: dict[str, tuple[Any, list]] = {
    "color": (alt.Color, COLOURS), "shape": (alt.Shape, MARKS), "strokeDash": (alt.StrokeDash, DASHES),
}  # fmt: skip
THEME = {
    "background": "transparent", "view": {"stroke": None}, "font": "system-ui, sans-serif", "padding": 2,
    "axisQuantitative": {"labelFlush": True},
    "axis": {"labelColor": "var(--muted)", "titleColor": "var(--muted)", "titleFontWeight": "normal",
             "labelFontSize": 11, "gridColor": "var(--rule)", "domainColor": "var(--rule)",
             "tickColor": "var(--rule)"},
    "axisYBand": {"labelColor": "var(--ink)", "labelFontSize": 12.5},
    "title": {"color": "var(--ink)", "anchor": "start", "fontSize": 12.5, "fontWeight": 600},
}  # fmt: skip

Sides = dict[str, str]  # side -> what readers see; its place decides colour, mark and dashes


@dataclass(frozen=True)
class Panel:
    """``y`` over ``x`` of ``frame``, which has columns side and seed.

    Attributes:
        kind: "dots", averages with 95 % intervals, or "curve", a line a seed and a thick one for their mean.
        joined: connect dots by a line; put a mark at each point of a curve.
        log: logarithmic y axis.
        domain: of the y axis.
    """

    title: str
    frame: pd.DataFrame = field(repr=False)
    y: str
    x: str
    kind: str = "dots"
    joined: bool = False
    log: bool = False
    domain: tuple[float, float] | None = None


def _chart(frame: pd.DataFrame) -> Any:
    return alt.Chart(frame)


def by_side(sides: Sides, *channels: str) -> dict[str, Any]:
    """The channels that tell sides apart."""
    made = {}
    for name in channels:
        channel, values = _CHANNELS[name]
        used = [value for value, _ in zip(itertools.cycle(values), sides, strict=False)]
        made[name] = channel("name:N", legend=None, scale=alt.Scale(domain=list(sides.values()), range=used))
    return made


def averages(panel: Panel, sides: Sides) -> pd.DataFrame:
    """Mean, 95 % interval, examples and seeds of each x and side of a panel."""
    made = []
    for key, of in panel.frame.groupby(["side", panel.x], sort=False):
        side, x = key  # ty: ignore[not-iterable]
        by_seed = [values.to_numpy(float) for _, values in of.groupby("seed")[panel.y]]
        found = average(by_seed, proportion=panel.y == "score")
        name, place = sides[side], f"{x:g}" if isinstance(x, float) else str(x)
        words = f"{name}, {place}: {found.mean:.4g} ({found.low:.4g} to {found.high:.4g}, n {found.examples})"
        made.append({
            "panel": panel.title, "name": name, "x": place, "mean": found.mean, "low": found.low, "high": found.high,
            "n": found.examples, "seeds": found.seeds, "words": words,
        })  # fmt: skip
    columns = ["panel", "name", "x", "mean", "low", "high", "n", "seeds", "words"]
    return pd.DataFrame(made, columns=columns).dropna(subset=["mean"])


def numbers(panels: Sequence[Panel], sides: Sides) -> pd.DataFrame:
    """What the panels show, as a table; of a curve its last point."""
    parts = []
    for panel in panels:
        if panel.kind == "curve":
            last = panel.frame.dropna(subset=[panel.y]).sort_values(panel.x).groupby(["side", "seed"]).tail(1)
            panel = Panel(f"{panel.title}, at the end", last, panel.y, panel.x)
        parts.append(averages(panel, sides))
    return pd.concat(parts)[["panel", "name", "x", "mean", "low", "high", "n", "seeds"]]


def draw(panels: Sequence[Panel], sides: Sides, width: float, columns: int) -> Any:
    """The panels in a grid; ``width`` is that of a panel's plot, in pixels."""
    drawn = [
        (_curve if panel.kind == "curve" else _dots)(panel, sides).properties(width=width, height=190)
        for panel in panels
    ]
    return alt.concat(*drawn, columns=columns, spacing=26)


def _dots(panel: Panel, sides: Sides) -> Any:
    frame, names = averages(panel, sides), list(sides.values())
    places = list(dict.fromkeys(frame["x"]))
    beside = [(names.index(name) - (len(names) - 1) / 2) * 0.7 / len(names) for name in frame["name"]]
    frame["at"] = [places.index(x) + by for x, by in zip(frame["x"], beside, strict=True)]
    axis = alt.Axis(
        values=list(range(len(places))), labelExpr=f"{json.dumps(places)}[datum.value]", grid=False, labelOverlap=True
    )
    x = alt.X("at:Q", title=panel.x, axis=axis, scale=alt.Scale(domain=[-0.5, len(places) - 0.5], nice=False))
    base = _chart(frame).encode(x=x, **by_side(sides, "color"))
    log = panel.log and bool((frame["mean"] > 0).all())
    scale = alt.Scale(type="log", nice=False, padding=8) if log else alt.Scale(zero=False, padding=6)
    y = alt.Y("mean:Q", title=None, scale=scale, axis=alt.Axis(format="~g", tickCount=4) if log else alt.Axis())
    points = base.mark_point(filled=True, size=46, opacity=1)
    layers: list[Any] = [
        base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", scale=scale, title=None), y2="high:Q"),
        points.encode(y=y, description="words:N", **by_side(sides, "shape")),
    ]
    layers += [base.mark_line(strokeWidth=1, opacity=0.5).encode(y=y)] if panel.joined else []
    counts = sorted(set(frame["n"]))
    n = f"{counts[0]:,}{f' to {counts[-1]:,}' if counts[1:] else ''}" if counts else "0"
    return alt.layer(*layers).properties(title=f"{panel.title} (n {n})")


def _curve(panel: Panel, sides: Sides) -> Any:
    """A line a side: thin ones for its seeds, a thick one for their mean as far as every seed goes."""
    frame = panel.frame.dropna(subset=[panel.y]).assign(name=lambda of: of["side"].map(sides))
    frame = frame.rename(columns={panel.x: "x", panel.y: "y"})[["name", "seed", "x", "y"]]
    seeds = frame.groupby("name")["seed"].nunique()
    mean = frame.groupby(["name", "x"], as_index=False).agg(y=("y", "mean"), seeds=("y", "size"))
    mean = mean[mean["seeds"] == mean["name"].map(seeds)]
    words = zip(mean["name"], mean["x"], mean["y"], strict=True)
    mean = mean.assign(words=[f"{name}, {panel.x} {x:g}: {y:.4g}" for name, x, y in words])
    scale = alt.Scale(zero=False, domain=panel.domain or alt.Undefined, type="log" if panel.log else "linear")
    shared = {
        "x": alt.X("x:Q", title=panel.x, axis=alt.Axis(tickCount=5, format=",.0f")),
        "y": alt.Y("y:Q", title=None, axis=alt.Axis(format="~g", tickCount=5), scale=scale),
        **by_side(sides, "color"),
    }
    lines = _chart(mean).mark_line(strokeWidth=2, clip=True)
    layers: list[Any] = [lines.encode(**by_side(sides, "strokeDash"), **shared)]
    if len(seeds) and seeds.max() > 1:
        thin = _chart(frame).mark_line(strokeWidth=0.8, opacity=0.35, clip=True)
        layers.append(thin.encode(detail="seed:N", **shared))
    marks = mean if panel.joined else mean[mean.groupby("name")["x"].transform("max") == mean["x"]]
    points = _chart(marks).mark_point(filled=True, size=34, opacity=1, clip=True)
    layers.append(points.encode(description="words:N", **by_side(sides, "shape"), **shared))
    return alt.layer(*layers).properties(title=panel.title)


def forest(verdicts: Verdicts, sides: Sides, width: float, narrow: bool) -> Any:
    """All claims on one axis, as claimed to the right.

    A difference is in points of 100 where the quantity is a share, else relative to the other side; the axis is its
    square root, so that small ones show.
    """
    frame = pd.DataFrame([_forest_row(v, sides) for of in verdicts.values() for v in of.values()])
    order = list(frame["claim"].unique())
    reach = max(0.02, *frame[["mean", "low", "high"]].astype(float).abs().max().fillna(0))
    ticks = [tick for tick in (-1, -0.5, -0.1, -0.01, 0, 0.01, 0.1, 0.5, 1) if abs(tick) <= reach * 1.05]
    label = "datum.value ? format(datum.value, '+.0%') : '0'"
    scale = alt.Scale(type="pow", exponent=0.5, domain=[-reach, reach])
    axis = alt.Axis(values=ticks, labelExpr=label, labelOverlap=True)
    x = alt.X("mean:Q", title="against the claim ← · → as claimed", scale=scale, axis=axis)
    names = None if narrow else alt.Axis(labelLimit=400, minExtent=370, ticks=False, domain=False, grid=True)
    y = alt.Y("claim:N", sort=order, title=None, axis=names, scale=alt.Scale(paddingInner=0.55 if narrow else 0.2))
    offset = alt.YOffset("name:N", sort=list(frame["name"].unique()))
    base = _chart(frame).encode(y=y, yOffset=offset, **by_side(sides, "color"))
    fill = alt.condition("datum.decided", by_side(sides, "color")["color"], alt.value("var(--bg)"))
    zero = _chart(pd.DataFrame({"x": [0]})).mark_rule(strokeDash=[3, 3], color="var(--muted)")
    points = base.mark_point(size=56, opacity=1, strokeWidth=1.6)
    layers: list[Any] = [
        zero.encode(x="x:Q"),
        base.mark_rule(strokeWidth=1.8).encode(x=alt.X("low:Q"), x2="high:Q"),
        points.encode(x=x, description="words:N", fill=fill, **by_side(sides, "shape")),
    ]
    if narrow:
        words = _chart(frame.drop_duplicates("claim")).mark_text(align="left", dy=-19, fontSize=12)
        layers.append(words.encode(y=y, x=alt.value(0), text="claim:N", color=alt.value("var(--ink)")))
    return alt.layer(*layers).properties(width=width, height=len(order) * (44 if narrow else 23))


def _forest_row(verdict: Any, sides: Sides) -> dict[str, Any]:
    difference, quantity = verdict.difference, verdict.quantity
    sign = 1 if quantity.better == "higher" else -1
    points = quantity.relative or quantity.unit in ("accuracy", "share")
    scale = 1.0 if points else abs(verdict.here[0]) or math.nan
    ends = (difference.mean, difference.low, difference.high)
    mean, low, high = (None if end is None else float(np.clip(sign * end / scale, -1, 1)) for end in ends)
    claim = f"{quantity.claim}{' (not the paper’s)' if quantity.ours else ''}"
    words = f"{claim}: {difference.mean:+.4g} against the {sides[verdict.other]}"
    decided = verdict.outcome != Outcome.UNDECIDED
    return {
        "claim": claim, "name": sides[verdict.other], "mean": mean, "low": low, "high": high, "decided": decided,
        "words": words,
    }  # fmt: skip


def svg(chart: Any, prefix: str = "") -> Markup:
    """The drawing for a page. ``prefix`` makes its identifiers unique there."""
    import vl_convert

    text = vl_convert.vegalite_to_svg(chart.to_dict(), config=THEME)
    text = re.sub(r' (?:d|transform|[xy]2?)="[^"]+"', lambda at: re.sub(r"(\.\d)\d+", r"\1", at[0]), text)
    return Markup(re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{prefix}-", text))


PALETTE = {  # of pictures outside a page
    "--bg": "#ffffff", "--ink": "#1b1f24", "--muted": "#59616b", "--rule": "#e3e5e8", "--s0": "#0b62b8",
    "--s1": "#b8500a", "--s2": "#08705f", "--s3": "#8a2fa0", "--s4": "#776000", "--s5": "#b0243f", "--s6": "#4a5563",
    "--s7": "#3a741d",
}  # fmt: skip


def picture(panels: Sequence[Panel], sides: Sides, columns: int = 3) -> str:
    """An SVG file of panels with a legend, in the light colours of the page."""
    drawn = draw(panels, sides, WIDE / max(columns, 2) - 70, columns)
    legend = pd.DataFrame({"name": list(sides.values()), "x": 0})
    keys = _chart(legend).mark_point(filled=True, size=60, opacity=1)
    axis = alt.Axis(orient="right", title=None, ticks=False, domain=False, labelLimit=400)
    keys = keys.encode(
        y=alt.Y("name:N", sort=None, axis=axis), x=alt.X("x:Q", axis=None), **by_side(sides, "color", "shape")
    )
    text = str(svg(alt.vconcat(drawn, keys.properties(width=10, height=18 * len(sides)))))
    text = re.sub(r"var\((--\w+)\)", lambda at: PALETTE[at[1]], text)
    return text.replace("<svg ", '<svg style="background:#ffffff" ', 1)


def names_of(sides: Sequence[str]) -> Sides:
    """Names of the sides, in their order."""
    return {side: name_of(side) for side in sides}
