"""Multi-needle retrieval: accuracy by number of needles, by depth, and by length."""

import re

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import needle
from diff_transformer.report.charts import Line, averaged, category_chart, heat_map, line_chart
from diff_transformer.report.figure import Figure, Finding, folded, key, panels
from diff_transformer.report.markup import Html, mean, number, short, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in, names_of
from diff_transformer.report.render import Chart, panel

EVAL = "needle"
CELL = re.compile(r"n(\d+)_r(\d+)(?:_len(\d+))?(?:_depth(\d+))?")
Grid = tuple[int, int]  # needles in the context, needles asked for


def build(results: Results) -> Figure | None:
    """Bars by (N, R), one heat map a model of depth by (N, R), and one for each (N, R) of depth by length."""
    models = models_in(results, EVAL)
    found = [m.groups() for m in map(CELL.fullmatch, (name for one in models for name in one.names())) if m]
    grids = sorted({(int(n), int(r)) for n, r, _, _ in found})
    lengths = sorted({int(length) for _, _, length, _ in found if length})
    depths = sorted({int(d) for _, _, _, d in found if d})
    if not grids:
        return None
    chance = mean([v for one in models for v in one.seeds("chance").values()])
    maps = [_map(one, grids, depths) for one in models] if depths else []
    by_length = [_length_map(one, grid, lengths, depths) for grid in grids for one in models] if lengths else []
    return Figure(
        id="needles",
        title="Multi-needle retrieval",
        source=("Table 2", "Fig. 5"),
        read="Each document hides N needles (a city and its number) and asks for R of them. Accuracy is the share "
        "of the R numbers that are exactly right. Depth is the position of the first needle asked for: 0 % is "
        "the start of the document.",
        body=panels(
            panel("Accuracy, mean over depths", _bars(models, grids, chance)),
            panel("Accuracy by depth, mean over (N, R)", _by_depth(models, grids, depths)) if len(depths) > 1 else None,
        )
        + (legend_of(models) if chance is None else legend_of(models, key("dashed", f"chance, {number(chance)}")))
        + (folded("Maps of depth by number of needles", panels(*maps)) if maps else "")
        + (folded("Maps of depth by length", panels(*by_length)) if by_length else ""),
        findings=_findings(results, models, grids, chance),
        paper=SAID["needle"],
        data=_data(models, grids, lengths, depths),
    )


def cell(grid: Grid, depth: int | None = None, length: int | None = None) -> str:
    """The metric of a cell, as the needle eval names it."""
    at = "" if length is None else f"_len{length}"
    return f"n{grid[0]}_r{grid[1]}{at}" + ("" if depth is None else f"_depth{depth}")


def _accuracy(model: Series, grid: Grid) -> dict[int, float]:
    """By seed: the metric over all depths, or the mean of the depths there are."""
    whole = model.seeds(cell(grid))
    if whole:
        return whole
    parts = {
        seed: [v for k, v in metrics.items() if k.startswith(f"{cell(grid)}_depth")]
        for seed, metrics in model.metrics.items()
    }
    return {seed: sum(values) / len(values) for seed, values in parts.items() if values}


def _bars(models: list[Series], grids: list[Grid], chance: float | None) -> Chart:
    return category_chart(
        "Needle accuracy by number of needles",
        [f"{n}, {r}" for n, r in grids],
        {one.side: [_accuracy(one, g) for g in grids] for one in models},
        x_label="needles in the document, needles asked for (N, R)",
        bars=True,
        y_range=(0.0, 1.05),
        guides=[] if chance is None else [(chance, "")],
        names=names_of(models),
    )


def _by_depth(models: list[Series], grids: list[Grid], depths: list[int]) -> Chart:
    lines = []
    for one in models:
        runs = [
            [(float(d), v) for d in depths if (v := mean([m[k] for g in grids if (k := cell(g, d)) in m])) is not None]
            for m in one.metrics.values()
        ]
        if len(runs) > 1:
            lines += [Line("", run, one.side, thin=True) for run in runs]
        lines.append(Line(one.label, averaged(runs), one.side, marks=True, read=True))
    return line_chart(
        "Needle accuracy by depth",
        lines,
        x_label="depth of the needle asked for, %",
        x_name="depth, %:",
        x_ticks=[(float(d), str(d)) for d in depths],
        y_range=(0.0, 1.05),
    )


