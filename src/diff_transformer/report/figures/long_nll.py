"""Negative log-likelihood by position."""

import re

from diff_transformer.lab.stats import over_seeds
from diff_transformer.report.charts import Line, Point, averaged, line_chart, padded
from diff_transformer.report.figure import Figure, Finding, key, panels
from diff_transformer.report.markup import Html, is_number, number, plural, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in, pair_in
from diff_transformer.report.render import Chart, panel

EVAL = "long_nll"
POSITION = re.compile(r"nll(\d+)")
SETTLED = 8  # position from which on the curve lies inside the frame


def build(results: Results) -> Figure | None:
    """Cumulative average NLL over a logarithmic axis; for a pair, its difference with an interval over books."""
    models = models_in(results, EVAL)
    positions = sorted({int(m[1]) for model in models for m in map(POSITION.fullmatch, model.names()) if m})
    if not positions:
        return None
    shared = [n for n in positions if all(model.seeds(f"nll{n}") for model in models)]
    shown = [panel("Average NLL up to a position, nats per token", _chart(models, positions))]
    pair = pair_in(models)
    gaps = _gaps(*pair, positions) if pair else {}
    if gaps:
        shown.append(panel("DIFF − Transformer, nats per token: below 0, DIFF is better", _difference(gaps, positions)))
    several = any(len(model.metrics) > 1 for model in models)
    findings = [_interval(gaps), _books(models)]
    if shared:
        said = f"Average NLL over the first {shared[-1]:,} positions"
        findings.insert(0, compared(said, models, f"nll{shared[-1]}", "lower"))
    return Figure(
        id="long-nll",
        title="Does a longer context keep helping?",
        source=("Fig. 4",),
        read="The average negative log-likelihood of the first n tokens of a book, over n on a logarithmic axis. "
        "Lower is better. A curve that keeps falling still gains from its context. The first positions lie "
        "above the frame.",
        body=panels(*shown) + legend_of(models, *([key("thin-line", "one seed")] if several else [])),
        findings=findings,
        paper="at 3 B, with continued training to 64 K tokens, both curves keep falling to the end, and DIFF's is "
        "the lower.",
        data=_data(models, positions),
    )


def _points(model: Series, seed: int, positions: list[int]) -> list[Point]:
    values = model.metrics[seed]
    return [(float(n), values[f"nll{n}"]) for n in positions if f"nll{n}" in values]


def _chart(models: list[Series], positions: list[int]) -> Chart:
    lines: list[Line] = []
    for model in models:
        runs = [_points(model, seed, positions) for seed in model.metrics]
        if len(runs) > 1:
            lines += [Line("", run, model.side, thin=True) for run in runs]
        lines.append(Line(model.label, averaged(runs), model.side, marks=True, read=True))
    settled = [v for line in lines for n, v in line.points if n >= min(SETTLED, positions[-1])]
    return line_chart(
        "Average negative log-likelihood up to a position",
        lines,
        x_label="position, tokens",
        x_name="position",
        x_ticks=ticks(positions),
        y_range=padded(settled),
        log_x=True,
        height=240,
    )


def ticks(positions: list[int]) -> list[tuple[float, str]]:
    """Powers of two, at most nine of them, with 1024 written 1K."""
    powers = [n for n in positions if n & (n - 1) == 0]
    kept = powers[:: -(-len(powers) // 9)]
    return [(float(n), f"{n // 1024}K" if n >= 1024 else str(n)) for n in kept]


def _gaps(diff: Series, soft: Series, positions: list[int]) -> dict[int, tuple[float, float]]:
    """By position: DIFF minus Transformer, and the half-width of its 95 % interval over books (0 without rows).

    Each book's difference is a mean over seeds, because the same book under several seeds is not independent."""
    gaps = {}
    books = _by_book(diff), _by_book(soft)
    shared = sorted(books[0].keys() & books[1].keys())
    for n in positions:
        by_book: dict[str, list[float]] = {}
        for place, book in shared:
            ours, theirs = books[0][place, book], books[1][place, book]
            if n in ours and n in theirs:
                by_book.setdefault(book, []).append(ours[n] - theirs[n])
        a, b = diff.mean(f"nll{n}"), soft.mean(f"nll{n}")
        if len(by_book) > 1:
            found = over_seeds([sum(values) / len(values) for values in by_book.values()])
            gaps[n] = found.mean, (found.high or found.mean) - found.mean
        elif a is not None and b is not None:
            gaps[n] = a - b, 0.0
    return gaps


def _by_book(model: Series) -> dict[tuple[int, str], dict[int, float]]:
    """By entry and book: the average loss up to each edge of the bins."""
    found = {}
    for place, part in enumerate(model.parts):
        edges = part.provenance.get("edges") or []
        for row in part.rows:
            sums, counts = row.get("sums") or [], row.get("counts") or []
            if len(sums) != len(counts) or len(edges) != len(sums) + 1 or not all(map(is_number, [*sums, *counts])):
                continue
            total, tokens, means = 0.0, 0, {}
            for edge, part, count in zip(edges[1:], sums, counts, strict=True):
                total, tokens = total + part, tokens + count
                means[edge] = total / tokens if tokens else 0.0
            found[place, str(row.get("book"))] = means
    return found


def _difference(gaps: dict[int, tuple[float, float]], positions: list[int]) -> Chart:
    middle = [(float(n), gap) for n, (gap, _) in gaps.items()]
    lines = [Line("DIFF − Transformer", middle, "difference", marks=True, read=True)]
    if any(half for _, half in gaps.values()):
        for sign in (-1, 1):
            lines.append(Line("", [(float(n), g + sign * h) for n, (g, h) in gaps.items()], "difference", thin=True))
    settled = [v for line in lines for n, v in line.points if n >= min(SETTLED, positions[-1])]
    low, high = padded([*settled, 0.0], 0.1)
    return line_chart(
        "Difference in average negative log-likelihood, DIFF minus Transformer, up to a position",
        lines,
        x_label="position, tokens; thin: 95 % interval over books" if len(lines) > 1 else "position, tokens",
        x_name="position",
        x_ticks=ticks(positions),
        y_range=(low, high),
        guides=[(0.0, "no difference")],
        digits=4,
        log_x=True,
        height=240,
    )


def _interval(gaps: dict[int, tuple[float, float]]) -> Finding | None:
    if not gaps:
        return None
    n = max(gaps)
    gap, half = gaps[n]
    if not half:
        return None
    low, high = number(gap - half, 4, sign=True), number(gap + half, 4, sign=True)
    said = f"Up to position {n:,}, DIFF − Transformer is {number(gap, 4, sign=True)}, 95 % interval over books"
    return Finding("note", f"{said} {low} to {high}.")


def _books(models: list[Series]) -> Finding | None:
    counts = {int(v) for model in models for v in model.seeds("books").values()}
    if not counts:
        return None
    said = plural(max(counts), "book") if len(counts) == 1 else f"{min(counts)} to {max(counts)} books"
    return Finding("note", f"Averages over {said}, each read from its beginning.")


def _data(models: list[Series], positions: list[int]) -> Html:
    runs = [(model, seed) for model in models for seed in model.metrics]
    rows: list[list[object]] = [
        [f"{n:,}", *(number(model.metrics[seed].get(f"nll{n}"), 4) for model, seed in runs)] for n in positions
    ]
    head: list[object] = ["up to position", *(f"{model.label}, seed {seed}" for model, seed in runs)]
    return table(head, rows, "Average negative log-likelihood by position")
