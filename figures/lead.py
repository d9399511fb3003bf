"""How far a model is ahead of the Transformer of the same seed while they are trained: a plot and a table of it."""

from plots import NAMES, style
from tables import in_numbers

from diff_transformer.lab.measures import borrow_baselines, trained
from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.stats import Interval, over_seeds
from diff_transformer.report.charts import Chart, Line, grid, line_chart

# Setting -> the sides that are shown, all at the Transformer's learning rate but the published one of "novels".
SHOWN = {
    "novels": ("diff_same_rate", "diff_norm1"),
    "ablation": ("softmax_norm",),
    "wide": ("diff", "softmax_norm", "diff_norm1"),
    "long": ("diff", "softmax_norm", "diff_norm1"),
}
PANELS = {
    "novels": ("3 layers of width 128, 1500 steps", ("novels", "ablation")),
    "wide": ("4 layers of width 256, 1500 steps", ("wide",)),
    "long": ("3 layers of width 128, 4500 steps", ("long",)),
}
STEPS = (250, 500, 1000, 1500, 3000, 4500)


def by_step(cells: Cells, setting: str, side: str) -> dict[int, Interval]:
    """The validation loss of ``side`` less the Transformer's, over seeds, at each step at which both have it."""
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
    for setting, side in [(setting, side) for setting, sides in SHOWN.items() for side in sides]:
        found = by_step(cells, setting, side)
        shown = (in_numbers(found[step]) if step in found else "" for step in STEPS)
        if found:
            lines.append(f"| {setting} | {NAMES[side]} | {' | '.join(shown)} |")
    if not lines:
        return ""
    heads = ("setting", "side", *(f"step {step}" for step in STEPS))
    title = "**Validation loss less the Transformer's, while they are trained** (95 % over seeds)"
    return "\n".join([title, "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def lead_charts(cells: Cells) -> dict[str, Chart]:
    """A panel for each size and length of training; bands are 95 % intervals over seeds."""
    panels, named = [], {}
    for title, places in (PANELS[name] for name in PANELS if name in cells):
        lines = []
        for setting, side in [(place, side) for place in places for side in SHOWN[place]]:
            model = "diff" if side == "diff_same_rate" else side  # in these settings both have one rate
            found = by_step(cells, setting, side)
            if found:
                named[style(model)] = NAMES[model]
                points = [(float(step), gap.mean) for step, gap in found.items()]
                band = tuple((float(s), g.low, g.high) for s, g in found.items() if None not in (g.low, g.high))
                lines.append(Line(NAMES[model], points, style(model), read=True, band=band))
        chart = line_chart(
            f"Validation loss less the Transformer's: {title}", lines, x_label="step", y_range=(-0.45, 0.45),
            guides=[(0.0, "")], width=300,
        )  # fmt: skip
        panels.append((title, chart))
    return {"lead.svg": grid(panels, named)} if panels else {}
