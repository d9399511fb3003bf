"""Every model of a comparison beside the pair, each at equal cost."""

from diff_transformer.lab.quantities import QUANTITIES, Quantity
from diff_transformer.lab.sides import CONTROLS, SOURCE
from diff_transformer.report.charts import category_chart
from diff_transformer.report.figure import Figure, Finding, found_of, lead, panels
from diff_transformer.report.figures.needles import CELL
from diff_transformer.report.markup import Html, mean, number, short, table
from diff_transformer.report.models import Results, Series, judged, legend_of, models_in, names_of
from diff_transformer.report.render import panel

EVAL = "associative_recall"
_READ = (
    "Every model had the same data, steps and seeds as the pair. The feed-forward width is set so that parameter "
    "counts agree."
)
_READ_UPTRAINED = (
    "Every model started with the logits of one pretrained Transformer, which is shown before training, and had the "
    "same data, steps and seeds."
)
COSTS = ("parameters", "flops_per_token", "kv_bytes_per_token", "intermediate_size")
SPEEDS = ("throughput", "throughput_forward")


def build(results: Results) -> Figure | None:
    """Loss, needles, cost and speed of every model of ``compare --variants``."""
    models = [one for one in models_in(results) if one.seeds("validation")]
    if not results.about or not {one.side for one in models} - {"diff", "softmax"} or len(models) < 2:
        return None
    losses = category_chart(
        "Loss of every model",
        ["held-out text"],
        {one.side: [one.seeds("validation")] for one in models},
        names=names_of(models),
    )
    return Figure(
        id="variants",
        title="The pair, its control and relatives",
        source=(),
        read=f"{_READ_UPTRAINED if results.about.get('source') else _READ} Loss, needles and speed are measured; "
        "parameters, FLOPs and cache are computed from the configuration.",
        body=panels(panel("Loss on held-out text, nats per token: lower is better", losses), columns=1)
        + legend_of(models),
        findings=_findings(results, models),
        data=_table(models),
        folded=True,
    )


def _findings(results: Results, models: list[Series]) -> list[Finding | None]:
    """Findings on each model against the Transformer, and on DIFF against the Transformer + head norm.

    The second comparison isolates the effect of the subtraction."""
    by_side = {one.parts[0].record.side: one for one in models}
    baseline, control = by_side.get("softmax"), next((by_side[side] for side in CONTROLS if side in by_side), None)
    found = [_against(results, one, baseline) for one in models if one is not baseline]
    return [*found, _against(results, by_side.get("diff"), control)]


def _against(results: Results, one: Series | None, other: Series | None) -> Finding | None:
    """The loss of one model less that of a Transformer, paired by seed."""
    if one is None or other is None:
        return None
    claim = judged(results, QUANTITIES["loss"], one, other)
    found = found_of("", claim, "lower") if claim else None
    if found is None:
        own, theirs = one.seeds("validation"), other.seeds("validation")
        gaps = [own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())]
        if not gaps:
            return None
        outcome, weak, seeds = lead(gaps, "lower")
        gap = number(mean(gaps), 3, sign=True)
        found = Finding(
            "level" if gap == number(0.0, 3, sign=True) else outcome, "", weak, f"difference {gap} ({seeds})"
        )
    said = f"{one.label}: loss against the {other.label}: {found.gap}."
    if one.parts[0].record.side in (*CONTROLS, SOURCE):
        return Finding("note", said)
    return Finding(found.outcome, said, found.weak)


def _table(models: list[Series]) -> Html:
    names = dict.fromkeys(name for one in models for name in one.names())
    cells = [m[0] for m in map(CELL.fullmatch, names) if m and m[3] is None and m[4] is None]  # of all depths, lengths
    base = next((one for one in models if one.side == "softmax"), models[0])
    head: list[object] = ["", "loss", *map(_cell_name, cells)]
    head += [f"{quantity.name} ({quantity.kind})" for quantity in _costs()] + ["parameters, difference"]
    body: list[list[object]] = []
    for one in models:
        count, of = one.cost("parameters"), base.cost("parameters")
        ratio = "–" if not count or not of else f"{number(100 * (count / of - 1), 2, sign=True)} %"
        body.append([
            one.label, number(one.mean("validation"), 3), *(number(one.mean(cell), 2) for cell in cells),
            *(_cost(one, quantity) for quantity in _costs()), ratio,
        ])  # fmt: skip
    return table(head, body, "Models at equal cost")


def _costs() -> list[Quantity]:
    return [QUANTITIES[name] for name in (*COSTS, *SPEEDS)]


def _cost(one: Series, quantity: Quantity) -> str:
    value = one.mean(quantity.key) if quantity.kind == "measured" else one.cost(quantity.key)
    if value is not None and quantity.id == "flops_per_token":
        return short(value)
    return f"{number(value, 0)} {quantity.unit}".strip() if quantity.unit == "B" else number(value, 0)


def _cell_name(cell: str) -> str:
    n, _, r = cell.removeprefix("n").partition("_r")
    return f"{n} needle{'' if n == '1' else 's'}, {r} asked for"
