"""Parts of a Vega-Lite specification: layers, channels, and the mark, dashes and colour of a side."""

import json
import math
from collections.abc import Sequence
from typing import Any

from diff_transformer.report.markup import printable
from diff_transformer.report.render import BREAK, HIT, Chart

MARKS = {
    "diff": "circle", "softmax": "square", "s1": "diamond", "s2": "triangle-up", "s3": "triangle-down", "s4": "cross",
    "s5": "M-0.6,-1L0.6,-1L1.15,0L0.6,1L-0.6,1L-1.15,0Z", "s6": "M-1,-1L1,-1L0.3,0L1,1L-1,1L-0.3,0Z",
}  # fmt: skip
DASHES = {
    "softmax": [7, 3.5], "s1": [2, 3], "s2": [11, 3, 2.5, 3], "s3": [4, 3], "s4": [14, 4], "s5": [7, 2, 2, 2],
}  # fmt: skip
TEXT, X2, Y2 = {"field": "words"}, {"field": "x2"}, {"field": "y2"}
RIGHT = {"value": "width"}


def chart(label: str, layers: list[dict], height: float, width: float, right: float = 14) -> Chart:
    """``height`` is the plot's height. ``width`` is the total width, or the plot's width in a grid."""
    padding = {"left": 10, "right": right, "top": 8, "bottom": 4}
    size = {"width": width, "height": height, "padding": padding, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"description": label, "layer": layers, **size}


def layer(data: list[dict], mark: dict, **encoding: object) -> dict:
    return {"data": {"values": data}, "mark": {"aria": False, **mark}, "encoding": encoding}


def quantitative(
    field: str, domain: tuple[float, float], *, log: bool = False, title: str | None = None
) -> dict[str, Any]:
    """A quantitative channel; a logarithmic one has its ticks at 1, 2 and 5 times powers of ten."""
    low, high = domain
    scale = {"type": "log" if log else "linear", "domain": [low, high], "nice": False}
    axis: dict[str, Any] = {"tickCount": 5, "labelOverlap": "greedy", "labelSeparation": 14 if field == "x" else 2}
    if max(abs(low), abs(high)) >= 10_000 or (log and high >= 1000):
        axis["format"] = "~s"
    elif log:
        axis["format"] = "~g" if low >= 1e-4 else "~e"
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        every = [m * 10.0**e for e in range(first, last + 1) for m in steps]
        ticks = [tick for tick in every if low <= tick * 1.0001 and tick <= high * 1.0001]
        if len(ticks) > 1:
            axis |= {"values": ticks, "tickCount": len(ticks)}
    return {"field": field, "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def tick_label(words: Sequence[object], at: Sequence[tuple[float, str]] | None = None) -> str:
    """A Vega expression for the label of a tick, by its index, or by its index among the values ``at``."""
    place = "datum.value" if at is None else f"indexof({json.dumps([value for value, _ in at])}, datum.value)"
    return f"{json.dumps(printable(list(words)))}[{place}]"


def mark(side: str, size: float, colour: str, *, faint: bool = False) -> dict:
    shape = {"type": "point", "shape": MARKS.get(style(side), "diamond"), "size": size, "opacity": 0.5 if faint else 1}
    if side == "init":
        return shape | {"filled": False, "stroke": colour, "strokeWidth": 1.5}
    return shape | {"filled": True, "fill": colour, "stroke": "var(--bg)", "strokeWidth": 1 if size > 20 else 0}


def style(side: str) -> str:
    """A side beyond the sixth is called "s1 again1" and looks like s1."""
    return side.split(" ")[0]


def colour(side: str) -> str:
    name = style(side)
    return f"var(--{name if name in MARKS else 'muted' if name == 'init' else 'ink'})"


def guides(guides: Sequence[tuple[float, str]], y: dict) -> list[dict]:
    data = [{"y": level, "words": words} for level, words in guides if level > 0 or y["scale"]["type"] != "log"]
    if not data:
        return []
    words = {"type": "text", "align": "right", "baseline": "bottom", "dx": -2, "dy": -2}
    return [
        layer(data, {"type": "rule", "strokeDash": [4, 3]}, y=y),
        layer(data, {**words, "fontSize": 11}, x=RIGHT, y=y, text=TEXT),
    ]


def hits(data: list[dict], **place: object) -> dict:
    """A transparent mark that shows its text on hover, on tap and by the keyboard."""
    told = [{**row, "tip": f"{HIT}{row['tip']}".replace("\n", BREAK)} for row in data]
    rectangle = {"type": "rect", "fill": "var(--ink)", "opacity": 0, "aria": True}
    return layer(told, rectangle, description={"field": "tip"}, **place)
