"""Plots of the recorded studies, drawn by the report's charts; and what the models of the studies are called."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from recall.plan import CORE, GRID
from tables import in_numbers

from diff_transformer.lab.measures import borrow_baselines, final_loss, paired_rows, trained
from diff_transformer.lab.recipes import recall as recall_recipe
from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.sides import CONTROL, name_of
from diff_transformer.lab.stats import Interval, over_seeds
from diff_transformer.report.charts import Line, Row, category_chart, grid, line_chart, row_chart
from diff_transformer.report.render import Chart

STYLES = {  # the marks and colours of the report; other models share one
    "softmax": "softmax", "diff": "diff", "diff_norm1": "s1", "diff_same_rate": "s2", "softmax_norm": "s3",
    "diff_v2": "s4",
}  # fmt: skip
# The models of the desk study, and its settings, in the order in which they are shown.
NAMES = {
    "softmax": "Transformer",
    "diff": "DIFF, head norm initialised at 0.1",
    "diff_same_rate": "DIFF, initialised at 0.1, the Transformer's rate",
    "diff_norm1": "DIFF as published (head norm initialised at 1)",
    "diff_v2": "DIFF V2",
    "diff_matched": "DIFF, matched scale (0.19, 0.59, 0.9 by layer)",
    "diff_norm0.3": "DIFF, head norm initialised at 0.3",
    "diff_norm0.03": "DIFF, head norm initialised at 0.03",
    "diff_no_norm": "DIFF without head norm",
    "diff_lambda_0.8": "DIFF, initialised at 0.1, lambda_init 0.8",
    "diff_lambda_0.5": "DIFF, initialised at 0.1, lambda_init 0.5",
    "softmax_wide_norm": "Transformer + head norm initialised at 0.1, 4 heads of 32",
    "softmax_norm": f"{name_of(CONTROL)} initialised at 0.1",
    "softmax_diff_rate": "Transformer, DIFF's rate",
    "softmax_norm1": f"{name_of(CONTROL)} initialised at 1",
    "softmax_wide_norm1": "Transformer + head norm initialised at 1, half as many heads twice as wide",
    "diff_lambda0": "DIFF, lambda = 0, head norm initialised at 1",
    "softmax_half_heads": "Transformer + head norm initialised at 0.1, half as many heads twice as wide",
    "diff_no_subtraction": "DIFF, lambda = 0, head norm initialised at 0.1",
    "dint": "DINT",
    "grouped_diff": "Grouped DIFF",
}


def matched_names(starts: Sequence[float], own_scale: Sequence[float] = ()) -> dict[str, str]:
    """What the sides of a study are called whose head norm starts at the Transformer's scale.

    Args:
        starts: DIFF's weights by layer. Its heads are multiplied by 1 - lambda_init too, those of the controls are not.
        own_scale: the weights with which the controls start at that scale, if the study has such controls.
    """
    shown, own = (", ".join(f"{x:g}" for x in of) for of in (starts, own_scale))
    same = f"head norm with DIFF's weights ({shown})"
    names = {
        "diff_matched": f"DIFF, matched scale ({shown} by layer)",
        "softmax_norm_matched": f"Transformer + {same}",
        "diff_lambda0_matched": f"DIFF, lambda = 0, {same}",
    }
    if own_scale:
        names["softmax_norm_own_scale"] = f"Transformer + head norm, own scale ({own})"
        names["diff_lambda0_own_scale"] = f"DIFF, lambda = 0, matched scale ({own})"
    return names


RATES = {"diff_same_rate": "DIFF, the Transformer's rate", "diff": "DIFF, its own rate"}  # of the main setting
SETTINGS = {
    "novels": "novels and needles, 3 layers of width 128, 8 maps of 16, 1500 steps",
    "ablation": "changed models beside the same seeds' Transformer of novels, one learning rate but where said",
    "narrow": "2 layers of width 64, 8 maps of 8, one learning rate",
    "wide": "4 layers of width 256, 8 maps of 32, one learning rate",
    "maps4": "4 maps of 32 at width 128, one learning rate",
    "maps16": "16 maps of 8 at width 128, one learning rate",
    "python": "the default corpus instead of novels, one learning rate",
    "long": "three times the steps, one learning rate",
}

# Setting -> the sides that are shown, all at the Transformer's learning rate but the published one of "novels".
LEADS = {
    "novels": ("diff_same_rate", "diff_norm1"),
    "ablation": ("softmax_norm",),
    "wide": ("diff", "softmax_norm", "diff_norm1"),
    "long": ("diff", "softmax_norm", "diff_norm1"),
}
LEAD_PANELS = {
    "novels": ("3 layers of width 128, 1500 steps", ("novels", "ablation")),
    "wide": ("4 layers of width 256, 1500 steps", ("wide",)),
    "long": ("3 layers of width 128, 4500 steps", ("long",)),
}
LEAD_STEPS = (250, 500, 1000, 1500, 3000, 4500)
TASKS = {"n1_r1": "1 of 1", "n2_r1": "1 of 2", "n4_r1": "1 of 4", "n4_r2": "2 of 4"}


def style(side: str) -> str:
    return STYLES.get(side, "s5")


def mean_and_reach(seeds: Iterable[Record], side: str, source: str = "", name: str = "") -> Line:
    """The validation loss, or the training loss of a source: mean over seeds, and a band from the lowest to the
    highest. The first point, before any training, is left out."""
    curves = [record.curves for record in seeds]
    losses = [of["sources"][source] if source else of["validation"]["loss"] for of in curves]
    steps, columns = curves[0]["validation"]["step"][1:], [*zip(*losses, strict=True)][1:]
    points = [(float(step), fmean(column)) for step, column in zip(steps, columns, strict=True)]
    band = tuple((float(step), min(column), max(column)) for step, column in zip(steps, columns, strict=True))
    return Line(name or NAMES[side], points, style(side), read=True, band=band)


def desk_charts(cells: Cells) -> dict[str, Chart]:
    """Loss curves and retrieval of the main setting, and the difference in loss in every setting."""
    made, main = {}, cells.get("novels", {})
    sides = [name for name in NAMES if name in main]
    if main.keys() >= {"softmax", "diff"}:
        loss = [mean_and_reach(main[side].values(), side) for side in sides]
        needles = [mean_and_reach(main[side].values(), side, "needles") for side in sides]
        lowest = min(value for line in loss for _, value, _ in line.band)
        highest = max(record.curves["validation"]["loss"][4] for record in main["softmax"].values())
        found = {
            style(side): [
                {seed: record.metrics["needle"][task] for seed, record in main[side].items()} for task in TASKS
            ]
            for side in sides
        }
        named = {style(side): NAMES[side] for side in sides}
        panels = [
            ("validation loss, nats a token",
             line_chart("Validation loss", loss, x_label="step", y_range=(lowest - 0.05, highest), width=300)),
            ("loss on needles' answers, nats a token",
             line_chart("Loss on needles' answers", needles, x_label="step", y_range=(0.0, 2.5), width=300)),
            ("needles found, share",
             category_chart("Needles found", list(TASKS.values()), found, bars=True, y_range=(0.0, 1.02), width=300,
                            x_label="needles asked for", names=named)),
        ]  # fmt: skip
        made["novels.svg"] = grid(panels, named)
    rows, compared = [], borrow_baselines(cells)
    for setting in [name for name in SETTINGS if name in cells]:
        for side in [name for name in NAMES if name in cells[setting] and name != "softmax"]:
            for row in paired_rows(compared, setting, side, [final_loss()]):
                mean, low, high, _ = row.difference
                rows.append(Row(f"{setting}: {NAMES[side]}", style(side), {0: mean}, low, high))
    if rows:
        label = "Loss, difference from the Transformer, nats a token, with 95 % CIs"
        made["differences.svg"] = grid([("", row_chart(label, rows, x_label=label, guide=0, width=420))], {})
    return made


def by_step(cells: Cells, setting: str, side: str) -> dict[int, Interval]:
    """The difference of ``side`` from the Transformer in validation loss, over seeds, at each step that both have."""
    sides = borrow_baselines(cells).get(setting, {})
    ours, theirs = trained(sides.get(side, {})), trained(sides.get("softmax", {}))
    gaps: dict[int, list[float]] = {}
    for seed in sorted(ours.keys() & theirs.keys()):
        mine, other = _losses(ours[seed]), _losses(theirs[seed])
        for step in mine.keys() & other.keys() - {0}:
            gaps.setdefault(step, []).append(mine[step] - other[step])
    return {step: over_seeds(gaps[step]) for step in sorted(gaps)}


def _losses(record: Record) -> dict[int, float]:
    curve = record.curves["validation"]
    return {int(step): loss for step, loss in zip(curve["step"], curve["loss"], strict=True)}


def lead_table(cells: Cells) -> str:
    """A line a setting and side, a column a step; empty before there is anything."""
    lines = []
    for setting, side in [(setting, side) for setting, sides in LEADS.items() for side in sides]:
        found = by_step(cells, setting, side)
        shown = (in_numbers(found[step]) if step in found else "" for step in LEAD_STEPS)
        if found:
            lines.append(f"| {setting} | {NAMES[side]} | {' | '.join(shown)} |")
    if not lines:
        return ""
    heads = ("setting", "side", *(f"step {step}" for step in LEAD_STEPS))
    title = "**Validation loss, difference from the Transformer, while they are trained** (95 % over seeds)"
    return "\n".join([title, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def lead_charts(cells: Cells) -> dict[str, Chart]:
    """A panel for each size and length of training; bands are 95 % CIs over seeds."""
    panels, named = [], {}
    for title, places in (LEAD_PANELS[name] for name in LEAD_PANELS if name in cells):
        lines = []
        for setting, side in [(place, side) for place in places for side in LEADS[place]]:
            model = "diff" if side == "diff_same_rate" else side  # in these settings both have one rate
            found = by_step(cells, setting, side)
            if found:
                named[style(model)] = NAMES[model]
                points = [(float(step), gap.mean) for step, gap in found.items()]
                band = tuple((float(s), g.low, g.high) for s, g in found.items() if None not in (g.low, g.high))
                lines.append(Line(NAMES[model], points, style(model), read=True, band=band))
        chart = line_chart(
            f"Validation loss, difference from the Transformer: {title}", lines, x_label="step", y_range=(-0.45, 0.45),
            guides=[(0.0, "")], width=300,
        )  # fmt: skip
        panels.append((title, chart))
    return {"lead.svg": grid(panels, named)} if panels else {}


OBJECTIVE = {"diff_same_rate": "novels", "diff_norm1": "novels", "softmax_norm": "ablation"}  # side -> its setting
SOURCES = {"prose": ("text",), "needles": ("needles",), "objective: the mean of both": ("text", "needles")}


def objective_charts(cells: Cells) -> dict[str, Chart]:
    """What the main setting minimises, and its two halves: differences from the Transformer, 95 % over seeds."""
    home, panels = cells.get("novels", {}).get("softmax", {}), []
    for title, sources in SOURCES.items():
        lines = []
        for side, setting in OBJECTIVE.items():
            theirs, ours = home, cells.get(setting, {}).get(side, {})
            seeds = sorted(ours.keys() & theirs.keys())
            if seeds:
                at = ours[seeds[0]].curves["validation"]["step"][1:]
                losses = [(_mean_loss(ours[seed], sources), _mean_loss(theirs[seed], sources)) for seed in seeds]
                gaps = [over_seeds([mine[i] - other[i] for mine, other in losses]) for i in range(len(at))]
                points = [(float(step), gap.mean) for step, gap in zip(at, gaps, strict=True)]
                band = tuple(
                    (float(s), g.low, g.high) for s, g in zip(at, gaps, strict=True) if None not in (g.low, g.high)
                )
                lines.append(Line(NAMES[side], points, style(side), read=True, band=band))
        chart = line_chart(f"Training loss, difference from the Transformer: {title}", lines, x_label="step",
                           y_range=(-0.6, 0.9), guides=[(0.0, "")], width=300)  # fmt: skip
        panels.append((title, chart))
    return {"objective.svg": grid(panels, {style(side): NAMES[side] for side in OBJECTIVE})} if home else {}


def _mean_loss(record: Record, sources: tuple[str, ...]) -> list[float]:
    return [fmean(of) for of in zip(*(record.curves["sources"][name][1:] for name in sources), strict=True)]


def stability_charts(cells: Cells) -> dict[str, Chart]:
    """Largest gradient norm, spikes and final loss by learning rate; small marks are runs."""
    rates = sorted(cells, key=lambda name: float(name.removeprefix("lr")))
    sides = list(dict.fromkeys(side for rate in rates for side in cells[rate]))
    read: dict[str, Callable[[Record], float | None]] = {
        "largest gradient norm": lambda record: record.metrics["gradients"]["largest"],
        "spikes in a run": lambda record: record.metrics["gradients"]["spikes"],
        "final validation loss": lambda record: None if record.diverged else record.final_loss,
    }
    panels = []
    for title, value in read.items():
        lines = []
        for side in sides:
            points = [
                (float(rate.removeprefix("lr")), float(found))
                for rate in rates
                for record in cells[rate].get(side, {}).values()
                if (found := value(record)) is not None
            ]
            means = [(at, fmean(v for x, v in points if x == at)) for at in sorted({x for x, _ in points})]
            lines.append(Line(NAMES[side], points, style(side), thin=True, joined=False))
            lines.append(Line(NAMES[side], means, style(side), read=True))
        ticks = [(float(rate.removeprefix("lr")), rate.removeprefix("lr")) for rate in rates]
        log = title.endswith("norm")
        chart = line_chart(title, lines, x_label="learning rate", x_name="learning rate", x_ticks=ticks, log_x=True,
                           log_y=log, width=280)  # fmt: skip
        panels.append((title, chart))
    return {"stability.svg": grid(panels, {style(side): NAMES[side] for side in sides})} if rates else {}


def recall_charts(cells: Cells) -> dict[str, Chart]:
    """Accuracy by step: the core's sides in each setting of the grid, and with 8 pairs the controls below them.

    Each line is a mean over seeds, with a band from the lowest to the highest.
    """
    names = NAMES | matched_names(recall_recipe.MATCHED)
    with_8 = [where for where, (pairs, _) in GRID.items() if pairs == 8]
    scaled = ("softmax", "diff_matched", "softmax_norm_matched", "diff_lambda0_matched")
    drawn = {"recall.svg": [(GRID, CORE)], "controls.svg": [(with_8, CORE), (with_8, scaled)]}
    charts = {}
    for file, parts in drawn.items():
        panels, named = [], {}
        for where, of in ((where, of) for settings, of in parts for where in settings if where in cells):
            pairs, noise = GRID[where]
            shown = {side: names[side] for side in of}
            panels.append(_accuracy(f"{pairs} pairs, {noise} noise tokens each", cells[where], "recall", shown, named))
        if panels:
            charts[file] = grid(panels, named)
    return charts


_PANEL = {"width": 260, "height": 150}
_MARKS = {"softmax_norm1": "s3", "diff_matched": "s2", "softmax_norm_matched": "s4", "diff_lambda0_matched": "s5"}


def _accuracy(title: str, runs: dict, curve: str, sides: dict[str, str], named: dict[str, str]) -> tuple[str, Chart]:
    """A panel: the accuracy of each side by step. ``sides``: their names. ``named`` gets those by mark."""
    lines = []
    for side in [name for name in sides if name in runs]:
        curves = [record.curves[curve] for record in trained(runs[side]).values()]
        columns = list(zip(*(each["accuracy"] for each in curves), strict=True))
        steps = [float(step) for step in curves[0]["step"]] if curves else []
        named[_mark(side)] = sides[side]
        lines.append(_mean_and_band(sides[side], side, steps, columns))
    return title, line_chart(title, lines, x_label="step", y_range=(0.0, 1.02), **_PANEL)


def _mean_and_band(name: str, side: str, at: list[float], columns: list) -> Line:
    """The mean over seeds, and a band from the lowest to the highest; ``columns`` has the seeds' values at each x."""
    pairs = [(x, column) for x, column in zip(at, columns, strict=True) if column]
    band = tuple((x, min(column), max(column)) for x, column in pairs)
    return Line(name, [(x, fmean(column)) for x, column in pairs], _mark(side), read=True, band=band)


def _mark(side: str) -> str:
    return _MARKS.get(side, style(side))
