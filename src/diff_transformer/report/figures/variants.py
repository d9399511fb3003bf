"""Relatives of differential attention beside the pair, each at equal cost."""

from diff_transformer.report.category_chart import category_chart
from diff_transformer.report.figure import Figure, key, panels
from diff_transformer.report.findings import Finding, lead
from diff_transformer.report.markup import Html, table, tag
from diff_transformer.report.numbers import is_number, mean, number, short
from diff_transformer.report.pair import as_dict, dicts
from diff_transformer.report.svg import panel

BASELINE = "softmax"


def build(results: dict) -> Figure | None:
    """Loss, needles, cost and speed of every model of ``compare --variants``."""
    rows = [row for row in dicts(results.get("variants")) if _seeds(row.get("loss"))]
    if len(rows) < 2:
        return None
    names = [str(row.get("label")) for row in rows]
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
        read="Every model had the same data, steps and seeds as the pair. Where a variant's projections are larger or "
        "smaller, the width of its feed-forward makes up for it, so that parameters agree; FLOPs, cache and speed are "
        "what they then are.",
        body=panels(panel("Loss on held-out text, nats per token: lower is better", losses), columns=1)
        + tag("p", key("difference", "mean and seeds"), class_="legend")
        + _table(rows),
        findings=[_against_baseline(name, row, rows) for name, row in zip(names, rows, strict=True)],
    )


def _seeds(values: object) -> dict[int, float]:
    return {int(seed): float(v) for seed, v in as_dict(values).items() if str(seed).isdigit() and is_number(v)}


def _short(row: dict) -> str:
    words = {"softmax": "Transf.", "diff": "DIFF", "diff_v2": "V2", "grouped_diff": "grouped", "dint": "DINT",
             "fixed_lambda": "fixed λ"}  # fmt: skip
    return words.get(str(row.get("variant")), str(row.get("variant")).replace("_", " "))


def _against_baseline(name: str, row: dict, rows: list[dict]) -> Finding | None:
    """The loss of a variant less that of the Transformer, paired by seed."""
    own = _seeds(row.get("loss"))
    baseline = next((_seeds(r.get("loss")) for r in rows if r.get("variant") == BASELINE), {})
    shared = sorted(own.keys() & baseline.keys())
    if row.get("variant") == BASELINE or not shared:
        return None
    gaps = [own[seed] - baseline[seed] for seed in shared]
    gap = mean(gaps) or 0.0
    outcome, weak, seeds = lead(gaps, "lower")
    said = f"{name}: loss {number(gap, 3, sign=True)} against the Transformer ({seeds})."
    return Finding("level", said) if number(gap, 3) == number(0.0, 3) else Finding(outcome, said, weak)


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
