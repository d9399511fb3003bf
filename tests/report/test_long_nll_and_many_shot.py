"""Figures 4, 6, 7 and 9 and Table 6 of the paper, for one model, for a pair and for any number of them."""

import itertools
import re

import pytest

from diff_transformer.report.figures import IN_ORDER, long_nll, loss_slices, many_shot
from diff_transformer.report.models import models_in, of_comparison

EDGES = [0, 1, 2, 4, 8, 16, 32]


def nll_entry(model: str, books: list[float], **more) -> dict:
    """Each book has a constant loss, which therefore equals every cumulative mean."""
    counts = [b - a for a, b in itertools.pairwise(EDGES)]
    rows = [{"book": f"book {i}", "sums": [x * n for n in counts], "counts": counts} for i, x in enumerate(books)]
    mean = sum(books) / len(books)
    metrics = {**{f"nll{n}": mean for n in EDGES[1:]}, "books": float(len(books))}
    return {
        "eval": "long_nll",
        "model": model,
        "metrics": metrics,
        "rows": rows,
        "provenance": {"edges": EDGES},
        **more,
    }


def shot_entry(model: str, accuracy: float, data: str = "trec", **more) -> dict:
    metrics = {"labels": 6.0, "chance": 1 / 6, "ties": 0.0}
    for shots, tokens, share in ((1, 20.0, 0.5), (8, 200.0, 0.8), (40, 1000.0, 1.0)):
        metrics |= {f"shots{shots}": accuracy * share, f"tokens{shots}": tokens}
    for order, spread in (("random", 0.04), ("alternate", 0.1)):
        metrics |= {f"{order}_seed{i}": accuracy + (i - 1) * spread for i in range(3)}
        metrics |= {f"{order}_mean": accuracy, f"{order}_best": accuracy + spread}
        metrics |= {f"{order}_worst": accuracy - spread, f"{order}_margin": 2 * spread}
    return {"eval": "many_shot", "model": model, "metrics": metrics, "provenance": {"data": data}, **more}


def slice_entry(model: str, loss: float, **more) -> dict:
    metrics = {"validation": loss, "ar_hit": loss - 1, "others": loss + 0.2, "ar_hit_share": 0.2, "perplexity": 9.0}
    return {"eval": "associative_recall", "model": model, "metrics": metrics, **more}


def said(figure) -> list[str]:
    return [finding.text for finding in figure.findings if finding is not None]


def tips(figure) -> list[str]:
    return re.findall(r'data-tip="([^"]*)"', figure.body)


def test_all_three_are_on_the_page():
    assert {long_nll, many_shot, loss_slices} <= set(IN_ORDER)


@pytest.mark.parametrize("module", [long_nll, many_shot, loss_slices])
def test_nothing_to_show(module, results):
    results["evals"] = [entry for entry in results["evals"] if entry["eval"] == "needle"]
    assert module.build(of_comparison(results)) is None
    assert module.build(of_comparison({})) is None
    assert (
        module.build(
            of_comparison({"evals": [{"eval": module.__name__.rsplit(".", 1)[-1], "metrics": {"other": 1.0}}]})
        )
        is None
    )


def test_a_pair_by_position_has_one_interval_over_books():
    pair = [
        nll_entry("diff-seed0", [3.0, 2.0, 4.0, 3.0], attention="diff", seed=0),
        nll_entry("softmax-seed0", [3.1, 2.2, 4.1, 3.2], attention="softmax", seed=0),
    ]
    figure = long_nll.build(of_comparison({"evals": pair}))
    # differences -.1, -.2, -.1, -.2: their mean is -.15, and no resample leaves -.2 to -.1
    expected = "difference −0.150, interval over examples −0.200 to −0.100"
    assert " ".join(said(figure)).count(expected) == 1
    again = [{**entry, "model": entry["model"][:-1] + "1", "seed": 1} for entry in pair]
    assert expected in " ".join(
        said(long_nll.build(of_comparison({"evals": [*pair, *again]})))
    )  # the same books are no others
    assert "Average NLL over the first 32 positions: DIFF 3.000, Transformer 3.150" in said(figure)[0]
    assert "Averages over 4 books" in said(figure)[-1]
    assert "position 32\nDIFF: 3.000\nTransformer: 3.150" in tips(figure)
    assert "position 32\nDIFF − Transformer: −0.1500" in tips(figure)
    assert figure.body.count("<svg") == 2


@pytest.mark.parametrize("longer", ["diff", "softmax"])
def test_no_difference_is_drawn_where_one_model_has_no_position(longer):
    """The later half of each book costs more, so means over other lengths differ where the models do not."""
    pair = []
    for side in ("diff", "softmax"):
        entry = nll_entry(f"{side}-seed0", [3.0, 2.0], attention=side, seed=0)
        for row in entry["rows"]:
            row["sums"][-1] += 48.0
        entry["metrics"]["nll32"] += 1.5
        if side != longer:
            del entry["metrics"]["nll32"]
            entry["provenance"] = {"edges": EDGES[:-1]}
            for row in entry["rows"]:
                row |= {"sums": row["sums"][:-1], "counts": row["counts"][:-1]}
        pair.append(entry)
    figure = long_nll.build(of_comparison({"evals": pair}))
    assert [tip for tip in tips(figure) if "DIFF − Transformer" in tip and "0.0000" not in tip] == []
    assert "position 16\nDIFF − Transformer: 0.0000" in tips(figure)
    assert not any(tip.startswith("position 32\nDIFF − Transformer") for tip in tips(figure))


