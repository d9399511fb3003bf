"""Plots of the folders of the paper's tables and figures: ours beside the paper's, where its numbers are known."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from paper import ABLATED, TABLE_6, Panel
from plots import COLORS, NAMES, RATES, bands, plt, save

from diff_transformer.lab.measures import Row
from diff_transformer.lab.run_tables import Run

Numbers = dict[str, dict[str, list[float]]]  # side -> metric -> a number for each seed


def draw_folder(panels: Sequence[Panel], ours: Numbers, expected: dict, path: Path) -> None:
    """The panels side by side (in two rows from four on): means over seeds, with a dot for each seed where there are
    several."""
    across = len(panels) if len(panels) < 4 else len(panels) // 2
    figure, grid = plt.subplots(
        -(-len(panels) // across),
        across,
        figsize=(3.6 * across, 2.7 * -(-len(panels) // across)),
        squeeze=False,
        layout="constrained",
    )
    for axes, panel in zip(grid.flat, panels, strict=True):
        of = ours
        if panel.paper:
            entry = expected[panel.paper]
            of = {
                side: {key: [value] for key, value in entry.get(name, entry.get(f"{name} 3B", {})).items()}
                for side, name in (("softmax", "Transformer"), ("diff", "DIFF"))
            }
        ticks = ticks_of(panel, of)
        sides = [(side, numbers) for side, numbers in of.items() if any(key in numbers for key in ticks.values())]
        for i, (side, numbers) in enumerate(sides):
            width = 0.72 / len(sides)
            shift = 0 if panel.line or len(sides) == 1 else width * (i + 0.5) - 0.36
            shown = [(j, numbers[key]) for j, key in enumerate(ticks.values()) if key in numbers]
            color, name = COLORS[side], NAMES["softmax"] if side == "softmax" else "DIFF"
            if "diff_same_rate" in of:
                name = RATES.get(side, name)
            means = [sum(values) / len(values) for _, values in shown]
            if panel.line:
                axes.plot([j for j, _ in shown], means, "o-", color=color, label=name, ms=3)
            else:
                axes.bar([j + shift for j, _ in shown], means, 0.94 * width, color=color, alpha=0.55, label=name)
            for j, values in shown:
                if len(values) > 1:
                    axes.plot([j + shift] * len(values), values, ".", color=color, ms=4)
        if panel.level and (level := of.get("softmax", {}).get(panel.level)):
            axes.axhline(level[0], color="#999", lw=0.8, ls=":")
            axes.annotate(panel.level, (0, level[0]), color="#777", fontsize=7, va="bottom")
        axes.set_xticks(range(len(ticks)), list(ticks), fontsize=7)
        axes.set_title(panel.title, fontsize=9, color="#777")
        axes.set_ylabel(panel.label)
        if panel.log:
            axes.set_yscale("log")
        elif not panel.line:
            axes.set_ylim(bottom=0)
    marks = {name: mark for axes in grid.flat for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(marks.values(), marks, loc="outside upper center", ncol=3 if across > 1 else 1, fontsize=7)
    save(figure, path)


def ticks_of(panel: Panel, numbers: Numbers) -> dict[str, str]:
    """Label -> name of the number, of those that there are."""
    known = dict.fromkeys(key for side in numbers.values() for key in side)
    if isinstance(panel.ticks, str):
        found = [match for key in known if (match := re.fullmatch(panel.ticks, key))]
        return {match[1]: match[0] for match in sorted(found, key=lambda match: int(match[1]))}
    return {label: key for label, key in panel.ticks.items() if key in known}


def draw_scaling(runs: Sequence[Run], seeds: dict[str, list[dict]], path: Path) -> None:
    """Left: the final loss of every run by size. Right: the loss along training of the ``seeds`` of each side."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.9))
    for side in ("softmax", "diff"):
        found = [run for run in runs if run.model == side and run.part == "final"]
        sizes = sorted({run.parameters for run in found})
        losses = [[run.loss for run in found if run.parameters == size] for size in sizes]
        left.plot([run.parameters for run in found], [run.loss for run in found], ".", color=COLORS[side], ms=4)
        means = [sum(of) / len(of) for of in losses]
        left.plot(sizes, means, "-", color=COLORS[side], label="DIFF" if side == "diff" else NAMES[side])
        if seeds[side]:
            bands(right, seeds[side], side, label="DIFF" if side == "diff" else NAMES[side])
    counts = [run.parameters for run in runs]
    left.set(xscale="log", xlabel="parameters", ylabel="validation loss, nats a token")
    left.set_xlim(min(counts) / 1.6, max(counts) * 1.6)
    trained = sorted({run.parameters for run in runs if run.part == "final" and run.model == "softmax"})
    left.set_xticks(trained, [f"{count / 1e6:.2f}M" for count in trained])
    left.minorticks_off()
    right.set(xlabel="step (equal tokens a step)", ylim=(None, right.get_ylim()[0] + 2))
    left.legend(fontsize=7)
    save(figure, path)


