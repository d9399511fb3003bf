"""Validation loss on tokens that repeat an n-gram of the context, and on the others."""

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.report.charts import category_chart
from diff_transformer.report.figure import Figure, Finding, key, panels
from diff_transformer.report.markup import Html, mean, number, table
from diff_transformer.report.models import Results, Series, compared, legend_of, models_in, names_of, pair_in
from diff_transformer.report.render import Chart, panel

EVAL = "associative_recall"
SLICES = {"validation": "all tokens", "ar_hit": "AR-Hit", "others": "others"}


def build(results: Results) -> Figure | None:
    """Loss by slice, and for a pair the difference, which is small beside the loss."""
    models = models_in(results, EVAL)
    present = [name for name in SLICES if any(model.seeds(name) for model in models)]
    if not present:
        return None
    names = [SLICES[name] for name in present]
    chart = category_chart(
        "Validation loss by slice",
        names,
        {model.side: [model.seeds(name) for name in present] for model in models},
        x_label="slice of the tokens",
        bars=True,
        names=names_of(models),
    )
    shown, extra = [panel("Validation loss, nats per token", chart)], []
    pair = pair_in(models)
    gaps = [_gaps(*pair, name) for name in present] if pair else []
    if any(gaps):
        shown.append(panel("DIFF − Transformer, nats per token: below 0, DIFF is better", _difference(names, gaps)))
        extra.append(key("difference", "difference, mean and seeds"))
    return Figure(
        id="slices",
        title="Loss on repeated and on new text",
        source=("Table 6",),
        read="AR-Hit tokens end an n-gram that occurred earlier in the same context, so the model can recall them. "
        "All other tokens must be predicted."
        + (" The second panel shows the difference of each seed." if pair else ""),
        body=panels(*shown) + legend_of(models, *extra),
        findings=[_finding(results, models, n) for n in present] + [_share(models)],
        paper=SAID["associative_recall"],
        data=_data(models),
        folded=bool(results.about),
    )


def _finding(results: Results, models: list[Series], name: str) -> Finding | None:
    quantity = QUANTITIES["loss" if name == "validation" else name]
    return compared(SLICES[name][0].upper() + SLICES[name][1:], models, name, "lower", of=(results, quantity))


def _gaps(diff: Series, soft: Series, name: str) -> dict[int, float]:
    """DIFF minus Transformer for every seed that both have; without one, the difference of the means."""
    ours, theirs = diff.seeds(name), soft.seeds(name)
    paired = {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
    a, b = mean(ours), mean(theirs)
    return paired or ({} if a is None or b is None else {0: a - b})


def _difference(names: list[str], gaps: list[dict[int, float]]) -> Chart:
    reach = max(abs(v) for g in gaps for v in g.values()) * 1.3 or 0.01
    return category_chart(
        "Difference in loss, DIFF minus Transformer, by slice",
        names,
        {"difference": gaps},
        x_label="slice of the tokens",
        y_range=(-reach, reach),
        guides=[(0.0, "no difference")],
        digits=4,
        names={"difference": "DIFF − Transformer"},
    )


def _share(models: list[Series]) -> Finding | None:
    share = mean([v for model in models for v in model.seeds("ar_hit_share").values()])
    return (
        None if share is None else Finding("note", f"AR-Hit tokens are {100 * share:.1f} % of the validation tokens.")
    )


def _data(models: list[Series]) -> Html:
    columns = {**SLICES, "perplexity": "perplexity", "ar_hit_share": "AR-Hit share"}
    rows: list[list[object]] = [
        [f"{model.label}, seed {seed}", *(number(metrics.get(name), 4) for name in columns)]
        for model in models
        for seed, metrics in model.metrics.items()
    ]
    return table(["nats per token", *columns.values()], rows, "Loss by slice and seed")
