"""The largest attention logits and hidden activations."""

import re

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.report.charts import Line, category_chart, line_chart
from diff_transformer.report.figure import Figure, Finding, folded, panels
from diff_transformer.report.markup import Html, mean, number, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in, names_of
from diff_transformer.report.render import Chart, panel

EVAL = "outliers"
RANKS = {"top1": "top 1", "top2": "top 2", "top3": "top 3", "top10": "top 10", "top100": "top 100", "median": "median"}
KINDS = {"logits": "Attention logits before softmax", "hidden": "Hidden states after a layer"}
MAPS = {"logits_first": "logits of map 1", "logits_second": "logits of map 2"}
LAYER = re.compile(r"(logits|hidden)_layer(\d+)_top1")


def build(results: Results) -> Figure | None:
    """Largest magnitudes as a table and on a logarithmic axis, and the largest of each layer."""
    models = models_in(results, EVAL)
    names = {name for one in models for name in one.names()}
    kinds = [kind for kind in KINDS if any(f"{kind}_{rank}" in names for rank in RANKS)]
    if not kinds:
        return None
    layers = sorted({int(m[2]) for m in map(LAYER.fullmatch, names) if m})
    shown = [panel(f"{KINDS[kind]}, magnitude (log axis)", _chart(models, kind)) for kind in kinds]
    deep = kinds if len(layers) > 1 else []
    by_layer = [panel(f"{KINDS[kind]}: largest of each layer", _by_layer(models, kind, layers)) for kind in deep]
    return Figure(
        id="outliers",
        title="Largest activations",
        source=("Table 5",),
        read="The k-th largest magnitude over all positions measured, and the median, on a logarithmic axis. A "
        "model with smaller outliers and a similar median is easier to quantise.",
        body=panels(*shown)
        + legend_of(models)
        + (folded("Layer by layer", panels(*by_layer)) if by_layer else "")
        + folded("Table", _table(models, kinds)),
        findings=[f for kind in kinds for f in _findings(results, models, kind)],
        paper=SAID["outliers"],
        data=_seeds(models, kinds),
    )


def _chart(models: list[Series], kind: str) -> Chart:
    return category_chart(
        f"{KINDS[kind]}: largest magnitudes",
        list(RANKS.values()),
        {one.side: [one.seeds(f"{kind}_{rank}") for rank in RANKS] for one in models},
        x_label="rank of the magnitude",
        log=True,
        digits=None,
        names=names_of(models),
    )


def _by_layer(models: list[Series], kind: str, layers: list[int]) -> Chart:
    lines = []
    for one in models:
        values = [(float(i + 1), mean(one.seeds(f"{kind}_layer{i}_top1"))) for i in layers]
        points = [(at, value) for at, value in values if value is not None]
        lines.append(Line(one.label, points, one.side, marks=True, read=True))
    every = max(1, -(-len(layers) // 10))
    return line_chart(
        f"{KINDS[kind]}: largest magnitude by layer",
        lines,
        x_label="layer",
        x_name="layer",
        x_ticks=[(float(i + 1), str(i + 1)) for i in layers[::every]],
    )


def _findings(results: Results, models: list[Series], kind: str) -> list[Finding | None]:
    """Findings on the largest magnitude and on its multiple of the median, the measure of an outlier."""
    name = "Logits" if kind == "logits" else "Hidden states"
    ratios = []
    for one in models:
        median = one.seeds(f"{kind}_median")
        ratios.append({s: v / median[s] for s, v in one.seeds(f"{kind}_top1").items() if median.get(s)})
    return [
        compared(f"{name}, top 1", models, f"{kind}_top1", "lower", None, of=(results, QUANTITIES[kind])),
        compared(
            f"{name}, top 1 over median", models, ratios, "lower", 1, of=(results, QUANTITIES[f"{kind}_in_medians"])
        ),
    ]


def _table(models: list[Series], kinds: list[str]) -> Html:
    rows: list[list[object]] = [
        [f"{one.label}, {words}", *(number(one.mean(f"{kind}_{rank}")) for rank in RANKS)]
        for kind, words in _parts(kinds)
        for one in models
        if any(one.seeds(f"{kind}_{rank}") for rank in RANKS)
    ]
    return table(["mean over seeds", *RANKS.values()], rows, "Largest activations, mean over seeds")


def _parts(kinds: list[str]) -> list[tuple[str, str]]:
    """The lines of the tables: logits, logits of each map, hidden states."""
    return [part for kind in kinds for part in ((kind, kind), *(MAPS.items() if kind == "logits" else ()))]


def _seeds(models: list[Series], kinds: list[str]) -> Html:
    rows: list[list[object]] = [
        [f"{one.label}, {words}, seed {seed}", *(number(metrics.get(f"{kind}_{rank}")) for rank in RANKS)]
        for kind, words in _parts(kinds)
        for one in models
        for seed, metrics in one.metrics.items()
        if any(f"{kind}_{rank}" in metrics for rank in RANKS)
    ]
    return table(["by seed", *RANKS.values()], rows, "Largest activations by seed")
