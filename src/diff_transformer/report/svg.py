"""The pieces that every chart is made of. Units are those of a drawing 400 wide, shown between 330 and 500 px."""

import textwrap

from diff_transformer.report.markup import Html, escape, tag
from diff_transformer.report.scales import Scale

WIDTH = 400
LINE = 13  # from one line of words to the next
_LETTER = 6.6  # width of a letter where letters are largest beside the drawing, on a phone
DIAMOND = [(-1.3, 0), (0, -1.3), (1.3, 0), (0, 1.3)]
SHAPES = {  # corners of a mark of size 1, for the models s2 to s6 of a page; s1 is the diamond
    "s2": [(0, -1.25), (1.2, 0.95), (-1.2, 0.95)],
    "s3": [(-1.2, -0.95), (1.2, -0.95), (0, 1.25)],
    "s4": [(a * 1.15, b * 1.15) for a, b in (
        (-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35), (0.35, 1), (-0.35, 1),
        (-0.35, 0.35), (-1, 0.35), (-1, -0.35), (-0.35, -0.35),
    )],
    "s5": [(-0.6, -1), (0.6, -1), (1.15, 0), (0.6, 1), (-0.6, 1), (-1.15, 0)],
    "s6": [(-1, -1), (1, -1), (0.3, 0), (1, 1), (-1, 1), (-0.3, 0)],
}  # fmt: skip


def chart(label: str, height: float, *parts: object, width: float = WIDTH, class_: str = "chart") -> Html:
    """The drawing. ``label`` is what a screen reader says; the arrow keys walk over its ``hit`` parts."""
    inner = tag("g", *parts)
    size, name = f'viewBox="0 0 {width:g} {height:g}"', escape(label)
    return Html(f'<svg class="{class_}" {size} role="img" tabindex="0" aria-label="{name}">{inner}</svg>')


def panel(title: str, drawing: Html, note: str = "") -> Html:
    """A drawing under its own small title; the title carries the unit of the vertical axis."""
    return tag("div", tag("h3", title), tag("p", note, class_="panel-note") if note else None, drawing, class_="panel")


def text(x: float, y: float, words: object, class_: str = "", anchor: str = "start", style: str | None = None) -> Html:
    """Words at a point; ``anchor`` is start, middle or end."""
    return tag("text", words, x=f"{x:g}", y=f"{y:g}", class_=class_ or None, text_anchor=anchor, style=style)


def segment(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    """A straight line."""
    return tag("line", x1=f"{x1:g}", y1=f"{y1:g}", x2=f"{x2:g}", y2=f"{y2:g}", class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, **more: object) -> Html:
    """A rectangle."""
    return tag(
        "rect", x=f"{x:g}", y=f"{y:g}", width=f"{max(width, 0):g}", height=f"{max(height, 0):g}", class_=class_, **more
    )


def path(points: list[tuple[float, float]], class_: str, style: str | None = None) -> Html:
    """A polyline through the points, which are already positions."""
    moves = "L".join(f"{x:g} {y:g}" for x, y in points)
    return tag("path", d=f"M{moves}", class_=class_, style=style)


def mark(side: str, x: float, y: float, size: float, class_: str = "") -> Html:
    """DIFF is a disc, the Transformer a square, other models have shapes of their own, anything else is a diamond: told
    apart without colour."""
    names = f"mark {side} {class_}".strip()
    if side == "diff":
        return tag("circle", cx=f"{x:g}", cy=f"{y:g}", r=f"{size * 1.1:g}", class_=names)
    if side == "softmax":
        half = size * 0.8
        return box(x - half, y - half, 2 * half, 2 * half, names)
    corners = SHAPES.get(side[:2], DIAMOND)
    points = [(round(x + size * a, 2), round(y + size * b, 2)) for a, b in corners]
    return path([*points, points[0]], names)


def hit(tip: str, *shapes: object) -> Html:
    """Shapes that show ``tip`` (its first line is the heading) under the pointer, on a tap, or by the arrow keys."""
    return tag("g", *shapes, class_="hit", data_tip=tip)


def y_axis(y: Scale, left: float, right: float, ticks: list[tuple[float, str]]) -> list[Html]:
    """Horizontal grid lines with their values to the left."""
    drawn = []
    for value, words in ticks:
        drawn.append(segment(left, y(value), right, y(value), "grid"))
        drawn.append(text(left - 7, y(value) + 4, words, "tick", "end"))
    return drawn


def x_axis(x: Scale, bottom: float, ticks: list[tuple[float, str]], label: str) -> list[Html]:
    """The bottom rule, its values (each line of them on its own), and below them what they count."""
    drawn = [segment(x.start, bottom, x.end, bottom, "rule")]
    for value, words in ticks:
        for i, line in enumerate(words.split("\n")):
            drawn.append(text(x(value), bottom + 17 + LINE * i, line, "tick", "middle"))
    below = bottom + 34 + LINE * max((words.count("\n") for _, words in ticks), default=0)
    drawn.append(text((x.start + x.end) / 2, below, label, "axis", "middle"))
    return drawn


def wrapped(words: str, room: float) -> str:
    """``words`` in lines that fit into ``room``, as far as their spaces allow."""
    return "\n".join(textwrap.wrap(words, max(1, int(room / _LETTER)), break_long_words=False)) or words
