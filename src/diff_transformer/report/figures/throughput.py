"""Tokens a second, training and forward."""

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import quantities
from diff_transformer.report.charts import category_chart
from diff_transformer.report.figure import Figure, key, panels
from diff_transformer.report.markup import Html, number, table
from diff_transformer.report.models import Results, Series, as_dict, compared, legend_of, models_in, names_of
from diff_transformer.report.render import Chart, panel

EVAL = "throughput"
WAYS = {"train_tokens_per_second": "forward + backward", "forward_tokens_per_second": "forward only"}
OF = {quantity.key: quantity for quantity in quantities("throughput", "throughput_forward")}


def build(results: Results) -> Figure | None:
    """Throughput of the models on the same machine, and the ratio to the Transformer by seed."""
    models = models_in(results, EVAL)
    present = [k for k in WAYS if any(k in one.names() for one in models)]
    if not present:
        return None
    names = [WAYS[k] for k in present]
    by_side = {one.side: [one.seeds(k) for k in present] for one in models}
    shown = [
        panel(
            "Tokens per second",
            category_chart(
                "Tokens per second of the models", names, by_side, x_label="pass", bars=True, digits=0,
                names=names_of(models),
            ),
        )
    ]  # fmt: skip
    base = next((one for one in models if one.side == "softmax"), None)
    others = [one for one in models if one is not base]
    ratios = {one.side: [_ratios(one, base, k) for k in present] for one in others} if base else {}
    if any(found for of in ratios.values() for found in of):
        shown.append(panel("Divided by the Transformer: above 1, faster", _ratio_chart(names, ratios, others)))
    device = as_dict(results.about.get("provenance")).get("device") or "one machine"
    return Figure(
        id="throughput",
        title="Speed",
        source=("Table 7",),
        read=f"Higher is better. The models ran in turns on the same machine ({device}) with the same batch size and "
        "length. The second panel divides by the Transformer.",
        body=panels(*shown) + legend_of(models, key("dashed", "as fast as the Transformer")),
        findings=[
            compared(WAYS[k].capitalize(), models, k, "higher", 0, " tokens/s", of=(results, OF[k])) for k in present
        ],
        paper=SAID["throughput"],
        data=_data(models, present),
        folded=bool(results.about),
    )


def _ratios(one: Series, base: Series, name: str) -> dict[int, float]:
    ours, theirs = one.seeds(name), base.seeds(name)
    return {seed: ours[seed] / theirs[seed] for seed in ours if theirs.get(seed)}


def _ratio_chart(names: list[str], ratios: dict[str, list[dict[int, float]]], models: list[Series]) -> Chart:
    reach = max([abs(v - 1) for of in ratios.values() for r in of for v in r.values()]) * 1.4 + 0.02
    return category_chart(
        "Throughput divided by that of the Transformer",
        names,
        ratios,
        x_label="pass",
        y_range=(1 - reach, 1 + reach),
        guides=[(1.0, "")],
        names=names_of(models),
    )


def _data(models: list[Series], present: list[str]) -> Html:
    rows: list[list[object]] = [
        [f"{one.label}, seed {seed}", *(number(metrics.get(k), 1) for k in present)]
        for one in models
        for seed, metrics in one.metrics.items()
    ]
    return table(["tokens per second", *(WAYS[k] for k in present)], rows, "Throughput by seed")
