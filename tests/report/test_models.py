"""Any number of models in the results: who is who, and in what colours."""

import re

import pytest

from diff_transformer.report.charts import Line, category_chart, line_chart
from diff_transformer.report.load import load_evals
from diff_transformer.report.models import Results, compared, legend_of, models_in, names_of, of_comparison, pair_in
from diff_transformer.report.render import inline


def entry(model: str, metrics: dict, eval_name: str = "needle", **more) -> dict:
    return {"eval": eval_name, "model": model, "metrics": metrics, **more}


def test_a_comparison_is_the_pair_with_its_seeds(results):
    diff, softmax = models_in(of_comparison(results), "needle")
    assert (diff.side, diff.label, softmax.side, softmax.label) == ("diff", "DIFF", "softmax", "Transformer")
    assert list(diff.seeds("n1_r1")) == [0, 1]
    assert diff.mean("n1_r1") == pytest.approx(sum(diff.seeds("n1_r1").values()) / 2)
    assert len(diff.rows()) == 2
    assert pair_in([diff, softmax]) == (diff, softmax)
    assert models_in(of_comparison(results), "harness") == []


def test_training_seeds_come_from_the_record_and_data_seeds_are_none():
    runs = [{"run": {"setting": "", "side": "tiny", "seed": seed}} for seed in (3, 4)]
    entries = [entry("", {"a": float(seed)}, provenance=run) for seed, run in enumerate(runs, 1)]
    entries.append(entry("other", {"a": 5.0}, provenance={"seed": 7}))
    models = models_in(Results(load_evals(entries)))
    assert [(m.label, m.seeds("a")) for m in models] == [("tiny", {3: 1.0, 4: 2.0}), ("other", {0: 5.0})]


def test_parts_measured_apart_are_one_model_and_contradictions_are_two():
    entries = [entry("m", {"a": 1.0}), entry("m", {"b": 2.0}), entry("m", {"a": 3.0})]
    models = models_in(of_comparison({"evals": entries}), "needle")
    assert [(m.label, m.metrics) for m in models] == [("m", {0: {"a": 1.0, "b": 2.0}}), ("m (2)", {0: {"a": 3.0}})]


def test_a_model_keeps_its_style_on_the_whole_page():
    results = {"evals": [entry("a", {"x": 1.0}), entry("b", {"x": 1.0}), entry("b", {"y": 1.0}, "outliers")]}
    assert [m.side for m in models_in(of_comparison(results))] == ["s1", "s2"]
    assert [(m.side, m.names()) for m in models_in(of_comparison(results), "outliers")] == [("s2", ["y"])]


def test_styles_are_told_apart_and_the_pair_keeps_its_own():
    evals = [entry(f"m{i}", {"x": 1.0}) for i in range(7)]
    evals += [entry("ours", {"x": 1.0}, provenance={"attention": "diff"})]
    sides = [m.side for m in models_in(of_comparison({"evals": evals}))]
    assert sides == ["s1", "s2", "s3", "s4", "s5", "s6", "s1 again1", "diff"]
    two = [entry(name, {"x": 1.0}, provenance={"attention": "softmax"}) for name in ("wide", "narrow")]
    assert [m.side for m in models_in(of_comparison({"evals": two}))] == ["s1", "s2"]


def test_values_that_are_no_numbers_are_left_out():
    assert models_in(of_comparison({"evals": [entry("m", {"a": float("nan"), "b": None}), None, 3]})) == []
    assert models_in(of_comparison({"evals": [entry("m", {"a": float("nan"), "b": 1})]}))[0].metrics == {0: {"b": 1.0}}


def test_three_models_are_ranked_and_a_pair_is_compared(results):
    three = models_in(of_comparison({"evals": [entry(n, {"a": v}) for n, v in (("p", 0.5), ("q", 0.9), ("r", 0.7))]}))
    finding = compared("Accuracy", three, "a", "higher")
    assert (finding.outcome, finding.text) == (
        "note", "Accuracy (higher is better): q 0.900, r 0.700, p 0.500.",
    )  # fmt: skip
    assert compared("Accuracy", three[:1], "a", "higher") is None
    assert compared("Accuracy", three, [{0: 1.0}, {}, {}], "higher") is None
    assert compared("N = 2", models_in(of_comparison(results), "needle"), "n2_r2", "higher").outcome == "diff"


def test_labels_are_data():
    models = models_in(of_comparison({"evals": [entry("<b>x</b>", {"a": 1.0})]}))
    assert "<b>" not in legend_of(models)
    drawing = category_chart("c", ["one"], {"s1": [{0: 1.0}]}, x_label="x", names=names_of(models))
    assert "<b>" not in inline(drawing)


def test_bars_of_many_models_stay_in_their_category():
    values = {f"s{i}": [{0: 1.0}, {0: 1.0}] for i in range(1, 7)}
    drawn = inline(category_chart("c", ["one", "two"], values, x_label="x", bars=True, names={s: s for s in values}))
    places = re.findall(r'<path d="M([\d.]+),[\d.]+h[\d.]+v[^"]*" fill="var\(--s(\d)\)"', drawn)
    starts = [[float(x) for x, side in places if side == str(i)] for i in range(1, 7)]
    assert [len(of) for of in starts] == [2] * 6
    for of in zip(*starts, strict=True):
        assert list(of) == sorted(of)
    middle = (starts[0][1] + starts[-1][0]) / 2
    assert max(of[0] for of in starts) < middle < min(of[1] for of in starts)


def test_axes_in_logarithms():
    line = Line("m", [(0.0, 1.0), (10.0, 10.0), (1000.0, 1.0)], "s1", joined=False, read=True)
    drawn = inline(line_chart("l", [line], x_label="x", log_x=True, log_y=True))
    assert "mark-symbol" in drawn
    assert "mark-line" not in drawn
    assert drawn.count('class="hit"') == 2
