"""The figure of ``compare --variants``."""

import pytest

from diff_transformer.lab.sides import NAMES
from diff_transformer.report.figures import recall, variants
from diff_transformer.report.method import caveats
from diff_transformer.report.models import of_comparison
from diff_transformer.report.page import render_page


def row(name, loss, parameters=1_000_000, **more):
    return {
        "variant": name,
        "label": NAMES[name],
        "parameters": parameters,
        "flops_per_token": 2_500_000,
        "kv_bytes_per_token": 512,
        "intermediate_size": 320,
        "loss": {str(seed): value for seed, value in enumerate(loss)},
        "needles": {"n1_r1": {str(seed): 0.5 for seed in range(len(loss))}},
        "train_tokens_per_second": 1234.0,
        "forward_tokens_per_second": 5678.0,
        **more,
    }


@pytest.fixture
def rows():
    return [
        row("diff", [3.90, 3.80]),
        row("softmax", [4.00, 3.90]),
        row("diff_v2", [4.10, 3.95], parameters=1_004_000),
        row("dint", [3.95, 3.99]),
    ]


def test_who_is_ahead_is_said_for_each_variant(rows):
    found = {f.text.split(":")[0]: f for f in variants.build(of_comparison({"variants": rows})).findings if f}
    ours = found["DIFF"]
    assert ours.text == "DIFF: loss against the Transformer: difference −0.100 (the same sign in 2 of 2 seeds)."
    assert (ours.outcome, ours.weak) == ("diff", True)
    assert found["DIFF V2"].outcome == "softmax"
    assert found["DINT"].outcome == "level"
    assert (
        found["DINT"].text == "DINT: loss against the Transformer: difference +0.020 (the same sign in 1 of 2 seeds)."
    )
    assert "Transformer" not in found


def test_the_recall_figure_has_the_curve_of_each_variant(rows, results):
    of_variant = {
        str(seed): {
            "metrics": {"chance": 0.25, "accuracy": 0.3 + 0.1 * seed},
            "curve": {"step": [0, 50, 100], "accuracy": [0.2, 0.25, 0.3 + 0.1 * seed]},
        }
        for seed in (0, 1)
    }
    pair_alone = recall.build(of_comparison(results | {"variants": rows}))
    rows.append(row("softmax_norm", [3.93, 3.83], recall=of_variant))
    figure = recall.build(of_comparison(results | {"variants": rows}))
    label = NAMES["softmax_norm"]
    assert label in figure.body
    assert label in figure.data
    assert label not in pair_alone.body
    first, alone = figure.findings[0], pair_alone.findings[0]
    assert first.outcome == alone.outcome
    said = f"{alone.text[:-1]}; against the {label}, 0.350: DIFF higher by 0.600 (the same sign in 2 of 2 seeds)."
    assert first.text == said


def test_what_is_left_for_the_subtraction_is_said(rows):
    rows.append(row("softmax_norm", [3.93, 3.83]))
    found = [(f.outcome, f.text) for f in variants.build(of_comparison({"variants": rows})).findings if f]
    assert found[-2:] == [
        (
            "note",
            "Transformer + head norm: loss against the Transformer: difference −0.070 (the same sign in 2 of 2 seeds).",
        ),
        ("diff", "DIFF: loss against the Transformer + head norm: difference −0.030 (the same sign in 2 of 2 seeds)."),
    ]


def test_a_pair_without_that_control_has_a_caveat(rows, results):
    results["pair"]["diff"]["config"] = {"head_norm": True}
    missing = "--variants softmax_norm"
    assert missing in " ".join(caveats(of_comparison(results)))
    assert missing not in " ".join(
        caveats(of_comparison({**results, "variants": [*rows, row("softmax_norm", [3.9, 3.8])]}))
    )
    results["pair"]["diff"]["config"] = {"head_norm": False}
    assert missing not in " ".join(caveats(of_comparison(results)))


def test_one_seed_is_called_weak(rows):
    for one in rows:
        one["loss"] = {"0": one["loss"]["0"]}
    found = [f for f in variants.build(of_comparison({"variants": rows})).findings if f]
    assert all(f.weak for f in found if f.outcome in ("diff", "softmax"))
    assert "one seed: no interval" in found[0].text


def test_the_table_has_every_number(rows):
    body = str(variants.build(of_comparison({"variants": rows})).data)
    for shown in ("3.850", "+0.40 %", "1,004,000", "2.5 M", "512 B", "1,234", "5,678", "1 needle, 1 asked for", "0.50"):
        assert shown in body
    assert body.count("<tr>") == 5


@pytest.mark.parametrize("broken", [None, [], "text", [{}], [{"loss": {"0": "much"}}, {"loss": None}]])
def test_without_variants_there_is_no_figure(broken):
    assert variants.build(of_comparison({"variants": broken})) is None


def test_odd_rows_do_not_stop_the_page(results, rows):
    rows[1] |= {"parameters": None, "needles": "none", "flops_per_token": "x"}
    page = render_page({**results, "variants": [*rows, {"variant": 3, "label": None, "loss": {"0": 4.0}}]})
    assert 'id="variants"' in page
    assert 'id="variants"' not in render_page(results)
