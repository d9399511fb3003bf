"""Charts: panels of data as Vega-Lite specifications, drawn as SVG without a browser.

Colours are CSS variables, so that one drawing serves light and dark pages; each side has its colour, mark and dashes on
the whole page.
"""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from diff_transformer.lab.sides import name_of
from diff_transformer.lab.stats import average
from diff_transformer.lab.verdicts import Outcome, Verdicts

WIDE, NARROW = 1140, 350  # pixels
COLOURS = [f"var(--s{i})" for i in range(8)]
MARKS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-right", "triangle-left"]
DASHES = [[1, 0], [7, 3], [2, 3], [11, 3, 2, 3], [4, 3], [14, 4], [7, 2, 2, 2], [3, 1]]
_CHANNELS = {"color": COLOURS, "shape": MARKS, "strokeDash": DASHES}
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
Spec = dict[str, Any]  # of Vega-Lite
NUMBERS = ("mean", "low", "high", "n", "seeds")


@dataclass(frozen=True)
class Panel:
    """``y`` over ``x`` of ``frame``, which has columns side and seed.

    Attributes:
        kind: "dots", averages with 95 % intervals; "curve", a line a seed and a thick one for their mean; or "heads", a
            square for each ``layer`` and ``head`` of one side, as dark as its mean.
        joined: connect dots by a line; put a mark at each point of a curve.
        log: logarithmic y axis of dots.
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

    @cached_property
    def averages(self) -> pd.DataFrame:
        """Mean, 95 % interval, examples and seeds of each x and side."""
        marks = []
        for key, of in self.frame.groupby(["side", self.x], sort=False):
            side, x = key  # ty: ignore[not-iterable]
            unit = [name for name in ("seed", "data_seed", "example") if name in of and of[name].notna().all()]
            examples = of.assign(**{self.y: of[self.y].astype(float)}).groupby(unit)[self.y].mean()  # of several rows
            by_seed = [values.to_numpy() for _, values in examples.groupby(level="seed")]
            found = average(by_seed, proportion=self.y in ("score", "share"))
            place = f"{x:g}" if isinstance(x, float) else str(x)
            numbers = (found.mean, found.low, found.high, found.examples, found.seeds)
            marks.append((self.title, side, place, *numbers))
        return pd.DataFrame(marks, columns=["panel", "side", "x", *NUMBERS]).dropna(subset=["mean"])


def _layers(frame: pd.DataFrame, *layers: Spec, **more: Any) -> Spec:
    """Layers of one table."""
    return {
        "data": {"values": json.loads(frame.to_json(orient="records", double_precision=15) or "[]")},
        "layer": [*layers],
        **more,
    }


def _mark(type: str, encoding: Spec, **properties: Any) -> Spec:
    return {"mark": {"type": type, **properties}, "encoding": encoding}


def _by(field: str, type: str = "quantitative", **properties: Any) -> Spec:
    return {"field": field, "type": type, **properties}


def by_side(sides: Sides, *channels: str) -> Spec:
    """The channels that tell sides apart."""
    merged = {}
    for name in channels:
        used = [value for value, _ in zip(itertools.cycle(_CHANNELS[name]), sides, strict=False)]
        merged[name] = _by("name", "nominal", legend=None, scale={"domain": list(sides.values()), "range": used})
    return merged


def numbers(panels: Sequence[Panel], sides: Sides) -> pd.DataFrame:
    """The values of the panels as a table; of a curve its last point."""
    parts = []
    for panel in panels:
        if panel.kind == "curve":
            last = panel.frame.dropna(subset=[panel.y]).sort_values(panel.x).groupby(["side", "seed"]).tail(1)
            panel = Panel(f"{panel.title}, at the end", last, panel.y, panel.x)
        parts.append(panel.averages.assign(name=lambda of: of["side"].map(sides)))
    return pd.concat(parts)[["panel", "name", "x", *NUMBERS]]


def draw(panels: Sequence[Panel], sides: Sides, width: float, columns: int) -> Spec:
    """The panels in a grid; ``width`` is that of a panel's plot, in pixels."""
    ways = {"dots": _dots, "curve": _curve, "heads": _heads}
    drawn = [{**ways[panel.kind](panel, sides), "width": width, "height": 190} for panel in panels]
    shades = {"scale": {"opacity": "independent"}}
    return {"concat": drawn, "columns": columns, "spacing": 26, "resolve": shades}