def draw_ablation(rows: dict[str, list[Row]], expected: dict, path: Path) -> None:
    """Losses less the Transformer's by model: ours with intervals, the paper's as points."""
    baseline = expected["rows"]["transformer"][3:]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.9), sharey=True)
    for j, mark in enumerate(("o", "^", "s")):
        shift = 0.2 * (j - 1)
        for i, of in enumerate(rows.values()):
            mean, low, high, _ = of[j].difference
            left.plot(
                [low if low is not None else mean, high if high is not None else mean],
                [i + shift] * 2,
                color="#0072b2",
                lw=1.4,
            )
            left.plot(mean, i + shift, mark, color="#0072b2", ms=4, label=TABLE_6[j].name if i == 0 else None)
        paper = [expected["rows"][ABLATED[side][1]][3 + j] - baseline[j] for side in rows]
        right.plot(paper, [i + shift for i in range(len(rows))], mark, color="#0072b2", ms=4, ls="")
    for axes, title in ((left, "ours"), (right, "paper, 1.4B")):
        axes.axvline(0, color="#999", lw=0.8)
        axes.set_title(f"{title}: loss less the Transformer's", fontsize=9, color="#777")
    left.set_yticks(range(len(rows)), [ABLATED[side][0] for side in rows], fontsize=7)
    left.invert_yaxis()
    left.legend(fontsize=7)
    save(figure, path)


def draw_throughput(record: Path, folder: Path) -> None:
    """DIFF's tokens/s as a share of the Transformer's: the paper's settings, and ours."""
    expected = json.loads((folder / "expected.json").read_text())
    rows = json.loads(record.read_text())["rows"]
    shares = [
        (f"paper, {name}", *(found["DIFF"][i] / found["Transformer"][i] for i in (0, 1)))
        for name, found in expected["tokens_per_second"].items()
    ]
    for row in rows:
        if row["side"] == "diff":
            width = row["fields"].get("hidden_size", 128)
            shares.append(
                (
                    f"ours, width {width}, {row['batch']} x {row['length']}",
                    row["forward_backward_ratio"],
                    row["prefill_ratio"],
                )
            )
    figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.42 * len(shares)))
    for j, (name, color) in enumerate((("forward + backward", "#0072b2"), ("forward", "#56b4e9"))):
        axes.barh(
            [i + 0.36 * j - 0.18 for i in range(len(shares))],
            [share[1 + j] for share in shares],
            0.34,
            color=color,
            label=name,
        )
    axes.axvline(1, color="#999", lw=0.8)
    axes.set_yticks(range(len(shares)), [share[0] for share in shares], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0.8, None), xlabel="tokens/s of DIFF over the Transformer's")
    axes.legend(fontsize=7)
    save(figure, folder / "plot.svg")
