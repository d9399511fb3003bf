"""The sections on benchmarks and on hallucination, for one model, the pair, and others."""

import re

import pytest

from diff_transformer.report.figures import hallucination, harness
from diff_transformer.report.models import of_comparison
from diff_transformer.report.page import render_page


def entry(eval_name: str, model: str, metrics: dict, rows=(), **provenance) -> dict:
    return {"eval": eval_name, "model": model, "metrics": metrics, "rows": list(rows), "provenance": provenance}


def scores(value: float, undecided: float = 0.0) -> dict:
    metrics = {}
    for place, name in enumerate(("xsum", "hotpotqa")):
        metrics |= {
            name: value + place / 10,
            f"{name}_stderr": 0.05,
            f"{name}_undecided": undecided,
            f"{name}_empty": 0.0,
        }
        metrics |= {f"{name}_truncated": 0.25}
    return {**metrics, "mean": value + 0.05}


def accuracies(value: float, shots: int) -> dict:
    cells = {"arc_challenge": value, "hellaswag": value + 0.2}
    metrics = {}
    for task, accuracy in cells.items():
        name = f"{task}_{shots}shot"
        metrics |= {
            name: accuracy,
            f"{name}_stderr": 0.01,
            f"{name}_acc": accuracy,
            f"{name}_truncated": 0.5 * (shots > 0),
        }
    return {**metrics, f"mean_{shots}shot": value + 0.1}


def built(module, *evals):
    """The figure of results for which it is not None."""
    figure = module.build(of_comparison({"evals": list(evals)}))
    assert figure is not None
    return figure


def tips(figure) -> list[str]:
    return re.findall(r'data-tip="([^"]*)"', figure.body)


@pytest.mark.parametrize("module", [harness, hallucination])
def test_nothing_measured_is_no_figure(module, results):
    assert module.build(of_comparison({})) is None
    assert module.build(of_comparison(results)) is None
    assert module.build(of_comparison({"evals": [entry(module.__name__.split(".")[-1], "m", {})]})) is None


def test_hallucination_of_one_model_reads_every_set():
    row = {"set": "xsum", "got": "<b>it</b> burned", "expected": "A fire.", "verdict": "no", "why": "not in the source"}
    figure = built(hallucination, entry("hallucination", "tiny", scores(0.4), [row] * 9, judge="endpoint:judge-1"))
    assert tips(figure) == ["xsum\ntiny: 0.400", "hotpotqa\ntiny: 0.500"]
    assert "endpoint:judge-1" in figure.read
    assert figure.data.count("&lt;b&gt;it&lt;/b&gt; burned") == hallucination.EXAMPLES
    (finding,) = [f.text for f in figure.findings if f]
    assert finding == "tiny: 25 % of the texts were truncated to the model's maximum length."


def test_a_set_without_any_verdict_keeps_its_place():
    metrics = {"xsum_undecided": 1.0, "xsum_empty": 0.0, "xsum_truncated": 0.0}
    figure = built(hallucination, entry("hallucination", "tiny", metrics))
    assert tips(figure) == ["xsum"]
    assert "tiny: 100 % of the outputs have no verdict and are left out." in [f.text for f in figure.findings if f]


def test_the_pair_is_compared_set_by_set():
    evals = [
        {**entry("hallucination", f"{side}-seed0", scores(value)), "attention": side, "seed": 0}
        for side, value in (("diff", 0.6), ("softmax", 0.5))
    ]
    found = [f for f in built(hallucination, *evals).findings if f]
    assert [f.outcome for f in found[:2]] == ["diff", "diff"]
    assert found[0].text == "xsum: DIFF 0.600, Transformer 0.500; DIFF higher by 0.100 (one seed: no interval)."


def test_zero_and_five_shot_are_two_panels_of_one_model():
    evals = [entry("harness", "tiny", accuracies(0.3, shots)) for shots in (0, 5)] + [
        entry("harness", "other", accuracies(0.5, 0))
    ]
    figure = built(harness, *evals)
    assert re.findall(r"<h3>([^<]*)</h3>", figure.body) == ["Accuracy, 0 shots", "Accuracy, 5 shots"]
    assert tips(figure) == [
        "ARC-C\ntiny: 0.300\nother: 0.500", "HellaSwag\ntiny: 0.500\nother: 0.700",
        "ARC-C\ntiny: 0.300", "HellaSwag\ntiny: 0.500",
    ]  # fmt: skip
    assert [f.text for f in figure.findings if f] == [
        "Mean over 2 tasks, 0 shots (higher is better): other 0.600, tiny 0.400.",
        "tiny, 5 shots: 50 % of the prompts exceeded the model's maximum length and lost their beginning.",
    ]
    assert "0.300 ± 0.010" in figure.data


def test_the_page_holds_both_sections(results):
    results["evals"] += [entry("harness", "m", accuracies(0.3, 0)), entry("hallucination", "m", scores(0.4))]
    page = render_page(results)
    assert 'id="harness"' in page
    assert 'id="hallucination"' in page
