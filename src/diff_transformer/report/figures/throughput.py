"""Tokens a second, training and forward."""

from diff_transformer.report.charts import NAMES, category_chart
from diff_transformer.report.figure import Figure, key, legend, panels, versus
from diff_transformer.report.markup import Html, number, table
from diff_transformer.report.models import SIDES, Results, Series, as_dict, models_in
from diff_transformer.report.render import Chart, panel

EVAL = "throughput"
WAYS = {"train_tokens_per_second": "forward + backward", "forward_tokens_per_second": "forward only"}


def build(results: Results) -> Figure | None:
    """Throughput of both models on the same machine, and the ratio by seed."""
    speed = {one.side: one for one in models_in(results, EVAL) if one.side in SIDES}
    present = [k for k in WAYS if any(k in one.names() for one in speed.values())]
    if not present:
        return None
    names = [WAYS[k] for k in present]
    by_side = {s: [speed[s].seeds(k) for k in present] for s in SIDES if s in speed}
    shown = [
        panel(
            "Tokens per second",
            category_chart("Tokens per second of both models", names, by_side, x_label="pass", bars=True, digits=0),
        )
    ]
    ratios = [_ratios(speed, k) for k in present]
    if any(ratios):
        shown.append(panel("DIFF / Transformer: above 1, DIFF is faster", _ratio_chart(names, ratios)))
    device = as_dict(results.about.get("provenance")).get("device") or "one machine"
    return Figure(
        id="throughput",
        title="Speed",
        source=("Table 7",),
        read=f"Higher is better. Both models ran on the same machine ({device}) with the same batch size and length. "
        "The second panel is DIFF divided by Transformer.",
        body=panels(*shown) + legend(key("difference", "DIFF / Transformer, mean and seeds")),
        findings=[
            versus(
                WAYS[k].capitalize(), _seeds(speed, "diff", k), _seeds(speed, "softmax", k), "higher", 0, " tokens/s"
            )
            for k in present
        ],
        paper="3 B at 2 K tokens on H100 †: DIFF is 9 % slower in training and in the forward pass; at 4 K, 12 % "
        "and 10 %.",
        data=_data(speed, present),
    )


def _seeds(speed: dict[str, Series], side: str, name: str) -> dict[int, float]:
    return speed[side].seeds(name) if side in speed else {}


def _ratios(speed: dict[str, Series], name: str) -> dict[int, float]:
    diff, soft = _seeds(speed, "diff", name), _seeds(speed, "softmax", name)
    return {s: diff[s] / soft[s] for s in diff if soft.get(s)}


def _ratio_chart(names: list[str], ratios: list[dict[int, float]]) -> Chart:
    reach = max([abs(v - 1) for r in ratios for v in r.values()]) * 1.4 + 0.02
    return category_chart(
        "Throughput of DIFF divided by that of the Transformer",
        names,
        {"difference": ratios},
        x_label="pass",
        y_range=(1 - reach, 1 + reach),
        guides=[(1.0, "equal")],
        names={"difference": "DIFF / Transformer"},
    )


def _data(speed: dict[str, Series], present: list[str]) -> Html:
    rows: list[list[object]] = [
        [f"{NAMES[side]}, seed {seed}", *(number(metrics.get(k), 1) for k in present)]
        for side in SIDES
        for seed, metrics in (speed[side].metrics if side in speed else {}).items()
    ]
    return table(["tokens per second", *(WAYS[k] for k in present)], rows, "Throughput by seed")
