"""Multi-needle retrieval: accuracy by number of needles and by depth."""

import re

from diff_transformer.report.category_chart import category_chart
from diff_transformer.report.figure import Figure, key, legend, panels
from diff_transformer.report.findings import Finding, versus
from diff_transformer.report.heat_map import heat_map
from diff_transformer.report.line_chart import Line, averaged, line_chart
from diff_transformer.report.markup import Html, table
from diff_transformer.report.numbers import mean, number
from diff_transformer.report.pair import NAMES, SIDES, Measured, dicts, measured, side_of
from diff_transformer.report.svg import panel

CELL = re.compile(r"n(\d+)_r(\d+)(?:_depth(\d+))?")
Grid = tuple[int, int]  # needles in the context, needles asked for


def build(results: dict) -> Figure | None:
    """Bars by (N, R), and one heat map a model: depth by (N, R)."""
    needles = measured(results, "needle")
    if needles is None:
        return None
    found = [m.groups() for m in map(CELL.fullmatch, needles.names()) if m]
    grids = sorted({(int(n), int(r)) for n, r, _ in found})
    depths = sorted({int(d) for _, _, d in found if d})
    if not grids:
        return None
    chance = mean([v for side in SIDES for v in needles.seeds(side, "chance").values()])
    maps = [_map(needles, side, grids, depths) for side in SIDES if depths and side in needles.by_side]
    return Figure(
        id="needles",
        title="Multi-needle retrieval",
        source=("Table 2", "Fig. 5"),
        read="Each document hides N needles (a city and its number) and asks for R of them. Accuracy is the share "
        "of the R numbers given exactly; depth is where in the document the needle asked for stands: 0 % is the start.",
        body=panels(
            panel("Accuracy, mean over depths", _bars(needles, grids, chance)),
            panel("Accuracy by depth, mean over (N, R)", _by_depth(needles, grids, depths))
            if len(depths) > 1
            else None,
        )
        + (legend() if chance is None else legend(key("dashed", f"chance, {number(chance)}")))
        + (panels(*maps) if maps else ""),
        findings=_findings(needles, grids, chance),
        paper="at 3 B and 4 K tokens, (N,R) = (1,1) (2,2) (4,2) (6,2): Transformer 1.00 .85 .62 .55, "
        "DIFF 1.00 .92 .84 .85 †.",
        data=_data(results, needles, grids, depths),
    )


def cell(grid: Grid, depth: int | None = None) -> str:
    """The metric of a cell, as the needle eval names it."""
    return f"n{grid[0]}_r{grid[1]}" + ("" if depth is None else f"_depth{depth}")


def _accuracy(needles: Measured, side: str, grid: Grid) -> dict[int, float]:
    """By seed: the metric over all depths, or the mean of the depths there are."""
    whole = needles.seeds(side, cell(grid))
    if whole:
        return whole
    parts = {
        s: [v for k, v in m.items() if k.startswith(f"{cell(grid)}_depth")] for s, m in needles.by_side[side].items()
    }
    return {seed: sum(values) / len(values) for seed, values in parts.items() if values}


def _bars(needles: Measured, grids: list[Grid], chance: float | None) -> Html:
    values = {s: [_accuracy(needles, s, g) for g in grids] for s in SIDES if s in needles.by_side}
    return category_chart(
        "Needle accuracy of DIFF and Transformer by number of needles",
        [f"{n}, {r}" for n, r in grids],
        values,
        x_label="needles in the document, needles asked for (N, R)",
        bars=True,
        y_range=(0.0, 1.05),
        guides=[] if chance is None else [(chance, "")],
    )


def _by_depth(needles: Measured, grids: list[Grid], depths: list[int]) -> Html:
    lines = []
    for side in (s for s in SIDES if s in needles.by_side):
        runs = [
            [(float(d), v) for d in depths if (v := mean([m[k] for g in grids if (k := cell(g, d)) in m])) is not None]
            for m in needles.by_side[side].values()
        ]
        if len(runs) > 1:
            lines += [Line("", run, side, thin=True) for run in runs]
        lines.append(Line(NAMES[side], averaged(runs), side, marks=True, read=True))
    return line_chart(
        "Needle accuracy by depth",
        lines,
        x_label="depth of the needle asked for, %",
        x_name="depth, %:",
        x_ticks=[(float(d), str(d)) for d in depths],
        y_range=(0.0, 1.05),
    )


def _map(needles: Measured, side: str, grids: list[Grid], depths: list[int]) -> Html:
    def value(row: int, column: int) -> float | None:
        return needles.mean(side, cell(grids[column], depths[row]))

    def tip(row: int, column: int) -> str:
        (n, r), depth = grids[column], depths[row]
        seeds = needles.seeds(side, cell(grids[column], depth))
        each = "\n".join(f"seed {s}: {number(v)}" for s, v in seeds.items())
        return f"{NAMES[side]}, N = {n}, R = {r}, depth {depth} %\n{each}"

    drawing = heat_map(
        f"Needle accuracy of {NAMES[side]}, depth by number of needles",
        [f"{d} %" for d in depths],
        [f"{n}, {r}" for n, r in grids],
        value,
        tip,
        x_label="(N, R)",
        y_label="depth",
    )
    return panel(f"{NAMES[side]}: accuracy by depth", drawing)


def _findings(needles: Measured, grids: list[Grid], chance: float | None) -> list[Finding | None]:
    said: list[Finding | None] = []
    for n, r in grids:
        sides = [_accuracy(needles, s, (n, r)) if s in needles.by_side else {} for s in SIDES]
        said.append(versus(f"N = {n}, R = {r}", sides[0], sides[1], "higher"))
        best = max((mean(side) or 0.0 for side in sides), default=0.0)
        if chance is not None and best < 2 * chance:
            said.append(Finding("note", f"N = {n}, R = {r}: neither model is clear of chance ({number(chance)})."))
    return said


def _data(results: dict, needles: Measured, grids: list[Grid], depths: list[int]) -> Html:
    runs = [(side, seed) for side in SIDES for seed in needles.by_side.get(side, {})]
    keys = [(f"N = {n}, R = {r}, all depths", cell((n, r))) for n, r in grids]
    keys += [(f"N = {n}, R = {r}, depth {d} %", cell((n, r), d)) for n, r in grids for d in depths]
    rows: list[list[object]] = [[name, *(number(needles.by_side[s][e].get(k)) for s, e in runs)] for name, k in keys]
    cells = table(["accuracy", *(f"{NAMES[s]}, seed {e}" for s, e in runs)], rows, "Needle accuracy")
    examples = [
        _example(NAMES[side_of(entry)], row)
        for entry in dicts(results.get("evals"))
        if entry.get("eval") == "needle"
        for row in dicts(entry.get("rows"))[:3]
    ]
    head: list[object] = ["model", "N, R", "depth", "expected", "got", "end of the prompt"]
    return Html(cells + (table(head, examples, "Needle examples", numeric=False) if examples else ""))


def _example(model: str, row: dict) -> list[object]:
    grid = f"{row.get('needles', '')}, {row.get('queries', '')}"
    expected, got, prompt = (str(row.get(k, "")) for k in ("expected", "got", "prompt"))
    depth = row.get("depth")
    shown = f"{100 * depth:.0f} %" if isinstance(depth, float) and 0 <= depth <= 1 else depth
    return [model, grid, shown, expected[:60], got[:60], prompt[-220:]]
