"""Lines over a number: thin for each seed, thick for the mean, with a reading under the pointer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diff_transformer.report.markup import Html
from diff_transformer.report.numbers import mean, number, short
from diff_transformer.report.scales import Scale, padded, padded_log
from diff_transformer.report.svg import WIDTH, box, chart, hit, mark, path, segment, text, x_axis, y_axis

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """``side`` gives colour and mark; ``style`` overrides the colour. ``read`` lines appear in the reading. Points that
    are not ``joined`` are marks alone."""

    name: str
    points: list[Point]
    side: str = ""
    thin: bool = False
    marks: bool = False
    read: bool = False
    end_label: str = ""
    style: str | None = None
    joined: bool = True


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
    height: float = 260,
    log_x: bool = False,
    log_y: bool = False,
) -> Html:
    """Draw the lines. ``guides`` are dashed levels with a name; values above or below ``y_range`` leave the frame. On
    an axis in logarithms only positive values are drawn."""
    lines = [replace(line, points=[p for p in line.points if _shown(p, log_x, log_y)]) for line in lines]
    lines = [line for line in lines if line.points]
    values = [v for line in lines for _, v in line.points] + [v for v, _ in guides]
    steps = [s for line in lines for s, _ in line.points]
    low, high = y_range or (padded_log(values) if log_y else padded(values))
    right = WIDTH - (58 if any(line.end_label for line in lines) else 18)
    y = Scale(low, high, height - 46, 14, log_y)
    x = Scale(min(steps), max(steps), 48, right, log_x)
    y_ticks = y.ticks(5)
    places = tick_digits(y_ticks)
    wide = log_y and max(y_ticks) >= 1000 * min(y_ticks)
    drawn: list[object] = [*y_axis(y, x.start, right, [(t, short(t) if wide else number(t, places)) for t in y_ticks])]
    drawn += x_axis(x, y.start, x_ticks or [(t, short(t)) for t in x.ticks(5)], x_label)
    for level, name in guides:
        drawn.append(segment(x.start, y(level), right, y(level), "guide"))
        drawn.append(text(right - 2, y(level) - 5, name, "note", "end"))
    for line in sorted(lines, key=lambda li: not li.thin):
        drawn += _draw(line, x, y)
    drawn += _end_labels(lines, x, y)
    drawn += _readings([line for line in lines if line.read], x, y, x_name, digits)
    return chart(label, height, *drawn)


def _shown(point: Point, log_x: bool, log_y: bool) -> bool:
    return (point[0] > 0 or not log_x) and (point[1] > 0 or not log_y)


def _draw(line: Line, x: Scale, y: Scale) -> list[Html]:
    places = [(x(s), y(v)) for s, v in line.points]
    names = f"line {line.side} {'thin' if line.thin else 'thick'}"
    drawn = [path(run, names, line.style) for run in inside(places, y)] if line.joined else []
    if line.marks or not line.joined:
        inner = [(px, py) for px, py in places if y.end <= py <= y.start]
        drawn += [mark(line.side, px, py, 2.4 if line.thin else 4, "faint" if line.thin else "") for px, py in inner]
    return drawn


def inside(places: list[Point], y: Scale) -> list[list[Point]]:
    """The parts of a polyline within the frame; a part that leaves through the top or bottom ends exactly there."""
    top, bottom = min(y.start, y.end), max(y.start, y.end)
    runs: list[list[Point]] = [[]]
    for here, there in zip(places, [*places[1:], None], strict=True):
        if top <= here[1] <= bottom:
            runs[-1].append(here)
        if there is None or (top <= here[1] <= bottom) == (top <= there[1] <= bottom):
            continue
        edge = top if min(here[1], there[1]) < top else bottom
        share = (edge - here[1]) / (there[1] - here[1])
        runs[-1].append((round(here[0] + share * (there[0] - here[0]), 2), edge))
        if not top <= there[1] <= bottom:
            runs.append([])
    return [run for run in runs if len(run) > 1]


def _end_labels(lines: list[Line], x: Scale, y: Scale) -> list[Html]:
    """Names at the right end, moved apart where they would touch."""
    named = sorted((line for line in lines if line.end_label), key=lambda line: y(line.points[-1][1]))
    drawn, floor = [], 0.0
    for line in named:
        at = max(y(line.points[-1][1]), floor)
        floor = at + 14
        drawn.append(text(x.end + 6, at + 4, line.end_label, f"end {line.side}", style=line.style))
    return drawn


def _readings(lines: list[Line], x: Scale, y: Scale, x_name: str, digits: int) -> list[Html]:
    steps = sorted({s for line in lines for s, _ in line.points})
    tables = [dict(line.points) for line in lines]
    drawn = []
    for i, step in enumerate(steps):
        left = x.start - 6 if i == 0 else (x(steps[i - 1]) + x(step)) / 2
        right = x.end + 6 if i == len(steps) - 1 else (x(step) + x(steps[i + 1])) / 2
        said = [f"{x_name} {short(step) if step >= 1e6 else f'{step:,.0f}'}"]
        shapes: list[object] = [
            box(left, y.end, right - left, y.start - y.end, "target"),
            segment(x(step), y.end, x(step), y.start, "cursor"),
        ]
        for line, table in zip(lines, tables, strict=True):
            if step in table:
                said.append(f"{line.name}: {number(table[step], digits)}")
                if y.end <= y(table[step]) <= y.start:
                    shapes.append(mark(line.side or "other", x(step), y(table[step]), 4, "shown"))
        drawn.append(hit("\n".join(said), *shapes))
    return drawn


def tick_digits(ticks: list[float]) -> int:
    """How many places after the point the ticks need to differ."""
    return next((d for d in range(6) if all(abs(t - round(t, d)) < 1e-9 for t in ticks)), 6)


def averaged(points_by_seed: list[list[Point]]) -> list[Point]:
    """The mean over seeds at every x that all seeds have."""
    tables = [dict(points) for points in points_by_seed if points]
    if not tables:
        return []
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    return [(s, mean([t[s] for t in tables]) or 0.0) for s in shared]


def bucketed(points: list[Point], count: int = 60) -> list[Point]:
    """At most ``count`` points: the mean of each run of neighbours, placed at the last x of the run."""
    size = -(-len(points) // count) or 1
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(run[-1][0], mean([v for _, v in run]) or 0.0) for run in runs]
