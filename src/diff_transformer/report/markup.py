"""HTML built so that text is escaped unless it is already Html."""

import html
import json
import re

# What an HTML parser or a UTF-8 file cannot hold: control characters but tab and newline, and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Html(str):
    """A string that is already HTML: ``escape`` leaves it as it is, and what is added to it is escaped."""

    def __add__(self, other: object) -> "Html":
        return Html(str(self) + str(escape(other)))


def escape(value: object) -> Html:
    """The HTML of any value; text is data and is escaped, Html passes."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", str(value)), quote=True))


def join(parts, between: str = "") -> Html:
    """The parts, escaped where they are not Html, in a row; None is skipped."""
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
    """JSON that can stand inside <script type="application/json">: no character of it can end the element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def table(head: list[object], rows: list[list[object]], label: str, numeric: bool = True, class_: str = "") -> Html:
    """A table that scrolls inside itself: the first column names the row, the others are numbers, or else text."""
    header = tag("thead", tag("tr", *(tag("th", h, scope="col") for h in head)))
    body = tag("tbody", *(tag("tr", tag("th", r[0], scope="row"), *(tag("td", c) for c in r[1:])) for r in rows))
    kind = " ".join(["data", *(["numeric"] if numeric else []), *([class_] if class_ else [])])
    return tag(
        "div", tag("table", header, body, class_=kind), class_="scroll", tabindex="0", role="region", aria_label=label
    )
