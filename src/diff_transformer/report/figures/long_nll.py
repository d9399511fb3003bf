"""Negative log-likelihood by position."""

import math
import re
from dataclasses import replace

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import QUANTITIES, difference, loss_up_to
from diff_transformer.lab.stats import Interval
from diff_transformer.report.charts import Line, Point, averaged, line_chart, padded
from diff_transformer.report.figure import Figure, Finding, key, panels
from diff_transformer.report.markup import Html, number, plural, table
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
    findings = [_books(models)]
    if shared:
        said = f"Average NLL over the first {shared[-1]:,} positions"
        of = (results, QUANTITIES[EVAL]) if shared[-1] == positions[-1] else None
        findings.insert(0, compared(said, models, f"nll{shared[-1]}", "lower", of=of))
    return Figure(
        id="long-nll",
        title="Does a longer context keep helping?",
        source=("Fig. 4",),
        read="The average negative log-likelihood of the first n tokens of a book, over n on a logarithmic axis. "
        "Lower is better. A curve that keeps falling still gains from its context. The first positions lie "
        "above the frame.",
        body=panels(*shown) + legend_of(models, *([key("thin-line", "one seed")] if several else [])),
        findings=findings,
        paper=SAID["long_nll"],
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
    """Powers of two, at most nine of them, with 1024 written 1K; without any, the positions themselves."""
    powers = [n for n in positions if n & (n - 1) == 0] or positions
    kept = powers[:: -(-len(powers) // 9)]
    return [(float(n), f"{n // 1024}K" if n >= 1024 else str(n)) for n in kept]


def _gaps(diff: Series, soft: Series, positions: list[int]) -> dict[int, Interval]:
    """By position: DIFF minus Transformer, with the interval of the claims, or without one where rows are missing."""
    ours, theirs = ({part.record.seed: part for part in one.parts} for one in (diff, soft))
    seeds = sorted(ours.keys() & theirs.keys())
    edges = [part.provenance.get("edges") for side in (ours, theirs) for part in side.values()]
    gaps = {}
    for n in positions:
        a, b = diff.mean(f"nll{n}"), soft.mean(f"nll{n}")
        if a is None or b is None:
            continue
        try:
            quantity = replace(QUANTITIES[EVAL], scores=loss_up_to(edges[0] or [], n))
            found, _ = difference(quantity, *([side[seed].record for seed in seeds] for side in (ours, theirs)))
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):  # rows of another form
            found = None
        if found is not None and math.isfinite(found.mean):
            gaps[n] = found
        else:
            gaps[n] = Interval(a - b, None, None, "")
    return gaps


def _difference(gaps: dict[int, Interval], positions: list[int]) -> Chart:
    lines = [Line("DIFF − Transformer", [(float(n), gap.mean) for n, gap in gaps.items()], "difference", marks=True,
                  read=True)]  # fmt: skip
    over = next((gap.over for gap in gaps.values() if gap.low is not None), "").replace("examples", "books")
    for end in (0, 1) if over else ():
        ends = [(float(n), (gap.low, gap.high)[end]) for n, gap in gaps.items()]
        lines.append(Line("", [(n, at) for n, at in ends if at is not None], "difference", thin=True))
    settled = [v for line in lines for n, v in line.points if n >= min(SETTLED, positions[-1])]
    low, high = padded([*settled, 0.0], 0.1)
    return line_chart(
        "Difference in average negative log-likelihood, DIFF minus Transformer, up to a position",
        lines,
        x_label="position, tokens" + (f"; thin: 95 % CI over {over.replace('examples', 'books')}" if over else ""),
        x_name="position",
        x_ticks=ticks(positions),
        y_range=(low, high),
        guides=[(0.0, "no difference")],
        digits=4,
        log_x=True,
        height=240,
    )


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
