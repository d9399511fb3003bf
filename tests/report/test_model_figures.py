"""Needles, allocation, outliers and quantisation for one model, for several, and for the pair."""

import re

import pytest

from diff_transformer.report.figures import allocation, needles, outliers, quantization
from diff_transformer.report.models import of_comparison
from diff_transformer.report.page import render_page

LENGTHS, DEPTHS = (8192, 65536), (0, 50)


def entry(model, name, metrics, **more):
    return {"eval": name, "model": model, "metrics": metrics, "rows": [], "provenance": {}, **more}


def needle_metrics(base):
    metrics = {"chance": 0.011, "n8_r1": base, "n8_r1_depth0": base + 0.1, "n8_r1_depth50": base - 0.1}
    for i, length in enumerate(LENGTHS):
        metrics[f"n8_r1_len{length}"] = base - 0.2 * i
        metrics |= {f"n8_r1_len{length}_depth{d}": base - 0.2 * i + (0.1 - d / 250) for d in DEPTHS}
    return metrics


def allocation_metrics(base):
    metrics = {"answer": base, "noise": 0.5 - base}
    for part, value in (("answer", base), ("noise", 0.5 - base)):
        metrics |= {f"{part}_depth{d}": value for d in DEPTHS} | {f"{part}_layer{i}": value + i / 50 for i in range(3)}
    return metrics


def outlier_metrics(base, paired):
    metrics = {"logits_median": base / 20, "hidden_median": base / 40}
    for kind in ("logits", "hidden", *(("logits_first", "logits_second") if paired else ())):
        metrics |= {f"{kind}_top{k}": base / k for k in (1, 2, 3, 10, 100)}
    return metrics | {f"{kind}_layer{i}_top1": base / (i + 1) for kind in ("logits", "hidden") for i in range(3)}


def quantization_metrics(base):
    metrics: dict[str, float] = {"chance": 0.25}
    for bits, drop in ((16, 0.0), (8, 0.01), (4, 0.2)):
        metrics |= {f"accuracy_{bits}bit": base - drop, f"loss_{bits}bit": 3 - base + drop}
    return metrics


FIGURES = {
    "needle": (needles, needle_metrics),
    "allocation": (allocation, allocation_metrics),
    "outliers": (outliers, lambda base: outlier_metrics(100 * base, base > 0.45)),
    "quantization": (quantization, quantization_metrics),
}


@pytest.fixture(params=FIGURES)
def name(request):
    return request.param


def built(module, evals):
    figure = module.build(of_comparison({"evals": evals}))
    assert figure is not None
    return figure


def entries(name, *models):
    _, metrics = FIGURES[name]
    bases = (0.3, 0.5, 0.4, 0.35)
    return {"evals": [entry(model, name, metrics(base)) for model, base in zip(models, bases, strict=False)]}


def test_one_model_is_shown_by_its_name_and_ranked_with_nobody(name):
    module, _ = FIGURES[name]
    figure = built(module, **entries(name, "Llama-3.2-1B"))
    assert "Llama-3.2-1B" in figure.body
    assert "DIFF" not in figure.body
    assert "Transformer" not in figure.body
    assert not [f for f in figure.findings if f is not None]
    assert "ahead</span>" not in figure.html(1, "")


def test_three_models_are_each_drawn_and_listed_from_the_best(name):
    module, _ = FIGURES[name]
    figure = built(module, **entries(name, "alpha", "beta", "gamma"))
    for side, label in (("s1", "alpha"), ("s2", "beta"), ("s3", "gamma")):
        assert f'swatch {side}" aria-hidden="true"></i>{label}' in figure.body
        assert f'fill="var(--{side})"' in figure.body
    said = [f.text for f in figure.findings if f is not None]
    places = sorted((said[0].index(label), label) for label in ("alpha", "beta", "gamma"))
    best_first = ["alpha", "gamma", "beta"] if name == "outliers" else ["beta", "gamma", "alpha"]
    assert [label for _, label in places] == best_first


def test_the_pair_keeps_its_names_and_is_compared(name):
    module, metrics = FIGURES[name]
    evals = [
        entry(f"{side}-seed{seed}", name, metrics(base + seed / 100), attention=side, seed=seed)
        for side, base in (("diff", 0.5), ("softmax", 0.3))
        for seed in (0, 1)
    ]
    figure = built(module, evals)
    said = [f for f in figure.findings if f is not None]
    assert said[0].outcome == ("softmax" if name == "outliers" else "diff")
    assert "in 2 of 2 seeds" in said[0].text
    assert re.search(r"DIFF,( logits,)? seed 1<", str(figure.data))


def test_nothing_measured_is_no_figure(name):
    module, _ = FIGURES[name]
    assert module.build(of_comparison({})) is None
    assert module.build(of_comparison({"evals": [entry("m", name, {"something": 1.0})]})) is None
    assert module.build(of_comparison({"evals": [entry("m", "other", FIGURES[name][1](0.3))]})) is None


def test_a_page_of_one_foreign_model(name):
    page = render_page({"schema": 1, **entries(name, '<script>alert("x")</script>')})
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_needles_by_length_have_a_map_with_an_average_row():
    figure = built(needles, **entries("needle", "m"))
    label = "Needle accuracy of m, N = 8, R = 1, depth by length"
    drawing = figure.body[figure.body.index(label) :]
    drawing = drawing[: drawing.index("</svg>")]
    assert re.findall(r">(8\.19K|65\.5K|0 %|50 %|mean)<", drawing) == ["8.19K", "65.5K", "0 %", "50 %", "mean"]
    tips = [tip.split("\n") for tip in re.findall(r'data-tip="([^"]*)"', drawing)]
    assert len(tips) == 6
    assert tips[-1] == ["m, 65,536 tokens, mean over depths", "seed 0: 0.100"]
    assert tips[0] == ["m, 8,192 tokens, depth 0 %", "seed 0: 0.400"]


def test_one_length_has_no_map_by_length():
    metrics = {k: v for k, v in needle_metrics(0.4).items() if "len" not in k}
    body = built(needles, [entry("m", "needle", metrics)]).body
    assert "depth by number of needles" in body
    assert "depth by length" not in body


def test_a_model_at_chance_is_named():
    figure = built(needles, [entry("m", "needle", {"chance": 0.1, "n1_r1": 0.15, "n1_r1_depth0": 0.15})])
    assert [f.text for f in figure.findings if f] == ["N = 1, R = 1: m is not clear of chance (0.100)."]


def test_both_maps_of_a_differential_model_are_in_the_table():
    evals = [entry("d", "outliers", outlier_metrics(50.0, True)), entry("s", "outliers", outlier_metrics(90.0, False))]
    body = built(outliers, evals).body
    assert body.count("d, logits of map") == 2
    assert "s, logits of map" not in body


def test_quantisation_says_what_shares_a_scale_and_what_it_costs():
    evals = [
        entry(m, "quantization", quantization_metrics(base), provenance={"granularity": "head"})
        for m, base in (("a", 0.5), ("b", 0.6))
    ]
    figure = built(quantization, evals)
    assert "the largest magnitude of the logits of each head." in figure.read
    said = [f.text for f in figure.findings if f]
    assert said[1] == "Change of accuracy from 16 to 4 bits (higher is better): a −0.200, b −0.200."
