"""Gradient magnitudes of the attention weights: the pair at initialisation, and models as given."""

import re
from collections.abc import Mapping

from diff_transformer.lab.paper import SAID
from diff_transformer.report.charts import NAMES, category_chart
from diff_transformer.report.figure import Figure, Finding, legend, panels
from diff_transformer.report.markup import Html, number, table
from diff_transformer.report.models import Results, Series, legend_of, models_in, names_of
from diff_transformer.report.render import Chart, panel

EVAL = "gradient_flow"
WEIGHTS = {"q": "W_Q", "k": "W_K", "v": "W_V", "o": "W_O"}
PARTS = {"q1": "Q₁", "q2": "Q₂", "k1": "K₁", "k2": "K₂", "lambda": "λ vectors", "head_norm": "head norm"}
LAYER = re.compile(r"(model|init_diff|init_softmax)_(\w+)_layer(\d+)")
ByLayer = dict[int, float]


def build(results: Results) -> Figure | None:
    """Marks for each kind of weight: small for a layer, large for the mean over layers, on a logarithmic axis."""
    models = [one for one in models_in(results, EVAL) if _layers(one, "model", "q")]
    if not models:
        return None
    paired = next((one for one in models if _layers(one, "init_diff", "q")), None)
    names = names_of(models)
    shown = []
    if paired is not None:
        states = {side: [_layers(paired, f"init_{side}", kind) for kind in WEIGHTS] for side in ("diff", "softmax")}
        title = "The pair at the start, equal shared weights"
        shown.append(panel(title, _chart(title, list(WEIGHTS.values()), states)))
    given = {one.side: [_layers(one, "model", kind) for kind in WEIGHTS] for one in models}
    shown.append(panel("Models as given", _chart("Models as given", list(WEIGHTS.values()), given, names)))
    halves = [kind for kind in PARTS if any(_layers(one, "model", kind) for one in models)]
    if halves:
        parts = {one.side: [_layers(one, "model", kind) for kind in halves] for one in models}
        parts = {side: values for side, values in parts.items() if any(values)}
        title = "Differential attention as given: its parts"
        shown.append(panel(title, _chart(title, [PARTS[kind] for kind in halves], parts, names)))
    pair_only = {one.side for one in models} <= {"diff", "softmax"}
    absent = [side for side in NAMES if paired is not None and side not in names]
    start = [Series(side, f"{NAMES[side]} at the start", None) for side in absent]
    return Figure(
        id="gradients",
        title="Gradient flow",
        source=("App. F",),
        read="Root mean square of the loss's gradient over the entries of each attention weight. Small marks are "
        "layers, large marks their mean. The appendix derives that DIFF's gradients equal those of softmax "
        "attention up to constants, so that a Transformer's hyperparameters carry over.",
        body=panels(*shown) + (legend() if pair_only else legend_of([*models, *start])),
        findings=_ratios(paired),
        paper=SAID["gradient_flow"],
        data=_data(models),
        folded=bool(results.about),
    )


def _layers(one: Series, state: str, kind: str) -> ByLayer:
    """By layer, the mean over seeds."""
    found = {}
    for name in one.names():
        matched = LAYER.fullmatch(name)
        if matched and matched[1] == state and matched[2] == kind:
            found[int(matched[3])] = one.mean(name) or 0.0
    return found


def _chart(
    title: str, categories: list[str], values: dict[str, list[ByLayer]], names: Mapping[str, str] = NAMES
) -> Chart:
    return category_chart(
        f"Gradient sizes. {title}",
        categories,
        values,
        x_label="weight of the attention",
        log=True,
        digits=None,
        names=names,
    )


def _ratios(paired: Series | None) -> list[Finding | None]:
    ratios = {name: paired.mean(f"init_ratio_{kind}") for kind, name in WEIGHTS.items()} if paired is not None else {}
    known = ", ".join(f"{name} {number(value, 2)}" for name, value in ratios.items() if value is not None)
    return [Finding("note", f"DIFF over Transformer at the start, mean over layers: {known}.")] if known else []


def _data(models: list[Series]) -> Html:
    states = {"model": "", "init_diff": "DIFF at the start, ", "init_softmax": "Transformer at the start, "}
    rows: list[list[object]] = []
    layers: set[int] = set()
    found: list[tuple[str, ByLayer]] = []
    for one in models:
        for state, words in states.items():
            for kind, name in {**WEIGHTS, **PARTS}.items():
                by_layer = _layers(one, state, kind)
                if by_layer:
                    found.append((f"{one.label}: {words}{name}", by_layer))
                    layers |= by_layer.keys()
    rows = [[name, *(number(by_layer.get(layer)) for layer in sorted(layers))] for name, by_layer in found]
    return table(["root mean square", *(f"layer {layer}" for layer in sorted(layers))], rows, "Gradient sizes by layer")