def _dots(panel: Panel, sides: Sides) -> Spec:
    frame, names = panel.averages.assign(name=lambda of: of["side"].map(sides)), list(sides.values())
    columns = (frame[name] for name in ("name", "x", "mean", "low", "high", "n"))
    words = "{}, {}: {:.4g} ({:.4g} to {:.4g}, n {})"
    frame["words"] = [words.format(*values) for values in zip(*columns, strict=True)]
    places = list(dict.fromkeys(frame["x"]))
    if pd.api.types.is_numeric_dtype(panel.frame[panel.x]):  # models may have been measured at other places
        places.sort(key=float)
    beside = [(names.index(name) - (len(names) - 1) / 2) * 0.7 / len(names) for name in frame["name"]]
    frame["at"] = [places.index(x) + by for x, by in zip(frame["x"], beside, strict=True)]
    axis = {
        "values": list(range(len(places))), "labelExpr": f"{json.dumps(places)}[datum.value]", "grid": False,
        "labelOverlap": True,
    }  # fmt: skip
    x = _by("at", title=panel.x, axis=axis, scale={"domain": [-0.5, len(places) - 0.5], "nice": False})
    base = {"x": x, **by_side(sides, "color")}
    log = panel.log and bool((frame["mean"] > 0).all())
    if log:  # an interval that reaches 0 ends at the edge
        frame["low"] = frame["low"].clip(lower=frame["mean"].min() / 10)
    scale = {"type": "log", "nice": False, "padding": 8} if log else {"zero": False, "padding": 6}
    y = _by("mean", title=None, scale=scale, axis={"format": "~g", "tickCount": 4} if log else {})
    ends = {"y": _by("low", scale=scale, title=None), "y2": {"field": "high"}}
    points = {"y": y, "description": _by("words", "nominal"), **by_side(sides, "shape")}
    layers = [
        _mark("rule", base | ends, strokeWidth=1.5),
        _mark("point", base | points, filled=True, size=46, opacity=1),
    ]
    layers += [_mark("line", {**base, "y": y}, strokeWidth=1, opacity=0.5)] if panel.joined else []
    counts = sorted(set(frame["n"]))
    n = f"{counts[0]:,}{f' to {counts[-1]:,}' if counts[1:] else ''}" if counts else "0"
    return _layers(frame, *layers, title=f"{panel.title} (n {n})")


def _heads(panel: Panel, sides: Sides) -> Spec:
    mean = panel.frame.groupby(["layer", "head"], as_index=False)[panel.y].mean()
    low, high = mean[panel.y].min(), mean[panel.y].max()
    words = zip(mean["layer"], mean["head"], mean[panel.y], strict=True)
    mean["words"] = [f"layer {layer:g}, head {head:g}: {value:.4g}" for layer, head, value in words]
    encoding = {
        "x": _by("head", "ordinal", title="head", axis={"labelAngle": 0, "labelOverlap": True}),
        "y": _by("layer", "ordinal", title="layer", sort="descending"),
        "opacity": _by(panel.y, legend=None, scale={"range": [0.04, 1], "zero": False}),
        "color": {"value": COLOURS[list(sides).index(panel.frame["side"].iloc[0]) % len(COLOURS)]},
        "description": _by("words", "nominal"),
    }
    return _layers(mean, _mark("rect", encoding), title=f"{panel.title} ({low:.2g} to {high:.2g})")


def _curve(panel: Panel, sides: Sides) -> Spec:
    """A line a side: thin ones for its seeds, a thick one for their mean as far as every seed goes."""
    frame = panel.frame.dropna(subset=[panel.y]).assign(name=lambda of: of["side"].map(sides))
    frame = frame.rename(columns={panel.x: "x", panel.y: "y"})[["name", "seed", "x", "y"]]
    seeds = frame.groupby("name")["seed"].nunique()
    mean = frame.groupby(["name", "x"], as_index=False).agg(y=("y", "mean"), seeds=("seed", "nunique"))
    mean = mean[mean["seeds"] == mean["name"].map(seeds)]
    words = zip(mean["name"], mean["x"], mean["y"], strict=True)
    mean = mean.assign(words=[f"{name}, {panel.x} {x:g}: {y:.4g}" for name, x, y in words])
    scale: Spec = {"zero": False, **({"domain": [*panel.domain]} if panel.domain else {})}
    shared = {
        "x": _by("x", title=panel.x, axis={"tickCount": 5, "format": ",.0f"}),
        "y": _by("y", title=None, axis={"format": "~g", "tickCount": 5}, scale=scale),
        **by_side(sides, "color"),
    }
    marks = mean if panel.joined else mean[mean.groupby("name")["x"].transform("max") == mean["x"]]
    named = {"description": _by("words", "nominal"), **by_side(sides, "shape"), **shared}
    layers = [
        _layers(mean, _mark("line", by_side(sides, "strokeDash") | shared, strokeWidth=2, clip=True)),
        _layers(marks, _mark("point", named, filled=True, size=34, opacity=1, clip=True)),
    ]
    if len(seeds) and seeds.max() > 1:
        thin = _mark("line", {**shared, "detail": _by("seed")}, strokeWidth=0.8, opacity=0.35, clip=True)
        layers.insert(1, _layers(frame, thin))
    return {"layer": layers, "title": panel.title}


