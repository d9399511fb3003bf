"""Named rows one below the other, each with a mark at its value: many variants of few models, on an axis that fits."""

from dataclasses import dataclass

from diff_transformer.report.line_chart import tick_digits
from diff_transformer.report.markup import Html
from diff_transformer.report.numbers import mean, number
from diff_transformer.report.scales import Scale, padded
from diff_transformer.report.svg import WIDTH, box, chart, hit, mark, segment, text

_ROW, _TOP, _LABEL = 24, 6, 158


@dataclass(frozen=True)
class Row:
    """``values`` by seed; ``side`` gives mark and colour."""

    name: str
    side: str
    values: dict[int, float]


def row_chart(label: str, rows: list[Row], *, x_label: str, digits: int = 3) -> Html:
    """Draw the rows, each of which has a value: seeds small, their mean large, the mean's number at the right."""
    low, high = padded([v for row in rows for v in row.values.values()], 0.1)
    bottom = _TOP + _ROW * len(rows)
    x = Scale(low, high, _LABEL, WIDTH - 48)
    ticks = x.ticks(4)
    drawn: list[object] = []
    for tick in ticks:
        drawn.append(segment(x(tick), _TOP, x(tick), bottom, "grid"))
        drawn.append(text(x(tick), bottom + 16, number(tick, tick_digits(ticks)), "tick", "middle"))
    drawn.append(text((x.start + x.end) / 2, bottom + 33, x_label, "axis", "middle"))
    for place, row in enumerate(rows):
        y = _TOP + _ROW * (place + 0.5)
        average = mean(row.values) or 0.0
        each = f"\nseeds: {' · '.join(number(v, digits) for v in row.values.values())}" if len(row.values) > 1 else ""
        shapes: list[object] = [
            box(0, y - _ROW / 2, WIDTH, _ROW, "target"),
            text(_LABEL - 10, y + 4, row.name, "", "end"),
            text(WIDTH - 2, y + 4, number(average, digits), "tick", "end"),
        ]
        if len(row.values) > 1:
            shapes += [mark(row.side, x(v), y, 2.6, "faint") for v in row.values.values()]
        shapes.append(mark(row.side, x(average), y, 4.6))
        drawn.append(hit(f"{row.name}\n{number(average, digits)}{each}", *shapes))
    return chart(label, bottom + 40, *drawn)
