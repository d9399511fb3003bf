"""Plots of the committed records, as SVG that is the same on every run.

python figures/plots.py          # every plot again
python figures/plots.py --check  # exit 1 if one is missing
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from record import cells_of

from diff_transformer.lab.record import Record

FIGURES = Path(__file__).resolve().parent
COLORS = {
    "softmax": "#d55e00",
    "diff": "#0072b2",
    "diff_same_rate": "#332288",
    "diff_norm1": "#56b4e9",
    "diff_v2": "#009e73",
    "softmax_norm": "#e69f00",
}
# The models of the desk study, and its settings, in the order in which they are shown.
NAMES = {
    "softmax": "Transformer",
    "diff": "DIFF, head norm from .1",
    "diff_same_rate": "DIFF, from .1, the Transformer's rate",
    "diff_norm1": "DIFF as published, head norm from 1",
    "diff_v2": "DIFF V2",
    "diff_matched": "DIFF, from the Transformer's scale (.19, .59, .9 by layer)",
    "diff_norm0.3": "DIFF, head norm from .3",
    "diff_norm0.03": "DIFF, head norm from .03",
    "diff_no_norm": "DIFF without head norm",
    "diff_lambda_0.8": "DIFF, from .1, lambda_init .8",
    "diff_lambda_0.5": "DIFF, from .1, lambda_init .5",
    "softmax_wide_norm": "Transformer, 4 heads of 32 with a head norm from .1",
    "softmax_norm": "Transformer with a head norm from .1",
    "softmax_diff_rate": "Transformer, DIFF's rate",
}
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
plt.rcParams.update(
    {
        "svg.hashsalt": "diff-transformer", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9,
        "axes.spines.top": False, "axes.spines.right": False, "text.color": "#777", "axes.labelcolor": "#777",
        "xtick.color": "#777", "ytick.color": "#777", "axes.edgecolor": "#999", "legend.frameon": False,
        "savefig.transparent": True,
    }
)  # fmt: skip


def save(figure, path: Path) -> None:
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def bands(axes, seeds: Iterable[dict], side: str, *, label: str | None = None, source: str = "") -> None:
    """Mean of the validation loss, or of a source's training loss, over seeds, and from the lowest to the highest."""
    curves = [_curve(record, source) for record in seeds]
    steps = curves[0][0]
    columns = list(zip(*(losses for _, losses in curves), strict=True))
    color = COLORS.get(side, "#cc79a7")
    axes.plot(steps, [sum(c) / len(c) for c in columns], color=color, label=label or NAMES.get(side, side), lw=1.6)
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.2, lw=0)


def draw_desk(cells: dict, folder: Path) -> None:
    """Loss curves and retrieval of the main setting, and the difference in loss in every setting."""
    from diff_transformer.lab.measures import borrow_baselines, final_loss, paired_rows

    main = cells.get("novels", {})
    if main.keys() >= {"softmax", "diff"}:
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
        for side in [name for name in NAMES if name in main]:
            bands(left, main[side].values(), side)
            bands(middle, main[side].values(), side, source="needles")
        middle.set(xlabel="step", ylabel="loss on needles' answers, nats a token", ylim=(0, 2.5))
        top = max(record.curves["validation"]["loss"][4] for record in main["softmax"].values())
        left.set(xlabel="step", ylabel="validation loss, nats a token", ylim=(None, top))
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncol=5, fontsize=9)
        tasks = ["n1_r1", "n2_r1", "n4_r1", "n4_r2"]
        shown = [name for name in NAMES if name in main]
        for i, side in enumerate(shown):
            for j, task in enumerate(tasks):
                scores = [record.metrics["needle"][task] for record in main[side].values()]
                place = j + (i - len(shown) / 2 + 0.5) * 0.17
                right.bar(place, sum(scores) / len(scores), 0.15, color=COLORS[side], alpha=0.5)
                right.plot([place] * len(scores), scores, ".", color=COLORS[side], ms=4)
        right.set(ylabel="needles found", ylim=(0, 1.02))
        right.set_xticks(range(len(tasks)), ["1 of 1", "1 of 2", "1 of 4", "2 of 4"])
        save(figure, folder / "novels.svg")
    rows, compared = [], borrow_baselines(cells)
    for setting in [name for name in SETTINGS if name in cells]:
        for side in [name for name in NAMES if name in cells[setting] and name != "softmax"]:
            rows += [(setting, side, row) for row in paired_rows(compared, setting, side, [final_loss()])]
    if rows:
        figure, axes = plt.subplots(figsize=(9, 0.9 + 0.26 * len(rows)), layout="constrained")
        for i, (_, side, row) in enumerate(reversed(rows)):
            mean, low, high, _ = row.difference
            color = COLORS.get(side, "#cc79a7")
            axes.plot([mean if low is None else low, mean if high is None else high], [i, i], color=color, lw=2)
            axes.plot(mean, i, "o", color=color)
        axes.axvline(0, color="#999", lw=0.8)
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_yticks(range(len(rows)), [f"{setting}: {NAMES[side]}" for setting, side, _ in reversed(rows)])
        axes.set_xlabel("loss less the Transformer's, nats a token (95 %)")
        save(figure, folder / "differences.svg")


def draw_stability(cells: dict, folder: Path) -> None:
    """Largest gradient norm, spikes and final loss by learning rate."""
    rates = sorted(cells, key=lambda name: float(name.removeprefix("lr")))
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
    titles = ("largest gradient norm", "spikes in a run", "final validation loss")
    for axes, title in zip(panels, titles, strict=True):
        for side in dict.fromkeys(side for rate in rates for side in cells[rate]):
            points = []
            for rate in rates:
                for record in cells[rate].get(side, {}).values():
                    value = {
                        titles[0]: record.metrics["gradients"]["largest"],
                        titles[1]: record.metrics["gradients"]["spikes"],
                        titles[2]: record.final_loss if not record.diverged else None,
                    }[title]
                    if value is not None:
                        points.append((float(rate.removeprefix("lr")), value))
            xs = sorted({x for x, _ in points})
            means = [sum(v for x, v in points if x == at) / sum(x == at for x, _ in points) for at in xs]
            color = COLORS.get(side, "#cc79a7")
            axes.plot(xs, means, color=color, label=NAMES.get(side, side))
            axes.plot([x for x, _ in points], [v for _, v in points], ".", color=color, ms=4)
        axes.set(xscale="log", xlabel="learning rate", title=title)
    panels[0].set_yscale("log")
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside upper center", ncol=4, fontsize=8)
    save(figure, folder / "stability.svg")


def _curve(record: Record, source: str) -> tuple[list, list]:
    validation = record.curves["validation"]
    losses = record.curves["sources"][source] if source else validation["loss"]
    return validation["step"][1:], losses[1:]


def main(arguments: list[str]) -> int:
    from lead import draw_lead

    missing = []
    drawn = [
        ("desk", draw_desk, ("novels.svg", "differences.svg")),
        ("desk", draw_lead, ("lead.svg",)),
        ("stability", draw_stability, ("stability.svg",)),
    ]
    for name, draw, files in drawn:
        folder = FIGURES / name
        cells = cells_of(folder) if (folder / "measured.json").exists() else {}
        if not any(not setting.startswith("sweep/") for setting in cells):
            continue
        if arguments == ["--check"]:
            missing += [f"{name}/{file}" for file in files if not (folder / file).exists()]
        else:
            draw(cells, folder)
    print("\n".join(f"figures/{path} is missing: python figures/plots.py" for path in missing), end="")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
