"""How much attention the answer position gives to the answer, and to everything else."""

import re

from diff_transformer.report.figure import Figure, legend, panels
from diff_transformer.report.findings import versus
from diff_transformer.report.line_chart import Line, line_chart
from diff_transformer.report.markup import Html, table
from diff_transformer.report.numbers import mean, number
from diff_transformer.report.pair import NAMES, SIDES, Measured, measured
from diff_transformer.report.svg import panel

CELL = re.compile(r"(answer|noise)_depth(\d+)")


def build(results: dict) -> Figure | None:
    """Attention to the answer span and to the noise, by depth."""
    shares = measured(results, "allocation")
    depths = sorted({int(m[2]) for m in map(CELL.fullmatch, shares.names()) if m}) if shares else []
    if shares is None or not depths:
        return None
    names = {"answer": "Attention to the answer", "noise": "Attention to the noise"}
    return Figure(
        id="allocation",
        title="Where attention goes",
        source=("Table 3",),
        read="The share of attention, from the position that must answer, on the needle asked for (higher is better) "
        "and on the noise, which is the other text of the document (lower is better); mean over heads and layers.",
        body=panels(*(panel(f"{names[part]}, share", _chart(shares, part, depths)) for part in names)) + legend(),
        findings=[_finding(shares, "answer", depths, "higher"), _finding(shares, "noise", depths, "lower")],
        paper="by depth 0, 25, 50, 75, 100 %, answer: Transformer .03 .03 .03 .07 .09, DIFF .27 .30 .31 .32 .40; "
        "noise: .51 .54 .52 .49 .49 and .01 .02 .02 .02 .01.",
        data=_data(shares, depths),
    )


def _overall(shares: Measured, side: str, part: str, depths: list[int]) -> dict[int, float]:
    """By seed: the metric over all depths, or the mean of the depths there are."""
    whole = shares.seeds(side, part)
    by_depth = [shares.seeds(side, f"{part}_depth{d}") for d in depths]
    seeds = {s for values in by_depth for s in values}
    return whole or {s: mean([v[s] for v in by_depth if s in v]) or 0.0 for s in seeds}


def _finding(shares: Measured, part: str, depths: list[int], better: str):
    sides = [_overall(shares, side, part, depths) for side in SIDES]
    return versus(f"Attention to the {part}, mean over depths", sides[0], sides[1], better)


def _chart(shares: Measured, part: str, depths: list[int]) -> Html:
    lines = []
    for side in SIDES:
        by_depth = {d: shares.seeds(side, f"{part}_depth{d}") for d in depths}
        seeds = sorted({s for values in by_depth.values() for s in values})
        if len(seeds) > 1:
            for s in seeds:
                points = [(float(d), v[s]) for d, v in by_depth.items() if s in v]
                lines.append(Line("", points, side, thin=True))
        points = [(float(d), average) for d, v in by_depth.items() if (average := mean(v)) is not None]
        lines.append(Line(NAMES[side], points, side, marks=True, read=True))
    highest = max((v for line in lines for _, v in line.points), default=1.0)
    return line_chart(
        f"Attention to the {part} by depth of the needle",
        lines,
        x_label="depth of the needle, %",
        x_name="depth, %:",
        x_ticks=[(float(d), str(d)) for d in depths],
        y_range=(0.0, highest * 1.12 or 1.0),
    )


def _data(shares: Measured, depths: list[int]) -> Html:
    runs = [(side, seed) for side in SIDES for seed in shares.by_side.get(side, {})]
    rows: list[list[object]] = []
    for part in ("answer", "noise"):
        for depth in depths:
            key = f"{part}_depth{depth}"
            rows.append([f"{part}, depth {depth} %", *(number(shares.by_side[s][e].get(key), 4) for s, e in runs)])
    return table(["share of attention", *(f"{NAMES[s]}, seed {e}" for s, e in runs)], rows, "Attention allocation")
