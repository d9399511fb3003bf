"""The charts of the report, of figures/ and of docs/, as Vega-Lite specifications (dictionaries, see
https://vega.github.io/vega-lite/docs).

``line_chart``, ``category_chart``, ``row_chart`` and ``heat_map`` each make one; ``grid`` puts several into one.
``render`` draws them. A model is drawn by its ``side``: "diff", "softmax", or "s1" to "s6" for others. The side decides
colour, mark and dashes everywhere. Transparent rectangles, the class ``hit`` in the page, carry the text that page.js
shows on hover, on tap and by the arrow keys.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diff_transformer.lab.sides import PAIR, name_of
from diff_transformer.report import vega
from diff_transformer.report.markup import mean, number, short
from diff_transformer.report.render import Chart

NAMES = {side: name_of(side) for side in PAIR}
WIDTH = 400  # width of a chart; the page scales it to 330 to 520 pixels
Point = tuple[float, float]
BySeed = Mapping[int, float]
_LETTER = 6.6  # largest width of a letter in pixels
_ALONE = ("padding", "autosize")  # keys of a single chart, which a part of a grid must not have


@dataclass(frozen=True)
class Line:
    """A line of a line chart.

    Attributes:
        points: (x, y), with x increasing.
        side: decides colour, mark and dashes; ``colour``, any CSS colour, overrides the side's.
        thin: one seed among several.
        marks: draw a mark at each point; without ``joined``, marks alone.
        read: show its values in the tooltip.
        end_label: text at the right end.
        band: (x, low, high), drawn as an area in the line's colour.
    """

    name: str
    points: list[Point]
    side: str = ""
    thin: bool = False
    marks: bool = False
    read: bool = False
    end_label: str = ""
    colour: str = ""
    joined: bool = True
    band: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Row:
    """A row of a row chart: ``values`` by seed, and ``low`` and ``high``, the ends of an interval."""

    name: str
    side: str
    values: BySeed
    low: float | None = None
    high: float | None = None


def line_chart(
    label: str,
    lines: list[Line],
    *,
    x_label: str,
    x_name: str = "step",
    x_ticks: list[tuple[float, str]] | None = None,
    y_range: tuple[float, float] | None = None,
    digits: int = 3,
    guides: Sequence[tuple[float, str]] = (),
    height: float = 210,
    width: float = WIDTH,
    log_x: bool = False,
    log_y: bool = False,
) -> Chart:
    """A line chart. A logarithmic axis shows only positive values.

    Args:
        label: description of the chart for screen readers.
        x_name: name of x in the tooltip.
        x_ticks: (x, text); by default Vega chooses round numbers.
        y_range: a line that leaves it ends at the frame.
        guides: dashed levels, each with its name.
    """
    lines = [
        replace(line, points=[(x, y) for x, y in line.points if (x > 0 or not log_x) and (y > 0 or not log_y)])
        for line in lines
    ]
    lines = [line for line in lines if line.points]
    xs = sorted({x for line in lines for x, _ in line.points})
    ends = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] * 0.9, xs[0] * 1.1 or 1.0)
    spans = [y for line in lines for _, low, high in line.band for y in (low, high)]
    levels = [level for level, _ in guides]
    low, high = y_range or padded([y for line in lines for _, y in line.points] + spans + levels, log=log_y)
    x = vega.quantitative("x", ends, log=log_x, title=x_label)
    if x_ticks:
        words = vega.tick_label([words for _, words in x_ticks], x_ticks)
        x["axis"] = {"values": [at for at, _ in x_ticks], "labelExpr": words, "labelOverlap": "greedy"}
    y = vega.quantitative("y", (low, high), log=log_y)
    ended = [line for line in lines if line.end_label]
    layers = vega.guides(guides, y)
    for line in sorted(lines, key=lambda line: not line.thin):
        layers += _line(line, x, y)
    if ended:
        layers.append(_end_labels(ended, ends[1], x, y, (high - low) * 15 / height))
    readings = _readings([line for line in lines if line.read], x_name, digits)
    layers += [vega.hits(readings, x=x, x2={"field": "x2"})] if readings else []
    return vega.chart(label, layers, height, width, right=58 if ended else 14)


def _line(line: Line, x: dict, y: dict) -> list[dict]:
    colour = line.colour or vega.colour(line.side)
    data = [{"x": at, "y": value} for at, value in line.points]
    made = []
    if line.band:
        area = [{"x": at, "y": low, "y2": high} for at, low, high in line.band]
        made.append(
            vega.layer(area, {"type": "area", "fill": colour, "opacity": 0.2, "clip": True}, x=x, y=y, y2=vega.Y2)
        )
    if line.joined and len(data) > 1:
        stroke: dict[str, Any] = {"type": "line", "stroke": colour, "clip": True}
        stroke["strokeWidth"] = 1 if line.thin else 2.2
        stroke |= {"opacity": 0.45} if line.thin else {"strokeDash": vega.DASHES.get(vega.style(line.side), [1, 0])}
        made.append(vega.layer(data, stroke, x=x, y=y))
    if line.marks or not line.joined:
        low, high = y["scale"]["domain"]
        data = [point for point in data if low <= point["y"] <= high]
        made.append(vega.layer(data, vega.mark(line.side, 14 if line.thin else 46, colour, faint=line.thin), x=x, y=y))
    return made


def _end_labels(lines: list[Line], right: float, x: dict, y: dict, apart: float) -> dict:
    """Names at the right end, at least ``apart`` from one another."""
    data, floor = [], -math.inf
    for line in sorted(lines, key=lambda line: line.points[-1][1]):
        floor = max(line.points[-1][1], floor + apart)
        data.append({"x": right, "y": floor, "words": line.end_label, "fill": line.colour or vega.colour(line.side)})
    mark = {"type": "text", "align": "left", "dx": 6}
    return vega.layer(data, mark, x=x, y=y, text=vega.TEXT, fill={"field": "fill", "scale": None})


def _readings(lines: list[Line], x_name: str, digits: int) -> list[dict]:
    """For each x: the values of all lines there, and the interval in which this x is the nearest."""
    tables = [(line.name, dict(line.points)) for line in lines]
    xs = sorted({x for _, table in tables for x in table})
    found = []
    for i, at in enumerate(xs):
        head = f"{x_name} {short(at) if at >= 1e6 else number(at, 0 if at == int(at) else None)}"
        said = [f"{name}: {number(table[at], digits)}" for name, table in tables if at in table]
        left = at if i == 0 else (xs[i - 1] + at) / 2
        right = at if i == len(xs) - 1 else (at + xs[i + 1]) / 2
        found.append({"x": left, "x2": right, "tip": "\n".join([head, *said])})
    return found


def category_chart(
    label: str,
    categories: list[str],
    values: Mapping[str, Sequence[BySeed]],
    *,
    x_label: str = "",
    bars: bool = False,
    log: bool = False,
    digits: int | None = 3,
    unit: str = "",
    y_range: tuple[float, float] | None = None,
    guides: Sequence[tuple[float, str]] = (),
    height: float = 210,
    width: float = WIDTH,
    names: Mapping[str, str] = NAMES,
) -> Chart:
    """A chart of named categories. Each shows a model's mean as a bar from 0 or as a mark, and its seeds.

    Args:
        values: side -> for each category, values by seed; an empty one draws nothing.
        names: side -> its name in the tooltip.
    """
    every = [v for by_category in values.values() for seeds in by_category for v in seeds.values()]
    low, high = y_range or padded(every + [level for level, _ in guides], 0.12, zero=bars, log=log)
    room = (width - 60) / len(categories)
    free = 1 - min(0.8 if len(values) > 1 else 0.4, 48 * len(values) / room)
    lines = [wrapped(name, room) for name in categories]
    axis = {"labelExpr": vega.tick_label(lines), "labelOverlap": False, "labelLineHeight": 13}
    band = {"domain": list(range(len(categories))), "paddingInner": free, "paddingOuter": free / 2}
    x = {"field": "place", "type": "ordinal", "title": x_label or None, "scale": band, "axis": axis}
    y = vega.quantitative("y", (low, high), log=log)
    offset = {"field": "side", "type": "nominal", "scale": {"domain": list(values), "paddingInner": 0.1}}
    layers = []
    for side, by_category in values.items():
        for data, mark in _group(side, by_category, bars, max(low, 0.0)):
            layers.append(
                vega.layer(data, mark, x=x, y=y, xOffset=offset, **({"y2": vega.Y2} if "y2" in data[0] else {}))
            )
    tips = []
    for i, name in enumerate(categories):
        said = [_said(names[side], of[i], digits, unit) for side, of in values.items() if of[i]]
        tips.append({"place": i, "tip": "\n".join([name, *said])})
    return vega.chart(label, [*layers, *vega.guides(guides, y), vega.hits(tips, x=x)], height, width)


def _group(side: str, by_category: Sequence[BySeed], bars: bool, zero: float) -> list[tuple[list[dict], dict]]:
    """Data and marks of one model: its bars or means, the range of its seeds, and the seeds."""
    colour, ink = vega.colour(side), "var(--ink)" if bars else vega.colour(side)
    known = [(i, list(seeds.values())) for i, seeds in enumerate(by_category) if seeds]
    several = [(i, found) for i, found in known if len(found) > 1]
    means = [{"place": i, "side": side, "y": mean(found)} for i, found in known]
    each = [{"place": i, "side": side, "y": v} for i, found in several for v in found]
    reach = [{"place": i, "side": side, "y": min(found), "y2": max(found)} for i, found in several]
    bar = {"type": "bar", "fill": colour, "stroke": colour, "strokeWidth": 1, "opacity": 0.8}
    made = [
        ([{**row, "y2": zero} for row in means] if bars else [], bar),
        (reach, {"type": "rule", "stroke": ink, "strokeWidth": 1.5}),
        (each, vega.mark(side, 16, ink, faint=not bars)),
        ([] if bars else means, vega.mark(side, 60, colour)),
    ]
    return [(data, mark) for data, mark in made if data]


def _said(name: str, seeds: BySeed, digits: int | None, unit: str = "") -> str:
    each = f" ({' · '.join(number(v, digits) for v in seeds.values())})" if len(seeds) > 1 else ""
    return f"{name}: {number(mean(seeds), digits)}{unit}{each}"


def row_chart(
    label: str,
    rows: list[Row],
    *,
    x_label: str,
    digits: int = 3,
    guide: float | None = None,
    width: float = WIDTH,
    labels: bool = True,
) -> Chart:
    """A chart of named rows: a mark and a number for the mean, small marks for seeds, a line for an interval.

    ``guide`` is a value with a vertical line, such as 0 for differences. Without ``labels``, the rows have no names: a
    chart beside this one shows them.
    """
    ends = [v for row in rows for v in (*row.values.values(), row.low, row.high) if v is not None]
    x = vega.quantitative("x", padded(ends if guide is None else [*ends, guide], 0.08), title=x_label)
    x["axis"] |= {"grid": True, "tickCount": 3}
    names = [wrapped(row.name if labels else "", 165 if width == WIDTH else 600) for row in rows]
    extent = 8 + _LETTER * max(len(line) for name in names for line in name)
    axis: dict[str, Any] = {"labelExpr": vega.tick_label(names), "labelOverlap": False, "labelLineHeight": 12}
    axis |= {"minExtent": extent} if labels else {"labels": False}
    y = {"field": "place", "type": "ordinal", "title": None, "scale": {"domain": list(range(len(rows)))}, "axis": axis}
    layers = [] if guide is None else [vega.layer([{"x": guide}], {"type": "rule"}, x=x)]
    words, tips = [], []
    for i, row in enumerate(rows):
        colour, average = vega.colour(row.side), mean(row.values) or 0.0
        text, each = number(average, digits, sign=guide == 0), [number(v, digits) for v in row.values.values()]
        said = [row.name, text, f"seeds: {' · '.join(each)}" if len(each) > 1 else ""]
        if row.low is not None and row.high is not None:
            span = [{"place": i, "x": row.low, "x2": row.high}]
            layers.append(vega.layer(span, {"type": "rule", "stroke": colour, "strokeWidth": 2}, x=x, y=y, x2=vega.X2))
            said.append(f"95 % CI {number(row.low, digits)} to {number(row.high, digits)}")
        if len(each) > 1:
            seeds = [{"place": i, "x": v} for v in row.values.values()]
            layers.append(vega.layer(seeds, vega.mark(row.side, 16, colour, faint=True), x=x, y=y))
        layers.append(vega.layer([{"place": i, "x": average}], vega.mark(row.side, 60, colour), x=x, y=y))
        words.append({"place": i, "words": text})
        tips.append({"place": i, "tip": "\n".join(filter(None, said))})
    layers.append(vega.layer(words, {"type": "text", "align": "right", "dx": 46}, x=vega.RIGHT, y=y, text=vega.TEXT))
    return vega.chart(label, [*layers, vega.hits(tips, y=y)], 26 * len(rows), width, right=50)


def heat_map(
    label: str,
    rows: list[str],
    columns: list[str],
    value: Callable[[int, int], float | None],
    tip: Callable[[int, int], str],
    *,
    x_label: str,
    y_label: str,
) -> Chart:
    """A heat map of shares between 0 and 1. Each cell shows its number; a missing cell stays empty."""
    cells = []
    for r in range(len(rows)):
        for c in range(len(columns)):
            share = value(r, c)
            if share is not None:
                at = min(max(share, 0.0), 1.0)
                ink = "on-heat" if at > 0.72 else "on-middle" if at > 0.47 else "ink"
                words = {"words": number(share, 2), "fill": f"var(--{ink})", "tip": tip(r, c)}
                cells.append({"r": r, "c": c, "share": at, **words})
    axes: dict[str, dict[str, Any]] = {}
    for field, names, title in (("c", columns, x_label), ("r", rows, y_label)):
        scale = {"domain": list(range(len(names))), "paddingInner": 0.07, "paddingOuter": 0.03}
        axis = {"labelExpr": vega.tick_label(names), "domain": False, "ticks": False, "labelOverlap": False}
        axes[field] = {"field": field, "type": "ordinal", "title": title, "scale": scale, "axis": axis}
    x, y = axes["c"], axes["r"]
    y["axis"] |= {"titleAngle": 0, "titleAlign": "right", "titleX": -6, "titleY": -8}
    tall = min(38.0, (WIDTH - 70) / len(columns))
    opacity = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": [0, 1]}, "legend": None}
    layers = [
        vega.layer(cells, {"type": "rect", "fill": "var(--faint)", "cornerRadius": 3}, x=x, y=y),
        vega.layer(cells, {"type": "rect", "fill": "var(--heat)", "cornerRadius": 3}, x=x, y=y, fillOpacity=opacity),
        vega.layer(cells, {"type": "text"}, x=x, y=y, text=vega.TEXT, fill={"field": "fill", "scale": None}),
        vega.hits(cells, x=x, y=y),
    ]
    return vega.chart(label, layers, tall * len(rows), WIDTH)


def grid(panels: Sequence[tuple[str, Chart]], names: Mapping[str, str], columns: int = 3) -> Chart:
    """Combine several charts, (title, chart), below a legend of ``names``, side -> name."""
    shown: list[Chart] = [
        {k: v for k, v in chart.items() if k not in _ALONE} | {"title": title} for title, chart in panels
    ]
    across = min(columns, len(shown))
    legend = _legend(names, sum(chart["width"] + 50 for chart in shown[:across]))
    made = {"concat": shown, "columns": across, "spacing": 24, "resolve": {"scale": {"xOffset": "independent"}}}
    label = "; ".join(chart["description"] for _, chart in panels)
    return {"description": label, "vconcat": [*legend, made], "spacing": 14, "padding": 6}


def _legend(names: Mapping[str, str], room: float) -> list[dict]:
    """A legend of marks and names, wrapped to ``room`` pixels. Positions are in pixels, without a scale."""
    layers, x, y = [], 0.0, 0.0
    for side, name in names.items():
        wide = 22 + 6.2 * len(name)
        if x and x + wide > room:
            x, y = 0.0, y + 18
        place = {"x": {"value": x + 6}, "y": {"value": y + 8}}
        layers.append(vega.layer([{}], vega.mark(side, 60, vega.colour(side)), **place))
        words = {"type": "text", "text": name, "align": "left", "baseline": "middle", "dx": 10}
        layers.append(vega.layer([{}], words, **place))
        x += wide + 14
    return [{"layer": layers, "width": room - 40, "height": y + 16}] if layers else []


def averaged(points_by_seed: list[list[Point]]) -> list[Point]:
    """The mean over seeds at every x that all seeds have."""
    tables = [dict(points) for points in points_by_seed if points]
    shared = sorted(set(tables[0]).intersection(*tables[1:])) if tables else []
    return [(x, mean([table[x] for table in tables]) or 0.0) for x in shared]


def bucketed(points: list[Point], count: int = 60) -> list[Point]:
    """At most ``count`` points. Each is the mean of neighbouring points, at their last x."""
    size = -(-len(points) // count) or 1
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(run[-1][0], mean([v for _, v in run]) or 0.0) for run in runs]


def padded(values: list[float], share: float = 0.06, *, zero: bool = False, log: bool = False) -> tuple[float, float]:
    """The range of the values with a margin. ``zero``: include 0. ``log``: the margin is a factor."""
    if log:
        low, high = padded([math.log(v) for v in values if v > 0] or [0.0], share)
        return math.exp(low), math.exp(high)
    low, high = min(values, default=0.0), max(values, default=1.0)
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    room = (high - low) * share or abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def wrapped(words: str, room: float) -> list[str]:
    """``words`` broken at spaces into lines of at most ``room`` pixels; a longer word stays whole."""
    return textwrap.wrap(words, max(1, int(room / _LETTER)), break_long_words=False) or [words]
