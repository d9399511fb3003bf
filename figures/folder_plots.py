"""Plots of the folders of the paper's tables and figures: ours beside the paper's, where its numbers are known."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from paper import ABLATED, TABLE_6, Panel
from plots import NAMES, RATES, mean_and_reach, style

from diff_transformer.lab.measures import Row
from diff_transformer.lab.record import Record
from diff_transformer.lab.run_tables import Run
from diff_transformer.lab.sides import BASELINE, CONTROL, name_of
from diff_transformer.report.charts import Line, category_chart, grid, line_chart, row_chart
from diff_transformer.report.charts import Row as Drawn
from diff_transformer.report.render import Chart

Numbers = dict[str, dict[str, list[float]]]  # side -> metric -> a number for each seed


def folder_chart(panels: Sequence[Panel], ours: Numbers, expected: dict) -> Chart:
    """The panels side by side, in two rows from four on: means over seeds, with a small mark for each of several."""
    shown, named = [], {}
    for panel in panels:
        of = ours
        if panel.paper:
            entry = expected[panel.paper]
            of = {
                side: {key: [value] for key, value in entry.get(name, entry.get(f"{name} 3B", {})).items()}
                for side, name in (("softmax", "Transformer"), ("diff", "DIFF"))
            }
        ticks = ticks_of(panel, of)
        drawn = {
            side: [dict(enumerate(numbers.get(key, []))) for key in ticks.values()]
            for side, numbers in of.items()
            if any(key in numbers for key in ticks.values())
        }
        if not drawn:
            continue
        for side in drawn:
            name = name_of(side) if side in (BASELINE, CONTROL) else "DIFF"
            named[style(side)] = RATES.get(side, name) if "diff_same_rate" in of else name
        chart = (_lines if panel.line else _bars)(panel, ticks, drawn, of, named)
        shown.append((f"{panel.title}, {panel.label}", chart))
    across = len(panels) if len(panels) < 4 else len(panels) // 2
    return grid(shown, named, across)


def _bars(panel: Panel, ticks: dict[str, str], drawn: dict, of: Numbers, named: dict[str, str]) -> Chart:
    values = {style(side): by_tick for side, by_tick in drawn.items()}
    words = [label.replace("-\n", "") for label in ticks]
    return category_chart(
        f"{panel.title}: {panel.label}", words, values, bars=not panel.log, log=panel.log, digits=None,
        guides=_level(panel, of), width=max(250, 60 * len(ticks)), height=160, names=named,
    )  # fmt: skip


def _lines(panel: Panel, ticks: dict[str, str], drawn: dict, of: Numbers, named: dict[str, str]) -> Chart:
    lines = []
    for side, by_tick in drawn.items():
        known = [(float(i), seeds) for i, seeds in enumerate(by_tick) if seeds]
        name, points = named[style(side)], [(i, fmean(seeds.values())) for i, seeds in known]
        lines.append(Line(name, points, style(side), marks=True, read=True))
        for seed in {seed for _, seeds in known for seed in seeds if len(seeds) > 1}:
            each = [(i, seeds[seed]) for i, seeds in known if seed in seeds]
            lines.append(Line(name, each, style(side), thin=True, joined=False))
    return line_chart(
        f"{panel.title}: {panel.label}", lines, x_label="", x_ticks=list(enumerate(ticks)), guides=_level(panel, of),
        width=250, height=160,
    )  # fmt: skip


def _level(panel: Panel, of: Numbers) -> list[tuple[float, str]]:
    level = of.get("softmax", {}).get(panel.level)
    return [(level[0], panel.level)] if level else []


def ticks_of(panel: Panel, numbers: Numbers) -> dict[str, str]:
    """Label -> name of the number, of those that there are."""
    known = dict.fromkeys(key for side in numbers.values() for key in side)
    if isinstance(panel.ticks, str):
        found = [match for key in known if (match := re.fullmatch(panel.ticks, key))]
        return {match[1]: match[0] for match in sorted(found, key=lambda match: int(match[1]))}
    return {label: key for label, key in panel.ticks.items() if key in known}


def scaling_chart(runs: Sequence[Run], seeds: dict[str, list[Record]]) -> Chart:
    """Left: the final loss of every run by size. Right: the loss along training of the ``seeds`` of each side."""
    names, sizes, training = {"softmax": NAMES["softmax"], "diff": "DIFF"}, [], []
    for side, name in names.items():
        found = sorted((float(run.parameters), run.loss) for run in runs if run.model == side and run.part == "final")
        means = [(size, fmean(loss for at, loss in found if at == size)) for size in sorted({at for at, _ in found})]
        sizes.append(Line(name, found, side, thin=True, joined=False))
        sizes.append(Line(name, means, side, read=True))
        if seeds[side]:
            training.append(mean_and_reach(seeds[side], side, name=name))
    counts = sorted({float(run.parameters) for run in runs if run.part == "final" and run.model == "softmax"})
    left = line_chart(
        "Validation loss by size", sizes, x_label="parameters", x_name="parameters", log_x=True, width=300, height=180,
        x_ticks=[(count, f"{count / 1e6:.2f}M") for count in counts],
    )  # fmt: skip
    low = min((value for line in training for _, value, _ in line.band), default=0.0)
    right = line_chart(
        "Validation loss along training", training, x_label="step (equal tokens a step)", y_range=(low, low + 2),
        width=300, height=180,
    )  # fmt: skip
    title = "validation loss, nats a token"
    return grid([(title, left), (title, right)], names)


def ablation_chart(rows: dict[str, list[Row]], expected: dict) -> Chart:
    """Differences of losses from the Transformer by model, a column a measure: ours with intervals, and the paper's."""
    baseline = expected["rows"]["transformer"][3:]
    shown = []
    for who in ("ours", "paper, 1.4B"):
        for j, measure in enumerate(TABLE_6):
            drawn = []
            for side, of in rows.items():
                name, row = ABLATED[side]
                mean, low, high, _ = of[j].difference
                if who != "ours":
                    mean, low, high = expected["rows"][row][3 + j] - baseline[j], None, None
                drawn.append(Drawn(name, "diff" if side.startswith("diff") else "softmax", {0: mean}, low, high))
            label = "loss, difference from the Transformer"
            chart = row_chart(f"{who}: {measure.name}", drawn, x_label=label, guide=0, width=190, labels=j == 0)
            shown.append((f"{who}: {measure.name}", chart))
    return grid(shown, {}, len(TABLE_6))


def throughput_chart(record: Path, expected: dict) -> Chart:
    """DIFF's tokens/s as a share of the Transformer's: the paper's settings, and ours."""
    shares = [
        (f"paper, {name}", *(found["DIFF"][i] / found["Transformer"][i] for i in (0, 1)))
        for name, found in expected["tokens_per_second"].items()
    ]
    for row in json.loads(record.read_text())["rows"]:
        if row["side"] == "diff":
            width = row["fields"].get("hidden_size", 128)
            name = f"ours, width {width}, {row['batch']} x {row['length']}"
            shares.append((name, row["forward_backward_ratio"], row["prefill_ratio"]))
    label = "tokens/s of DIFF over the Transformer's"
    shown = []
    for j, way in enumerate(("forward + backward", "forward")):
        rows = [Drawn(name, "diff", {0: both[j]}) for name, *both in shares]
        shown.append((way, row_chart(f"{way}: {label}", rows, x_label=label, guide=1, width=260, labels=j == 0)))
    return grid(shown, {}, 2)
