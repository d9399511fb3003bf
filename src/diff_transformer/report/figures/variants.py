"""Relatives of differential attention beside the pair, each at equal cost."""

from diff_transformer.report.charts import category_chart
from diff_transformer.report.figure import Figure, Finding, key, lead, panels
from diff_transformer.report.markup import Html, is_number, mean, number, short, table, tag
from diff_transformer.report.models import Results, as_dict, dicts
from diff_transformer.report.render import panel

BASELINE, NORMALISED = "softmax", "softmax_norm"


def build(results: Results) -> Figure | None:
    """Loss, needles, cost and speed of every model of ``compare --variants``."""
    rows = [row for row in dicts(results.about.get("variants")) if _seeds(row.get("loss"))]
    if len(rows) < 2:
        return None
    losses = category_chart(
        "Loss of every variant",
        [_short(row) for row in rows],
        {"difference": [_seeds(row.get("loss")) for row in rows]},
        x_label="variant",
        names={"difference": "loss"},
    )
    return Figure(
        id="variants",
        title="Relatives of differential attention",
        source=(),
        read="Every model had the same data, steps and seeds as the pair. The feed-forward width is set so that "
        "parameter counts agree. FLOPs, cache and speed are as measured.",
        body=panels(panel("Loss on held-out text, nats per token: lower is better", losses), columns=1)
        + tag("p", key("difference", "mean and seeds"), class_="legend")
        + _table(rows),
        findings=_findings(rows),
    )


def _seeds(values: object) -> dict[int, float]:
    return {int(seed): float(v) for seed, v in as_dict(values).items() if str(seed).isdigit() and is_number(v)}


def _short(row: dict) -> str:
    words = {"softmax": "Transf.", "diff": "DIFF", "diff_v2": "V2", "grouped_diff": "grouped", "dint": "DINT",
             "fixed_lambda": "fixed λ", "softmax_norm": "T., norm"}  # fmt: skip
    return words.get(str(row.get("variant")), str(row.get("variant")).replace("_", " "))


def _findings(rows: list[dict]) -> list[Finding | None]:
    """Findings on each variant against the Transformer, and on DIFF against the Transformer with normalised heads.

    The second comparison isolates the effect of the subtraction."""
    by_name = {str(row.get("variant")): row for row in rows}
    baseline, normalised = by_name.get(BASELINE), by_name.get(NORMALISED)
    found = [_against(row, baseline, "the Transformer") for row in rows if row is not baseline]
    return [*found, _against(by_name.get("diff"), normalised, "the Transformer with normalised heads")]


def _against(row: dict | None, other: dict | None, name: str) -> Finding | None:
    """The loss of one model less that of a Transformer, paired by seed."""
    if row is None or other is None:
        return None
    own, theirs = _seeds(row.get("loss")), _seeds(other.get("loss"))
    gaps = [own[seed] - theirs[seed] for seed in sorted(own.keys() & theirs.keys())]
    if not gaps:
        return None
    gap = number(mean(gaps), 3, sign=True)
    outcome, weak, seeds = lead(gaps, "lower")
    said = f"{row.get('label')}: loss {gap} against {name} ({seeds})."
    if row.get("variant") == NORMALISED:
        return Finding("note", said)
    return Finding("level", said) if gap == number(0.0, 3, sign=True) else Finding(outcome, said, weak)


def _table(rows: list[dict]) -> Html:
    cells = list(dict.fromkeys(cell for row in rows for cell in as_dict(row.get("needles"))))
    base = next((row for row in rows if row.get("variant") == BASELINE), rows[0])
    head: list[object] = ["", "loss", *map(_cell_name, cells), "parameters", "against Transformer", "FLOPs a token"]
    head += ["cache a token", "feed-forward", "tokens/s, training", "tokens/s, forward"]
    body: list[list[object]] = []
    for row in rows:
        count, of = row.get("parameters"), base.get("parameters")
        ratio = 100 * (count / of - 1) if is_number(count) and is_number(of) and of else None
        body.append([
            row.get("label"), number(mean(_seeds(row.get("loss"))), 3),
            *(number(mean(_seeds(as_dict(row.get("needles")).get(cell))), 2) for cell in cells),
            number(count, 0), "–" if ratio is None else f"{number(ratio, 2, sign=True)} %",
            short(row.get("flops_per_token")), f"{number(row.get('kv_bytes_per_token'), 0)} B",
            number(row.get("intermediate_size"), 0), number(row.get("train_tokens_per_second"), 0),
            number(row.get("forward_tokens_per_second"), 0),
        ])  # fmt: skip
    return table(head, body, "Variants at equal cost")


def _cell_name(cell: str) -> str:
    n, _, r = cell.removeprefix("n").partition("_r")
    return f"{n} needle{'' if n == '1' else 's'}, {r} asked"
