"""How far a model is ahead of the Transformer of the same seed while they are trained: a plot and a table of it."""

from pathlib import Path

import matplotlib.pyplot as plt
from plots import COLORS, NAMES, save
from tables import in_numbers

from diff_transformer.lab.measures import borrow_baselines, trained
from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.stats import Interval, over_seeds

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


def draw_lead(cells: Cells, folder: Path) -> None:
    """A panel a size and length of training; bands are 95 % intervals over seeds."""
    panels = [name for name in PANELS if name in cells]
    if not panels:
        return
    figure, frames = plt.subplots(1, len(panels), figsize=(11, 3.4), layout="constrained", sharey=True, squeeze=False)
    for axes, name in zip(frames[0], panels, strict=True):
        shown = [(setting, side) for setting in PANELS[name][1] for side in SHOWN[setting]]
        for setting, side in shown:
            found = by_step(cells, setting, side)
            if not found:
                continue
            model = "diff" if side == "diff_same_rate" else side  # here they have the same rate
            color = COLORS[model]
            axes.plot(list(found), [gap.mean for gap in found.values()], color=color, lw=1.6, label=NAMES[model])
            known = {step: gap for step, gap in found.items() if gap.low is not None}
            axes.fill_between(
                list(known), [g.low for g in known.values()], [g.high for g in known.values()],
                color=color, alpha=0.2, lw=0,
            )  # fmt: skip
        axes.axhline(0, color="#999", lw=0.8)
        axes.set(title=PANELS[name][0], xlabel="step", ylim=(-0.45, 0.45))
    frames[0][0].set(ylabel="validation loss less the Transformer's")
    handles = {label: h for axes in frames[0] for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncol=3)
    save(figure, folder / "lead.svg")
