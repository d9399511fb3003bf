"""HTML in which text is escaped unless it is already Html, and numbers as text."""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

DASH = "–"
MINUS = "−"
# Characters that HTML, SVG or UTF-8 cannot hold: control characters except tab and newline, lone surrogates, U+FFFE and
# U+FFFF.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """A string that is already HTML. ``escape`` leaves it unchanged; text added to it is escaped."""

    def __add__(self, other: object) -> "Html":
        return Html(str(self) + str(escape(other)))


def printable(value: Any) -> Any:
    """``value``, a text or lists and dictionaries of texts, with U+FFFD for each character that a page cannot hold."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {key: printable(of) for key, of in value.items()}
    return [printable(of) for of in value] if isinstance(value, list | tuple) else value


def escape(value: object) -> Html:
    """The HTML of any value; text is data and is escaped, Html passes."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(printable(str(value)), quote=True))


def join(parts, between: str = "") -> Html:
    """Concatenate the parts, escaping those that are not Html; None is skipped."""
    return Html(escape(between).join(escape(part) for part in parts if part is not None))


def tag(_name: str, *children: object, **attributes: object) -> Html:
    """One element. ``class_`` is class, ``data_tip`` data-tip; True is a bare attribute, None and False none."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        written.append(f" {name}" if value is True else f' {name}="{escape(value)}"')
    opening = f"<{_name}{''.join(written)}>"
    if _name in ("br", "meta", "input"):
        return Html(opening)
    return Html(f"{opening}{join(children)}</{_name}>")


def script_json(value: object) -> Html:
    """JSON that is safe inside <script type="application/json">: no character of it can end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def table(head: list[object], rows: list[list[object]], label: str, numeric: bool = True, class_: str = "") -> Html:
    """A table that scrolls by itself. The first column names the row; the others are numbers, or text."""
    header = tag("thead", tag("tr", *(tag("th", h, scope="col") for h in head)))
    body = tag("tbody", *(tag("tr", tag("th", r[0], scope="row"), *(tag("td", c) for c in r[1:])) for r in rows))
    kind = " ".join(["data", *(["numeric"] if numeric else []), *([class_] if class_ else [])])
    return tag(
        "div", tag("table", header, body, class_=kind), class_="scroll", tabindex="0", role="region", aria_label=label
    )


def is_number(value: object) -> bool:
    """True if the value is a finite int or float, which a chart can draw."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def mean(values: Iterable[float] | Mapping[int, float]) -> float | None:
    """The mean of the values (of a mapping: of its values), or None when there is none."""
    kept = list(values.values() if isinstance(values, Mapping) else values)
    return sum(kept) / len(kept) if kept else None


def number(value: object, digits: int | None = None, sign: bool = False) -> str:
    """A number as text with ``digits`` decimals, by default about four significant figures; a dash for None."""
    if not isinstance(value, int | float) or not is_number(value):
        return DASH
    if digits is None:
        size = abs(value)
        digits = 0 if size >= 1000 or value == int(value) else 1 if size >= 10 else 3
        if 0 < size < 0.01:
            return f"{value:{'+' if sign else ''}.2g}".replace("-", MINUS)
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def short(value: object) -> str:
    """A large count with its unit: 1.23 M, 45.6 K."""
    if not isinstance(value, int | float) or not is_number(value):
        return DASH
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def duration(seconds: object) -> str:
    """Seconds as 40 s, 12 min or 3 h 20 min."""
    if not isinstance(seconds, int | float) or not is_number(seconds):
        return DASH
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """3 seeds, 1 seed."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
