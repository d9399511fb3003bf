"""A grid of shares between 0 and 1, each cell with its number."""

from collections.abc import Callable

from diff_transformer.report.markup import Html, tag
from diff_transformer.report.numbers import number
from diff_transformer.report.svg import WIDTH, box, chart, hit, text


def heat_map(
    label: str,
    rows: list[str],
    columns: list[str],
    value: Callable[[int, int], float | None],
    tip: Callable[[int, int], str],
    *,
    x_label: str,
    y_label: str,
) -> Html:
    """Darker is higher (in dark mode: brighter). A missing cell is left empty."""
    left, top, gap = 62, 22, 3
    width = (WIDTH - left - 8) / len(columns)
    height = min(38.0, width)
    drawn: list[object] = [text(0, 13, y_label, "axis")]
    for r, name in enumerate(rows):
        drawn.append(text(left - 8, top + r * height + height / 2 + 4, name, "tick", "end"))
    for c, name in enumerate(columns):
        drawn.append(text(left + c * width + width / 2, top + len(rows) * height + 15, name, "tick", "middle"))
    for r in range(len(rows)):
        for c in range(len(columns)):
            share = value(r, c)
            if share is not None:
                x, y = left + c * width, top + r * height
                strength = min(max(share, 0.0), 1.0)
                cell = box(
                    x + gap / 2,
                    y + gap / 2,
                    width - gap,
                    height - gap,
                    "cell",
                    rx="3",
                    style=f"--at:{100 * strength:.0f}%",
                )
                over = "on-strong" if strength > 0.72 else "on-middle" if strength > 0.47 else ""
                words = text(x + width / 2, y + height / 2 + 4, number(share, 2), over, "middle")
                drawn.append(hit(tip(r, c), tag("g", cell, words)))
    bottom = top + len(rows) * height
    drawn.append(text(left + (WIDTH - left - 8) / 2, bottom + 33, x_label, "axis", "middle"))
    return chart(label, bottom + 40, *drawn)