def test_a_pair_by_position_without_rows_has_no_interval():
    pair = [
        {**nll_entry(f"{side}-seed0", [value], attention=side, seed=0), "rows": []}
        for side, value in (("diff", 3.0), ("softmax", 3.1))
    ]
    figure = long_nll.build(of_comparison({"evals": pair}))
    assert "position 32\nDIFF − Transformer: −0.1000" in tips(figure)
    assert not [text for text in said(figure) if "interval over books" in text]


def test_one_and_three_models_by_position():
    alone = long_nll.build(of_comparison({"evals": [nll_entry("gpt2", [3.0, 2.0])]}))
    assert "position 16\ngpt2: 2.500" in tips(alone)
    assert alone.body.count("<svg") == 1
    names = ("gpt2", "qwen", "llama")
    figure = long_nll.build(of_comparison({"evals": [nll_entry(name, [3.0 + i, 2.0]) for i, name in enumerate(names)]}))
    assert "position 16\ngpt2: 2.500\nqwen: 3.000\nllama: 3.500" in tips(figure)
    assert "gpt2 2.500, qwen 3.000, llama 3.500" in said(figure)[0]


def test_positions_are_in_powers_of_two():
    assert long_nll.ticks([1, 2, 3, 1024, 65536]) == [(1, "1"), (2, "2"), (1024, "1K"), (65536, "64K")]
    assert len(long_nll.ticks([2**i for i in range(17)])) <= 9


def test_a_pair_over_many_shots():
    pair = [
        shot_entry("diff-seed0", 0.8, attention="diff", seed=0),
        shot_entry("softmax-seed0", 0.6, attention="softmax", seed=0),
    ]
    figure = many_shot.build(of_comparison({"evals": pair}))
    assert "tokens: 1,000\nDIFF: 0.800\nTransformer: 0.600" in tips(figure)
    assert "in random order\nDIFF: 0.800 (0.760 · 0.800 · 0.840)\nTransformer: 0.600 (0.560 · 0.600 · 0.640)" in tips(
        figure
    )
    assert any(tip.startswith("alternately by class\n") for tip in tips(figure))
    assert "trec, 40 examples, accuracy: DIFF 0.800, Transformer 0.600" in said(figure)[0]
    assert "trec, best − worst order alternately by class: DIFF 0.200, Transformer 0.200" in said(figure)[2]
    assert "0.800" in figure.data


def test_many_models_and_data_sets():
    evals = [shot_entry(name, 0.5 + i / 10, data) for i, name in enumerate("abc") for data in ("trec", "banking77")]
    figure = many_shot.build(of_comparison({"evals": evals}))
    assert figure.body.count("<svg") == 4
    assert figure.body.count('class="key"') == 4  # three models, chance
    assert "(2)" not in figure.body
    assert "tokens: 20\na: 0.250\nb: 0.300\nc: 0.350" in tips(figure)
    assert said(figure)[0].startswith("trec, 40 examples, accuracy (higher is better): c 0.700, b 0.600, a 0.500")
    assert sum(text.startswith("banking77") for text in said(figure)) == 3


def test_several_data_sets_leave_the_pair_its_colours():
    pair = [
        make(f"{side}-seed0", 0.5, *data, attention=side, seed=0)
        for side in ("diff", "softmax")
        for make, *data in ((shot_entry, "trec"), (shot_entry, "banking77"), (slice_entry,))
    ]
    pair[1]["metrics"]["shots40"] = 0.7
    for module in (many_shot, loss_slices):
        assert module.build(of_comparison({"evals": pair})).body.count('class="swatch diff"') == 1
    both = models_in(of_comparison({"evals": pair}), "many_shot")[0]
    assert both.seeds("trec: shots40") != both.seeds("banking77: shots40")
    assert both.seeds("shots40") == {}
    twice = [slice_entry("m", 3.0), slice_entry("m", 3.1)]
    assert "m (2)" in loss_slices.build(of_comparison({"evals": twice})).body


def test_a_model_at_chance_is_said_to_be():
    figure = many_shot.build(of_comparison({"evals": [shot_entry("weak", 0.2)]}))
    assert "no model is clear of chance (0.167)" in said(figure)[-1]
    assert not [
        text for text in said(many_shot.build(of_comparison({"evals": [shot_entry("good", 0.9)]}))) if "chance" in text
    ]


def test_slices_of_one_model_and_of_several():
    alone = loss_slices.build(of_comparison({"evals": [slice_entry("gpt2", 3.0)]}))
    assert "AR-Hit\ngpt2: 2.000" in tips(alone)
    assert alone.body.count("<svg") == 1
    several = loss_slices.build(of_comparison({"evals": [slice_entry(name, 3.0 + i) for i, name in enumerate("abc")]}))
    assert "others\na: 3.200\nb: 4.200\nc: 5.200" in tips(several)
    pair = [slice_entry(f"{s}-seed0", v, attention=s, seed=0) for s, v in (("diff", 3.0), ("softmax", 3.1))]
    figure = loss_slices.build(of_comparison({"evals": pair}))
    assert figure.body.count("<svg") == 2
    assert "all tokens\nDIFF − Transformer: −0.1000" in tips(figure)


def test_hostile_values_are_skipped():
    broken = nll_entry("x", [3.0])
    broken["rows"] = [{"book": "b", "sums": [None] * 6, "counts": [1] * 6}, 3, {"sums": [1.0]}]
    other = {**nll_entry("y", [3.0]), "provenance": None}
    for side, entry in (("diff", broken), ("softmax", other)):
        entry["attention"] = side
    assert long_nll.build(of_comparison({"evals": [broken, other]})).body.count("<svg") == 2
    name = "<script>alert(1)</script>"
    assert name not in many_shot.build(of_comparison({"evals": [shot_entry(name, 0.5, name)]})).html(1, "")
