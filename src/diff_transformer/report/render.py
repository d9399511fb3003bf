"""Render Vega-Lite specifications to SVG with vl-convert, for the page (``panel``, ``inline``) or a file (``save``).

Colours in a specification are CSS custom properties such as ``var(--diff)``. page.css defines them for light and dark
mode; a file gets the colours of FILE_COLOURS.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from diff_transformer.report.markup import Html, escape, printable, tag

Chart = dict[str, Any]  # a Vega-Lite specification
HIT, BREAK = "hit:", "\u2028"  # begins the text of what answers to the pointer; a line break that an attribute keeps
FILE_COLOURS = {  # readable on white and on black: a file does not know its page
    "diff": "#2a7fd4", "softmax": "#d1690f", "s1": "#0f9a85", "s2": "#b05cc9", "s3": "#a38600", "s4": "#e0506a",
    "s5": "#75849a", "s6": "#5a9e35", "ink": "#767b81", "muted": "#767b81", "rule": "#88888855", "faint": "#88888822",
    "heat": "#0f9a85", "on-heat": "#ffffff", "on-middle": "#767b81", "bg": "none",
}  # fmt: skip
_CONFIG = {
    "font": "Arial, sans-serif",
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "labelFontSize": 12, "titleFontSize": 12,
        "titleFontWeight": "normal", "titlePadding": 8, "tickColor": "var(--rule)", "domainColor": "var(--muted)",
        "gridColor": "var(--rule)", "gridWidth": 0.75, "tickSize": 4,
        "labelPadding": 5, "labelAngle": 0, "labelLimit": 0,
    },
    "axisX": {"grid": False},
    "axisY": {"domain": False, "ticks": False},
    "title": {"color": "var(--muted)", "fontSize": 12, "fontWeight": "normal", "anchor": "start"},
    "text": {"fill": "var(--muted)", "fontSize": 12},
    "rule": {"stroke": "var(--muted)"},
}  # fmt: skip


def panel(title: str, drawing: Chart, note: str = "") -> Html:
    """A chart of the page below a small title with the unit of the vertical axis."""
    said = tag("p", note, class_="panel-note") if note else None
    return tag("div", tag("h3", title), said, inline(drawing), class_="panel")


def inline(chart: Chart) -> Html:
    """The chart as an element of the page. Its description is its name for screen readers."""
    name = escape(chart["description"])
    svg = _svg(_text(chart))
    size, inner = re.search(r'viewBox="[^"]*"', svg), svg[svg.index(">") + 1 :]
    inner = re.sub(r'class="mark-(\w+) role-mark[^"]*"', r'class="mark-\1"', inner)
    hit = rf' aria-label="{HIT}([^"]*)" role="[^"]*" aria-roledescription="[^"]*"'
    inner = re.sub(hit, r' class="hit" data-tip="\1"', inner).replace(BREAK, "\n")
    inner = re.sub(r'\bclip(?=\d+["\)])', f"c{hashlib.sha256(inner.encode()).hexdigest()[:8]}-", inner)
    return Html(f'<svg class="chart" {size and size[0]} role="img" tabindex="0" aria-label="{name}">{inner}')


def save(chart: Chart, path: Path) -> None:
    """Write an SVG file in colours readable on white and on black. A comment holds the specification's hash."""
    svg = re.sub(r"var\(--([\w-]+)\)", lambda found: FILE_COLOURS[found[1]], _svg(_text(chart)))
    svg = re.sub(rf"{HIT}([^\"]*)", lambda found: found[1].replace(BREAK, "; "), svg)
    path.write_text(f"{_comment(chart)}\n{svg}\n", encoding="utf-8")


def is_current(chart: Chart, path: Path) -> bool:
    """True if the file was drawn from this specification. It compares hashes, so fonts and versions do not matter."""
    return path.exists() and path.read_text(encoding="utf-8").startswith(_comment(chart))


def _comment(chart: Chart) -> str:
    return f"<!-- specification {hashlib.sha256(_text(chart).encode()).hexdigest()[:16]} -->"


def _text(chart: Chart) -> str:
    return json.dumps(printable(chart) | {"config": _CONFIG}, sort_keys=True)


@lru_cache(1024)
def _svg(spec: str) -> str:
    import vl_convert

    svg = vl_convert.vegalite_to_svg(spec, vl_version="6.4")
    svg = re.sub(r'<path class="(?:background|foreground)"[^>]* d="(?:M0,0h0v0h0Z)?"[^>]*/>', "", svg)
    svg = re.sub(r' (?:pointer-events="none"|aria-hidden="true"|stroke-miterlimit="10")', "", svg)
    svg = re.sub(r"\bclip\d+\b", _numbered(re.findall(r'id="(clip\d+)"', svg)), svg)
    return re.sub(r'(?<= )(?:d|transform|x2?|y2?|width|height)="[^"]*"', _rounded, svg)


def _numbered(ids: list[str]) -> Callable[[re.Match], str]:
    """Renumber clip paths from 0 in each chart; Vega numbers them across the whole process."""
    places = {name: f"clip{i}" for i, name in enumerate(dict.fromkeys(ids))}
    return lambda found: places.get(found[0], found[0])


def _rounded(attribute: re.Match) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", attribute[0])