def _map(model: Series, grids: list[Grid], depths: list[int]) -> Html:
    columns = [(f"{n}, {r}", f"N = {n}, R = {r}", (n, r), None) for n, r in grids]
    label = f"Needle accuracy of {model.label}, depth by number of needles"
    return panel(f"{model.label}: accuracy by depth", _grid(model, label, columns, depths, "(N, R)"))


def _length_map(model: Series, grid: Grid, lengths: list[int], depths: list[int]) -> Html:
    n, r = grid
    columns = [(short(length).replace(" ", ""), f"{length:,} tokens", grid, length) for length in lengths]
    label = f"Needle accuracy of {model.label}, N = {n}, R = {r}, depth by length"
    title = f"{model.label}: N = {n}, R = {r}, by length and depth"
    return panel(title, _grid(model, label, columns, depths, "tokens"))


def _grid(model: Series, label: str, columns: list[tuple], depths: list[int], x_label: str) -> Chart:
    """A heat map of depth by ``columns`` (name, words, (N, R), length); its last row is the mean over depths."""
    rows = [*depths, None] if len(depths) > 1 else depths

    def values(row: int, column: int) -> dict[int, float]:
        _, _, grid, length = columns[column]
        return model.seeds(cell(grid, rows[row], length))

    def tip(row: int, column: int) -> str:
        depth = "mean over depths" if rows[row] is None else f"depth {rows[row]} %"
        each = "\n".join(f"seed {s}: {number(v)}" for s, v in values(row, column).items())
        return f"{model.label}, {columns[column][1]}, {depth}\n{each}"

    return heat_map(
        label,
        ["mean" if d is None else f"{d} %" for d in rows],
        [name for name, *_ in columns],
        lambda row, column: mean(values(row, column)),
        tip,
        x_label=x_label,
        y_label="depth",
    )


def _findings(results: Results, models: list[Series], grids: list[Grid], chance: float | None) -> list[Finding | None]:
    said: list[Finding | None] = []
    for n, r in grids:
        values = [_accuracy(one, (n, r)) for one in models]
        said.append(compared(f"N = {n}, R = {r}", models, values, "higher", of=(results, needle(n, r))))
        best = max((mean(found) or 0.0 for found in values), default=0.0)
        if chance is not None and best < 2 * chance:
            who = "no model" if len(models) > 2 else "neither model" if len(models) == 2 else models[0].label
            verb = "is not" if len(models) == 1 else "is"
            said.append(Finding("note", f"N = {n}, R = {r}: {who} {verb} clear of chance ({number(chance)})."))
    return said


def _data(models: list[Series], grids: list[Grid], lengths: list[int], depths: list[int]) -> Html:
    runs = [(one, seed) for one in models for seed in one.metrics]
    keys = [(f"N = {n}, R = {r}, all depths", cell((n, r))) for n, r in grids]
    keys += [(f"N = {n}, R = {r}, depth {d} %", cell((n, r), d)) for n, r in grids for d in depths]
    for n, r in grids:
        for length in lengths:
            keys.append((f"N = {n}, R = {r}, {length:,} tokens, all depths", cell((n, r), None, length)))
            keys += [(f"N = {n}, R = {r}, {length:,} tokens, depth {d} %", cell((n, r), d, length)) for d in depths]
    rows: list[list[object]] = [[name, *(number(one.metrics[s].get(k)) for one, s in runs)] for name, k in keys]
    cells = table(["accuracy", *(f"{one.label}, seed {s}" for one, s in runs)], rows, "Needle accuracy")
    examples = [_example(one.label, row) for one in models for row in one.rows()[:3]]
    head: list[object] = ["model", "N, R", "depth", "expected", "got", "end of the prompt"]
    return Html(cells + (table(head, examples, "Needle examples", numeric=False) if examples else ""))


def _example(model: str, row: dict) -> list[object]:
    grid = f"{row.get('needles', '')}, {row.get('queries', '')}"
    expected, got, prompt = (str(row.get(k, "")) for k in ("expected", "got", "prompt"))
    depth = row.get("depth")
    shown = f"{100 * depth:.0f} %" if isinstance(depth, float) and 0 <= depth <= 1 else depth
    return [model, grid, shown, expected[:60], got[:60], prompt[-220:]]
