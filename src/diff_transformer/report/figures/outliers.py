"""The largest attention logits and hidden activations."""

from diff_transformer.report.category_chart import category_chart
from diff_transformer.report.figure import Figure, legend, panels
from diff_transformer.report.findings import Finding, versus
from diff_transformer.report.markup import Html, table
from diff_transformer.report.numbers import number
from diff_transformer.report.pair import NAMES, SIDES, Measured, measured
from diff_transformer.report.svg import panel

RANKS = {"top1": "top 1", "top2": "top 2", "top3": "top 3", "top10": "top 10", "top100": "top 100", "median": "median"}
KINDS = {"logits": "Attention logits before softmax", "hidden": "Hidden states after a layer"}


def build(results: dict) -> Figure | None:
    """Largest magnitudes as a table and on a logarithmic axis."""
    sizes = measured(results, "outliers")
    if sizes is None:
        return None
    kinds = [k for k in KINDS if any(f"{k}_{rank}" in sizes.names() for rank in RANKS)]
    if not kinds:
        return None
    shown = [panel(f"{KINDS[kind]}, magnitude (log axis)", _chart(sizes, kind)) for kind in kinds]
    return Figure(
        id="outliers",
        title="Largest activations",
        source=("Table 5",),
        read="The k-th largest magnitude over all positions measured, and the median. Far fewer large values beside a "
        "like median would make a model easier to quantise; the axis is logarithmic.",
        body=panels(*shown) + legend() + _table(sizes, kinds),
        findings=[f for kind in kinds for f in _findings(sizes, kind)],
        paper="top 1 and median at 3 B †: logits 318 and 5.4 in the Transformer, 38.8 and 3.3 in DIFF; "
        "hidden states 3609 and 0.6, 1688 and 1.2.",
        data=_seeds(sizes, kinds),
    )


def _chart(sizes: Measured, kind: str) -> Html:
    values = {s: [sizes.seeds(s, f"{kind}_{rank}") for rank in RANKS] for s in SIDES if s in sizes.by_side}
    return category_chart(
        f"{KINDS[kind]}: largest magnitudes of DIFF and Transformer",
        list(RANKS.values()),
        values,
        x_label="rank of the magnitude",
        log=True,
        digits=None,
    )


def _findings(sizes: Measured, kind: str) -> list[Finding | None]:
    """The largest magnitude by itself, and as a multiple of the median, which is what outlier means."""
    name = "Logits" if kind == "logits" else "Hidden states"
    top = [sizes.seeds(side, f"{kind}_top1") for side in SIDES]
    median = [sizes.seeds(side, f"{kind}_median") for side in SIDES]
    ratio = [{s: v / m[s] for s, v in t.items() if m.get(s)} for t, m in zip(top, median, strict=True)]
    return [
        versus(f"{name}, top 1", top[0], top[1], "lower", digits=None),
        versus(f"{name}, top 1 over median", ratio[0], ratio[1], "lower", digits=1),
    ]


def _table(sizes: Measured, kinds: list[str]) -> Html:
    rows: list[list[object]] = [
        [f"{NAMES[side]}, {kind}", *(number(sizes.mean(side, f"{kind}_{rank}")) for rank in RANKS)]
        for kind in kinds
        for side in SIDES
        if side in sizes.by_side
    ]
    return table(["mean over seeds", *RANKS.values()], rows, "Largest activations, mean over seeds")


def _seeds(sizes: Measured, kinds: list[str]) -> Html:
    rows: list[list[object]] = [
        [f"{NAMES[side]}, {kind}, seed {seed}", *(number(metrics.get(f"{kind}_{rank}")) for rank in RANKS)]
        for kind in kinds
        for side in SIDES
        for seed, metrics in sizes.by_side.get(side, {}).items()
    ]
    return table(["by seed", *RANKS.values()], rows, "Largest activations by seed")
