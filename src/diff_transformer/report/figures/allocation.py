"""Attention of the answer position to the answer and to the noise."""

import re

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.report.charts import Line, line_chart
from diff_transformer.report.figure import Figure, folded, panels
from diff_transformer.report.markup import Html, mean, number, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in
from diff_transformer.report.render import Chart, panel

EVAL = "allocation"
CELL = re.compile(r"(answer|noise)_(depth|layer)(\d+)")
PARTS = {"answer": "Attention to the answer", "noise": "Attention to the noise"}


def build(results: Results) -> Figure | None:
    """Attention to the answer span and to the noise, by depth and by layer."""
    models = models_in(results, EVAL)
    found = [m.groups() for m in map(CELL.fullmatch, (name for one in models for name in one.names())) if m]
    depths, layers = (sorted({int(at) for _, kind, at in found if kind == wanted}) for wanted in ("depth", "layer"))
    if not depths:
        return None
    by_depth = [panel(f"{PARTS[part]}, share", _by_depth(models, part, depths)) for part in PARTS]
    deep = PARTS if len(layers) > 1 else {}
    by_layer = [panel(f"{PARTS[part]} by layer, share", _by_layer(models, part, layers)) for part in deep]
    return Figure(
        id="allocation",
        title="Where attention goes",
        source=("Table 3",),
        read="The share of attention that the answering position gives to the needle asked for (higher is better) "
        "and to the noise, the other text of the document (lower is better). Means over heads and layers of each "
        "head's shares. On the map averaged over heads, weights of different sign cancel; the paper does not say which "
        "it measured.",
        body=panels(*by_depth) + legend_of(models) + (folded("Layer by layer", panels(*by_layer)) if by_layer else ""),
        findings=[
            _finding(results, models, "answer", depths, "higher"),
            _finding(results, models, "noise", depths, "lower"),
            *(
                compared(f"{PARTS[part]} on the map averaged over heads", models, f"{part}_mean_map", better)
                for part, better in (("answer", "higher"), ("noise", "lower"))
            ),
        ],
        paper=SAID["allocation"],
        data=_data(models, depths, layers),
    )


def _overall(model: Series, part: str, depths: list[int]) -> dict[int, float]:
    """By seed: the metric over all depths, or the mean over the available depths."""
    whole = model.seeds(part)
    by_depth = [model.seeds(f"{part}_depth{d}") for d in depths]
    seeds = {s for values in by_depth for s in values}
    return whole or {s: mean([v[s] for v in by_depth if s in v]) or 0.0 for s in seeds}


def _finding(results: Results, models: list[Series], part: str, depths: list[int], better: str):
    values = [_overall(one, part, depths) for one in models]
    return compared(
        f"Attention to the {part}, mean over depths", models, values, better, of=(results, QUANTITIES[part])
    )


def _by_depth(models: list[Series], part: str, depths: list[int]) -> Chart:
    return _chart(
        models,
        f"Attention to the {part} by depth of the needle",
        {float(d): f"{part}_depth{d}" for d in depths},
        x_label="depth of the needle, %",
        x_name="depth, %:",
        x_ticks=[(float(d), str(d)) for d in depths],
    )


def _by_layer(models: list[Series], part: str, layers: list[int]) -> Chart:
    every = max(1, -(-len(layers) // 10))
    return _chart(
        models,
        f"Attention to the {part} by layer",
        {float(layer + 1): f"{part}_layer{layer}" for layer in layers},
        x_label="layer",
        x_name="layer",
        x_ticks=[(float(layer + 1), str(layer + 1)) for layer in layers[::every]],
    )


def _chart(models: list[Series], label: str, metrics: dict[float, str], **axis) -> Chart:
    lines = []
    for one in models:
        values = {at: one.seeds(name) for at, name in metrics.items()}
        seeds = sorted({s for by_seed in values.values() for s in by_seed})
        for s in seeds if len(seeds) > 1 else ():
            lines.append(Line("", [(at, v[s]) for at, v in values.items() if s in v], one.side, thin=True))
        points = [(at, average) for at, v in values.items() if (average := mean(v)) is not None]
        lines.append(Line(one.label, points, one.side, marks=True, read=True))
    highest = max((v for line in lines for _, v in line.points), default=1.0)
    return line_chart(label, lines, y_range=(0.0, highest * 1.12 or 1.0), **axis)


def _data(models: list[Series], depths: list[int], layers: list[int]) -> Html:
    runs = [(one, seed) for one in models for seed in one.metrics]
    named = [(f"depth {d} %", f"depth{d}") for d in depths] + [(f"layer {i + 1}", f"layer{i}") for i in layers]
    rows: list[list[object]] = [
        [f"{part}, {words}", *(number(one.metrics[s].get(f"{part}_{key}"), 4) for one, s in runs)]
        for part in PARTS
        for words, key in named
    ]
    return table(["share of attention", *(f"{one.label}, seed {s}" for one, s in runs)], rows, "Attention allocation")
