"""README's tables and the plot, from measured.json."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from arms import ARMS  # noqa: E402  (beside this file)

from diff_transformer.lab.stats import over_seeds  # noqa: E402
from diff_transformer.report.charts import Line, grid, line_chart  # noqa: E402
from diff_transformer.report.generated import filled, keep  # noqa: E402
from diff_transformer.report.render import Chart  # noqa: E402

STYLES = {"source": "softmax", "wider": "s5", "diff": "diff", "diff_v2": "s4", "frozen": "s2", "diff_0.2": "s1"}
PARTS = ("q", "q1", "q2", "k", "k1", "k2", "lambda")


def start_table(start: dict) -> list[str]:
    """Distance to the source and gradients, before any training."""
    parts = [part for part in PARTS if any(part in arm["gradients"] for arm in start.values())]
    lines = [
        "| | parameters | logits, fp32 | logits, bf16 | KL, fp32 | gradient of " + " | ".join(parts) + " |",
        "|---" * (5 + len(parts)) + "|",
    ]
    base = start["source"]["parameters"]
    for name, arm in start.items():
        more = f"{arm['parameters']:,} ({arm['parameters'] / base - 1:+.1%})"
        distances = [f"{arm[dtype]['logits']:.2g}" for dtype in ("fp32", "bf16")] + [f"{max(0, arm['fp32']['kl']):.1g}"]
        gradients = [f"{arm['gradients'][part]:.1e}" if part in arm["gradients"] else "" for part in parts]
        zero = [cell if cell != "0.0e+00" else "0" for cell in gradients]
        lines.append(f"| {ARMS[name]} | " + " | ".join([more, *distances, *zero]) + " |")
    return lines


def differences(curves: dict, name: str) -> list:
    """For every validation, the interval over seeds of this arm's loss minus the source's."""
    seeds = [seed for seed in curves[name] if seed in curves["source"]]
    pairs = [zip(curves[name][seed]["loss"], curves["source"][seed]["loss"], strict=True) for seed in seeds]
    return [over_seeds([a - b for a, b in at]) for at in zip(*pairs, strict=True)]


def end_table(curves: dict) -> list[str]:
    """Validation loss after training on, and its difference to the source's at equal tokens."""
    lines = [
        "| | seeds | loss before | loss after | difference to the source, continued | lambda after |",
        "|---" * 6 + "|",
    ]
    for name, seeds in curves.items():
        first, last = ([curve["loss"][at] for curve in seeds.values()] for at in (0, -1))
        interval = differences(curves, name)[-1]
        spread = "" if interval.low is None else f" ({interval.low:+.4f} to {interval.high:+.4f})"
        lambdas = [f"{value:.3f}" for value in next(iter(seeds.values())).get("lambda", [])]
        told = "" if name == "source" else f"{interval.mean:+.4f}{spread}"
        before, after = sum(first) / len(first), sum(last) / len(last)
        lines.append(f"| {ARMS[name]} | {len(seeds)} | {before:.4f} | {after:.4f} | {told} | {', '.join(lambdas)} |")
    return lines


def rate_table(curves: dict, rates: dict) -> list[str]:
    """The loss after training on at other learning rates, one seed."""
    names = list(next(iter(rates.values())))
    rows = {"0.001": {name: curves[name]["0"]["loss"][-1] for name in names}, **rates}
    lines = ["| learning rate | " + " | ".join(ARMS[name] for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for rate in sorted(rows, key=float):
        lines.append(f"| {rate} | " + " | ".join(f"{rows[rate][name]:.4f}" for name in names) + " |")
    return lines


def charts(curves: dict) -> dict[str, Chart]:
    """Left: the loss of arms with several seeds, their mean. Right: less the source's, with intervals where there are
    several seeds."""
    losses, gaps = [], []
    for name in [name for name in STYLES if name in curves]:
        seeds = list(curves[name].values())
        steps, side = [float(step) for step in seeds[0]["step"]], STYLES[name]
        if len(seeds) > 1:
            means = [sum(at) / len(at) for at in zip(*(curve["loss"] for curve in seeds), strict=True)]
            losses.append(Line(ARMS[name], list(zip(steps, means, strict=True)), side, read=True))
        found = differences(curves, name)
        band = tuple((s, at.low, at.high) for s, at in zip(steps, found, strict=True) if None not in (at.low, at.high))
        points = [(s, at.mean) for s, at in zip(steps, found, strict=True)]
        gaps.append(Line(ARMS[name], points, side, read=True, band=() if name == "source" else band))
    left = line_chart("Validation loss", losses, x_label="step", width=330)
    right = line_chart("Less the continued source's", gaps, x_label="step", y_range=(-0.012, 0.02), digits=4, width=330)
    panels = [("validation loss, nats a token", left), ("difference from the continued source", right)]
    return {"loss.svg": grid(panels, {STYLES[name]: ARMS[name] for name in STYLES if name in curves})}


def tables() -> str:
    """What stands between README's marks."""
    record = json.loads((HERE / "measured.json").read_text())
    about = record["provenance"]
    own = record["start"]["source"]
    tokens = about["tokens"]
    lines = [
        f"The source was trained on {tokens['source']:,} tokens, every arm on {tokens['more']:,} more.",
        "Logits: largest distance to the source's in fp64; rounding alone takes the source itself",
        f"{own['fp32']['logits']:.1g} in fp32 and {own['bf16']['logits']:.2g} in bf16 away.",
        "Gradients: root mean square over the weights.", "", *start_table(record["start"]), "",
        "Trained on; differences are of the same seed's runs, in parentheses Student's 95 % CI over seeds:", "",
        *end_table(record["curves"]), "",
        "Loss after training on at other learning rates, one seed:", "",
        *rate_table(record["curves"], record["rates"]), "",
        f"{about['cpu']}, torch {about['torch']}, fp32, one thread, commit {about['commit']}, {about['date'][:10]}.",
    ]  # fmt: skip
    return "\n".join(lines)


def draw(*, check: bool = False) -> int:
    page, curves = HERE / "README.md", json.loads((HERE / "measured.json").read_text())["curves"]
    drawn = {HERE / name: chart for name, chart in charts(curves).items()}
    return keep({page: filled(page, {"measured": tables()}), **drawn}, check=check)