def forest(verdicts: Verdicts, sides: Sides, width: float, narrow: bool) -> Spec:
    """All claims on one axis, as claimed to the right.

    A difference is in points of 100 where the quantity is a share, else relative to the other side; the axis is its
    square root, so that small ones show.
    """
    frame = pd.DataFrame([_forest_row(v, sides) for of in verdicts.values() for v in of.values()])
    order = list(frame["claim"].unique())
    reach = max(0.02, *frame[["mean", "low", "high"]].astype(float).abs().max().fillna(0))
    ticks = [tick for tick in (-1, -0.5, -0.1, -0.01, 0, 0.01, 0.1, 0.5, 1) if abs(tick) <= reach * 1.05]
    label = "datum.value ? format(datum.value, '+.0%') : '0'"
    scale = {"type": "pow", "exponent": 0.5, "domain": [-reach, reach]}
    axis = {"values": ticks, "labelExpr": label, "labelOverlap": True}
    x = _by("mean", title="against the claim ← · → as claimed", scale=scale, axis=axis)
    names = None if narrow else {"labelLimit": 400, "minExtent": 370, "ticks": False, "domain": False, "grid": True}
    y = _by("claim", "nominal", sort=order, title=None, axis=names, scale={"paddingInner": 0.55 if narrow else 0.2})
    offset = _by("name", "nominal", sort=list(frame["name"].unique()))
    base = {"y": y, "yOffset": offset, **by_side(sides, "color")}
    fill = {"condition": {"test": "datum.decided", **base["color"]}, "value": "var(--bg)"}
    zero = _mark("rule", {"x": _by("x")}, strokeDash=[3, 3], color="var(--muted)")
    ends = {"x": _by("low"), "x2": {"field": "high"}}
    points = {"x": x, "description": _by("words", "nominal"), "fill": fill, **by_side(sides, "shape")}
    layers = [
        _layers(pd.DataFrame({"x": [0]}), zero),
        _layers(
            frame,
            _mark("rule", base | ends, strokeWidth=1.8),
            _mark("point", base | points, size=56, opacity=1, strokeWidth=1.6),
        ),
    ]
    if narrow:
        words = {"y": y, "x": {"value": 0}, "text": _by("claim", "nominal"), "color": {"value": "var(--ink)"}}
        text = _mark("text", words, align="left", dy=-19, fontSize=12)
        layers.append(_layers(frame.drop_duplicates("claim"), text))
    return {"layer": layers, "width": width, "height": len(order) * (44 if narrow else 23)}


def _forest_row(verdict: Any, sides: Sides) -> dict[str, Any]:
    difference, quantity = verdict.difference, verdict.quantity
    sign = 1 if quantity.better == "higher" else -1
    points = quantity.relative or quantity.unit in ("accuracy", "share")
    scale = 1.0 if points else abs(verdict.here[0]) or math.nan
    ends = (difference.mean, difference.low, difference.high)
    mean, low, high = (None if end is None else float(np.clip(sign * end / scale, -1, 1)) for end in ends)
    claim = f"{quantity.claim}{' (not the paper’s)' if quantity.ours else ''}"
    words = f"{claim}: {difference.mean:+.4g} against the {sides[verdict.other]}"
    decided = verdict.outcome != Outcome.INCONCLUSIVE
    return {
        "claim": claim, "name": sides[verdict.other], "mean": mean, "low": low, "high": high, "decided": decided,
        "words": words,
    }  # fmt: skip


def svg(chart: Spec, prefix: str = "") -> Markup:
    """The drawing for a page. ``prefix`` makes its identifiers unique there."""
    import vl_convert

    text = vl_convert.vegalite_to_svg(chart, config=THEME)
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
    axis = {"orient": "right", "title": None, "ticks": False, "domain": False, "labelLimit": 400}
    keys = {"y": _by("name", "nominal", sort=None, axis=axis), "x": _by("x", axis=None)} | by_side(
        sides, "color", "shape"
    )
    points = _mark("point", keys, filled=True, size=60, opacity=1)
    legend = _layers(pd.DataFrame({"name": list(sides.values()), "x": 0}), points, width=10, height=18 * len(sides))
    text = str(svg({"vconcat": [drawn, legend]}))
    text = re.sub(r"var\((--\w+)\)", lambda at: PALETTE[at[1]], text)
    return text.replace("<svg ", '<svg style="background:#ffffff" ', 1)


def names_of(sides: Sequence[str]) -> Sides:
    """Names of the sides, in their order; sides of one name have their own behind it."""
    names = [name_of(side) for side in sides]
    return {s: f"{name} ({s})" if names.count(name) > 1 else name for s, name in zip(sides, names, strict=True)}
