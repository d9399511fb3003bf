"""Validation loss on tokens that repeat an n-gram of the context, and on the others."""

from diff_transformer.report.category_chart import category_chart
from diff_transformer.report.figure import Figure, key, legend, panels
from diff_transformer.report.findings import Finding, versus
from diff_transformer.report.markup import Html, table
from diff_transformer.report.numbers import mean, number
from diff_transformer.report.pair import NAMES, SIDES, Measured, measured
from diff_transformer.report.svg import panel

SLICES = {"validation": "all tokens", "ar_hit": "AR-Hit", "others": "others"}


def build(results: dict) -> Figure | None:
    """Loss by slice, and the difference between the models, which is small beside the loss."""
    losses = measured(results, "loss")
    present = [k for k in SLICES if losses and k in losses.names()]
    if losses is None or not present:
        return None
    names = [SLICES[k] for k in present]
    by_side = {s: [losses.seeds(s, k) for k in present] for s in SIDES if s in losses.by_side}
    shown = [
        panel(
            "Validation loss, nats per token",
            category_chart(
                "Validation loss by slice",
                names,
                by_side,
                x_label="slice of the tokens",
                bars=True,
            ),
        )
    ]
    gaps = [_gaps(losses, k) for k in present]
    if any(gaps):
        shown.append(panel("DIFF − Transformer, nats per token: below 0, DIFF is better", _difference(names, gaps)))
    return Figure(
        id="slices",
        title="Loss on repeated and on new text",
        source=("Table 6",),
        read="AR-Hit tokens end an n-gram already seen in the same context, so they can be recalled; others must be "
        "predicted. The second panel shows each seed's difference, which is small beside the loss.",
        body=panels(*shown) + legend(key("difference", "difference, mean and seeds")),
        findings=[versus(SLICES[k][0].upper() + SLICES[k][1:], losses.seeds("diff", k),
                         losses.seeds("softmax", k), "lower") for k in present] + [_share(losses)],
        paper="at 1.4 B †, all tokens, AR-Hit, others: Transformer 3.087 .898 3.272, DIFF 3.062 .880 3.247.",
        data=_data(losses),
    )  # fmt: skip


def _gaps(losses: Measured, name: str) -> dict[int, float]:
    """DIFF minus Transformer for every seed that both have; without one, the difference of the means."""
    diff, soft = losses.seeds("diff", name), losses.seeds("softmax", name)
    paired = {s: diff[s] - soft[s] for s in diff if s in soft}
    a, b = mean(diff), mean(soft)
    return paired or ({} if a is None or b is None else {0: a - b})


def _difference(names: list[str], gaps: list[dict[int, float]]) -> Html:
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


def _share(losses: Measured) -> Finding | None:
    share = mean([v for side in SIDES for v in losses.seeds(side, "ar_hit_share").values()])
    return (
        None if share is None else Finding("note", f"AR-Hit tokens are {100 * share:.1f} % of the validation tokens.")
    )


def _data(losses: Measured) -> Html:
    columns = {**SLICES, "perplexity": "perplexity", "ar_hit_share": "AR-Hit share"}
    rows: list[list[object]] = [
        [f"{NAMES[side]}, seed {seed}", *(number(metrics.get(k), 4) for k in columns)]
        for side in SIDES
        for seed, metrics in losses.by_side.get(side, {}).items()
    ]
    return table(["nats per token", *columns.values()], rows, "Loss by slice and seed")
