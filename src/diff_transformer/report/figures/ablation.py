"""The rows of Table 6: effects of the number of heads, head norm, difference and lambda_init on the loss."""

from diff_transformer.lab.paper import SAID
from diff_transformer.report.charts import Row, row_chart
from diff_transformer.report.figure import Figure, Finding, legend, panels, versus
from diff_transformer.report.markup import Html, is_number, join, mean, number, short, table, tag
from diff_transformer.report.models import Results, Series, models_in
from diff_transformer.report.render import panel

EVAL = "ablation"
NAMES = {
    "transformer": "Transformer",
    "transformer_wide": "½ heads, 2 × wide",
    "transformer_wide_norm": "the same, head norm",
    "diff": "DIFF",
    "diff_no_norm": "DIFF, no head norm",
    "diff_lambda_0.8": "DIFF, λ init 0.8",
    "diff_lambda_0.5": "DIFF, λ init 0.5",
}
SLICES = {"validation": "All tokens", "ar_hit": "AR-Hit", "others": "Others"}
SHORT_RUN = 200  # with fewer steps, the figure makes no statement about the models


def build(results: Results) -> Figure | None:
    """One panel per slice of the tokens, one row per variant; each ablation in the results has its own panels."""
    runs = [one for one in models_in(results, EVAL) if _rows(one)]
    if not runs:
        return None
    shown = []
    for one in runs:
        drawn = [
            panel(f"{title}, nats per token", row_chart(f"{title} by variant", rows, x_label="loss; lower is better"))
            for title, rows in ((title, _drawn(one, key)) for key, title in SLICES.items())
            if rows
        ]
        shown.append(join([tag("h3", one.label) if len(runs) > 1 else None, panels(*drawn)]))
    return Figure(
        id="ablation",
        title="What the gain is made of",
        source=("Table 6",),
        read="Seven models of equal size, data and schedule that differ in attention alone. Transformers: the same "
        "heads; half as many heads of twice the width; and these with DIFF's head norm. DIFF: as it is, "
        "without its head norm, and with a constant λ init. AR-Hit tokens can be recalled from the context.",
        body=join(shown) + legend(),
        findings=[finding for one in runs for finding in _findings(one)],
        paper=SAID["ablation"],
        data=_data(runs),
    )


def _rows(one: Series) -> list[str]:
    return [name for name in NAMES if any(f"{name}_{key}" in one.names() for key in SLICES)]


def _values(one: Series, name: str, key: str) -> dict[int, float]:
    """Values by training seed, from the rows; their mean if the rows were not saved."""
    found = {
        int(row["seed"]): float(row[key])
        for row in one.rows()
        if row.get("row") == name and is_number(row.get(key)) and is_number(row.get("seed"))
    }
    return found or one.seeds(f"{name}_{key}")


def _drawn(one: Series, key: str) -> list[Row]:
    sides = {name: "diff" if name.startswith("diff") else "softmax" for name in NAMES}
    return [Row(NAMES[name], sides[name], v) for name in _rows(one) if (v := _values(one, name, key))]


def _findings(one: Series) -> list[Finding | None]:
    steps = next((s for part in one.parts if is_number(s := part.provenance.get("steps"))), None)
    said: list[Finding | None] = []
    if steps is not None and steps < SHORT_RUN:
        return [
            Finding(
                "alarm", f"{steps:,} steps of training: this shows that every row runs, and nothing about the models."
            )
        ]
    for key, title in SLICES.items():
        sides = [_values(one, name, key) for name in ("diff", "transformer")]
        said.append(versus(title, sides[0], sides[1], "lower"))
    base, without = (mean(_values(one, name, "validation")) for name in ("diff", "diff_no_norm"))
    if base is not None and without is not None:
        gap = number(without - base, 3, sign=True)
        said.append(Finding("note", f"Without the head norm, the loss of DIFF changes by {gap}."))
    wide, normed = (mean(_values(one, name, "validation")) for name in ("transformer_wide", "transformer_wide_norm"))
    if wide is not None and normed is not None:
        gap = number(normed - wide, 3, sign=True)
        said.append(Finding("note", f"With a head norm, the loss of the Transformer with wide heads changes by {gap}."))
    return said


def _data(runs: list[Series]) -> Html:
    parts = []
    for one in runs:
        by_name = {row.get("row"): row for row in one.rows()}
        rows: list[list[object]] = [
            [
                NAMES[name],
                *(by_name.get(name, {}).get(key, "") for key in ("heads", "head_dim")),
                short(one.mean(f"{name}_parameters")),
                *(number(one.mean(f"{name}_{key}"), 4) for key in SLICES),
            ]
            for name in _rows(one)
        ]
        head: list[object] = [one.label, "heads", "d", "parameters", *SLICES.values()]
        parts.append(table(head, rows, "Ablation"))
    return join(parts)
