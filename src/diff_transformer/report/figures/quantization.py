"""Accuracy and loss with attention logits in few bits."""

import re

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.report.charts import category_chart
from diff_transformer.report.figure import Figure, Finding, key, panels
from diff_transformer.report.markup import Html, mean, number, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in, names_of
from diff_transformer.report.render import Chart, panel

EVAL = "quantization"
CELL = re.compile(r"(accuracy|accuracy_plain|loss)_(\d+)bit")
KINDS = {"accuracy": "Accuracy", "loss": "Loss, nats a token"}
SHARED = {"row": "each query's logits", "head": "the logits of each head", "tensor": "all logits of a layer"}


def build(results: Results) -> Figure | None:
    """Accuracy and held-out loss by bits."""
    models = models_in(results, EVAL)
    found = [m.groups() for m in map(CELL.fullmatch, (name for one in models for name in one.names())) if m]
    bits = sorted({int(b) for _, b in found}, reverse=True)
    kinds = [kind for kind in KINDS if any(kind == name for name, _ in found)]
    if not kinds:
        return None
    chance = mean([v for one in models for v in one.seeds("chance").values()])
    extra = [] if chance is None or "accuracy" not in kinds else [key("dashed", f"chance, {number(chance)}")]
    return Figure(
        id="quantization",
        title="Attention logits in few bits",
        source=("Fig. 8",),
        read="Attention logits are rounded before the softmax to the levels that the bits allow. The scale is the "
        f"largest magnitude of {_shared(models)}. Accuracy: the model chooses among endings of a text by "
        "log-probability per character. Loss: held-out text.",
        body=panels(*(panel(KINDS[kind], _chart(models, kind, bits, chance)) for kind in kinds))
        + legend_of(models, *extra),
        findings=[f for kind in kinds for f in _findings(results, models, kind, bits)],
        paper=SAID["quantization"],
        data=_data(models, bits),
        folded=bool(results.about),
    )


def _shared(models: list[Series]) -> str:
    said = {str(part.provenance.get("granularity")) for one in models for part in one.parts}
    known = sorted(SHARED[name] for name in said & set(SHARED))
    return " or of ".join(known) if known else "the logits at hand"


def _chart(models: list[Series], kind: str, bits: list[int], chance: float | None) -> Chart:
    return category_chart(
        f"{KINDS[kind]} by bits of an attention logit",
        [str(b) for b in bits],
        {one.side: [one.seeds(f"{kind}_{b}bit") for b in bits] for one in models},
        x_label="bits of an attention logit",
        bars=kind == "accuracy",
        y_range=(0.0, 1.0) if kind == "accuracy" else None,
        guides=[(chance, "")] if chance is not None and kind == "accuracy" else [],
        names=names_of(models),
    )


def _findings(results: Results, models: list[Series], kind: str, bits: list[int]) -> list[Finding | None]:
    """Findings on the value at the fewest bits, and on its change from the most bits."""
    fewest, most, better = min(bits), max(bits), "higher" if kind == "accuracy" else "lower"
    said = [compared(f"{KINDS[kind]} at {fewest} bits", models, f"{kind}_{fewest}bit", better)]
    if fewest != most:
        what = f"Change of {kind} from {most} to {fewest} bits"
        quantity = QUANTITIES["four_bits"] if (kind, fewest) == ("loss", 4) else None
        changes = [_change(one, kind, fewest, most) for one in models]
        said.append(compared(what, models, changes, better, of=(results, quantity)))
    return said


def _change(model: Series, kind: str, fewest: int, most: int) -> dict[int, float]:
    few, many = model.seeds(f"{kind}_{fewest}bit"), model.seeds(f"{kind}_{most}bit")
    return {seed: few[seed] - many[seed] for seed in few if seed in many}


def _data(models: list[Series], bits: list[int]) -> Html:
    runs = [(one, seed) for one in models for seed in one.metrics]
    named = {"accuracy": "accuracy", "accuracy_plain": "accuracy, not normalised", "loss": "loss"}
    rows: list[list[object]] = []
    for kind, words in named.items():
        for b in bits:
            values = [one.metrics[s].get(f"{kind}_{b}bit") for one, s in runs]
            if any(value is not None for value in values):
                rows.append([f"{words}, {b} bits", *(number(value, 4) for value in values)])
    return table(["by bits", *(f"{one.label}, seed {s}" for one, s in runs)], rows, "Quantised attention logits")
