"""A few named categories on the horizontal axis; for each, one bar or mark a model, and its seeds."""

from collections.abc import Mapping, Sequence

from diff_transformer.report.line_chart import tick_digits
from diff_transformer.report.markup import Html
from diff_transformer.report.numbers import mean, number, short
from diff_transformer.report.pair import NAMES
from diff_transformer.report.scales import Scale, padded
from diff_transformer.report.svg import LINE, WIDTH, box, chart, hit, mark, segment, text, wrapped, x_axis, y_axis

Values = dict[str, list[dict[int, float]]]  # side -> for each category, value by seed


def category_chart(
    label: str,
    categories: list[str],
    values: Values,
    *,
    x_label: str,
    bars: bool = False,
    log: bool = False,
    digits: int | None = 3,
    unit: str = "",
    y_range: tuple[float, float] | None = None,
    guides: Sequence[tuple[float, str]] = (),
    height: float = 260,
    names: Mapping[str, str] = NAMES,
) -> Html:
    """Bars from 0, or marks on an axis that fits them (``log``: powers of ten). ``guides`` are levels with a name."""
    every = [v for side in values.values() for seeds in side for v in seeds.values()] + [v for v, _ in guides]
    low, high = y_range or (_log_range(every) if log else padded(every, 0.12, zero=bars))
    y = Scale(low, high, height - 46, 16, log)
    x = Scale(-0.5, len(categories) - 0.5, 48, WIDTH - 12)
    ticks = y.ticks(5)
    places = tick_digits(ticks)
    named = [(t, short(t) if log or max(map(abs, ticks)) >= 10_000 else number(t, places)) for t in ticks]
    drawn: list[object] = [*y_axis(y, x.start, x.end, named)]
    room = (x.end - x.start) / len(categories)
    below = [wrapped(name, room) for name in categories]
    drawn += x_axis(x, y.start, list(enumerate(below)), x_label)
    height += LINE * max(name.count("\n") for name in below)
    for place, name in enumerate(categories):
        drawn.append(_group(place, name, values, x, y, room, bars, digits, unit, names))
    for level, words in guides:
        drawn.append(segment(x.start, y(level), x.end, y(level), "guide"))
        drawn.append(text(x.end - 2, y(level) - 5, words, "note", "end"))
    return chart(label, height, *drawn)


def _group(
    place: int,
    name: str,
    values: Values,
    x: Scale,
    y: Scale,
    room: float,
    bars: bool,
    digits: int | None,
    unit: str,
    names: Mapping[str, str],
) -> Html:
    share = room / max(2, len(values))
    width, gap = min(share * 0.64, 44), min(4, share * 0.1)
    said = [name]
    shapes: list[object] = [box(x(place) - room / 2, y.end, room, y.start - y.end, "target")]
    for i, (side, by_category) in enumerate(values.items()):
        seeds = by_category[place]
        average = mean(seeds)
        if average is None:
            continue
        at = x(place) + (i - (len(values) - 1) / 2) * (width + gap if bars else min(share * 0.6, 30))
        ends = "" if len(seeds) < 2 else f" ({' · '.join(number(v, digits) for v in seeds.values())})"
        said.append(f"{names[side]}: {number(average, digits)}{unit}{ends}")
        if bars:
            zero = y(max(0.0, y.low))
            top, bottom = sorted((y(average), zero))
            shapes.append(box(at - width / 2, min(top, bottom - 1.5), width, max(bottom - top, 1.5), f"bar {side}"))
        if len(seeds) > 1:
            shapes.append(segment(at, y(min(seeds.values())), at, y(max(seeds.values())), f"reach {side}"))
            shapes += [mark(side, at, y(v), 2.6, "seed" if bars else "faint") for v in seeds.values()]
        if not bars:
            shapes.append(mark(side, at, y(average), 4.6))
    return hit("\n".join(said), *shapes)


def _log_range(values: list[float]) -> tuple[float, float]:
    positive = [v for v in values if v > 0] or [1.0]
    return min(positive) / 1.6, max(positive) * 1.6
