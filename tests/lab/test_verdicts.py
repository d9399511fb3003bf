"""Quantities and the verdicts on claims, from rows."""

import math

import pytest
from made_rows import comparison, model

from diff_transformer.lab.quantities import QUANTITIES, best_minus_worst, needle, registered
from diff_transformer.lab.rows import Rows, row, told
from diff_transformer.lab.verdicts import Outcome, judge

SHOTS = ["shots", "order", "order_seed", "score"]


def table(experiment, columns, values, side="diff", **more):
    return [
        row(experiment, side, example=i, **dict(zip(columns, of, strict=True)), **more) for i, of in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("id", "rows", "value"),
    [
        ("loss", table("associative_recall", ["loss"], [[1.0], [2.0]]), 1.5),
        ("ar_hit", table("associative_recall", ["loss", "ar_hit_sum", "ar_hit_count"], [[1, 3, 2], [1, 3, 1]]), 2.0),
        ("answer", table("allocation", ["answer", "noise"], [[0.2, 0], [0.4, 0]]), 0.3),
        ("logits", table("outliers", ["logits_top1", "logits_median"], [[3, 1], [7, 3]]), 7.0),
        ("logits_in_medians", table("outliers", ["logits_top1", "logits_median"], [[3, 1], [8, 3]]), 4.0),
        ("throughput", table("throughput", ["train_tokens_per_second"], [[1], [2], [9]]), 2.0),
        ("long_nll", table("long_nll", ["end", "sum", "count"], [[1, 3, 1], [3, 3, 2]]), 2.0),
        ("nll128", table("long_nll", ["end", "sum", "count"], [[128, 256, 128], [256, 999, 128]]), 2.0),
        ("four_bits", table("quantization", ["bits", "loss"], [[16, 1.0], [4, 1.5]]), 0.5),
        ("six_bits", table("quantization", ["bits", "loss"], [[6, 1.0], [4, 1.5]]), None),
        ("recall", table("recall", ["length", "hits", "questions"], [[8, 2, 4], [8, 4, 4], [16, 0, 4]]), 0.75),
        ("recall_2x", table("recall", ["length", "hits", "questions"], [[8, 2, 4], [16, 1, 4]]), 0.25),
        ("validation_loss", table("validation", ["step", "loss"], [[0, 9], [20, 3], [10, 4]]), 3.0),
        ("steps_to_goal", table("recall_curve", ["step", "accuracy"], [[0, 0], [8, 0.8], [16, 1]]), math.log2(12)),
        ("many_shot", table("many_shot", SHOTS, [[4, "random", 0, 1], [1, "random", 0, 0]]), 1.0),
        ("hallucination", table("hallucination", ["set", "score"], [["a", 1], ["a", None], ["b", 0]]), 0.5),
        ("parameters", table("model", ["parameters"], [[7]]), 7.0),
    ],
)  # fmt: skip
def test_each_quantity_is_what_its_name_says(id, rows, value):
    for each in rows:  # rows of text share a number across bits, bins of positions across a document
        if each["experiment"] in ("quantization", "long_nll"):
            each["example"] = "one"
    assert QUANTITIES[id].values(Rows(rows), "diff") == ({} if value is None else {0: pytest.approx(value)})


def test_few_bits_cost_what_they_do_over_the_most_that_each_model_has():
    bits = {"a": (16, 4), "b": (8, 4)}
    rows = [row("quantization", side, example="one", bits=n, loss=1 / n) for side in bits for n in bits[side]]
    assert [QUANTITIES["four_bits"].values(Rows(rows), side)[0] for side in bits] == [3 / 16, 1 / 8]


def test_the_order_of_examples_costs_the_range_of_accuracies():
    scores = {0: [1, 1, 0, 0], 1: [1, 1, 1, 1], 2: [0, 0, 0, 1]}
    rows = [
        row("many_shot", "diff", example=i, shots=4, order="random", order_seed=order, score=score)
        for order, of in scores.items()
        for i, score in enumerate(of)
    ]
    assert QUANTITIES["order_random"].values(Rows(rows), "diff") == {0: 0.75}
    assert QUANTITIES["order_random"].reduce is best_minus_worst


def test_each_model_has_the_lengths_of_its_own_measurement():
    recall, bins = ["length", "hits", "questions"], ["end", "sum", "count"]
    rows = [
        *table("recall", recall, [[8, 2, 4], [16, 1, 4]]),
        *table("recall", recall, [[4, 4, 4], [8, 0, 4]], "gpt2"),
        *table("long_nll", bins, [[128, 256, 128]]),
        *table("long_nll", bins, [[100, 300, 100]], "gpt2"),
    ]
    found = {id: [QUANTITIES[id].values(Rows(rows), side) for side in ("diff", "gpt2")]
             for id in ("recall", "recall_2x", "nll128", "long_nll")}  # fmt: skip
    assert found == {"recall": [{0: 0.5}, {0: 1.0}], "recall_2x": [{0: 0.25}, {0: 0.0}], "nll128": [{0: 2.0}, {}],
                     "long_nll": [{0: 2.0}, {0: 3.0}]}  # fmt: skip


def test_cells_of_needles_are_those_that_were_measured():
    rows = Rows(table("needle", ["n", "r", "score"], [[6, 2, 1.0], [3, 1, 0.0]]))
    assert [q.id for q in registered(rows) if q.experiment == "needle"] == ["needle_n3_r1", "needle_n6_r2"]
    assert needle(6, 2).values(rows, "diff") == {0: 1.0}


def outcomes(rows, other="softmax"):
    return {id: of[other] for id, of in judge(Rows(rows), "diff", [other, "softmax_norm"]).items() if other in of}


def test_a_claim_holds_where_its_whole_interval_is_on_its_side():
    found = outcomes(comparison(explorer=False))
    assert found["loss"].outcome is Outcome.HELD
    assert found["recall"].outcome is Outcome.HELD
    assert found["logits"].outcome is Outcome.INCONCLUSIVE  # a largest value has no interval
    assert found["needle_n1_r1"].outcome is Outcome.HELD  # no difference is no worse
    assert found["needle_n2_r1"].outcome is Outcome.INCONCLUSIVE
    assert (found["loss"].few, found["loss"].holm) == (True, None)
    swapped = [
        {**each, "side": {"diff": "softmax", "softmax": "diff"}.get(each["side"], each["side"])}
        for each in comparison()
    ]
    assert outcomes(swapped)["loss"].outcome is Outcome.FAILED


def test_with_three_seeds_claims_of_the_paper_are_corrected_together():
    found = outcomes(comparison(seeds=(0, 1, 2), explorer=False))
    assert found["loss"].difference.over == "seeds and examples"
    assert found["loss"].holm >= found["loss"].difference.p
    assert found["recall"].holm is None  # not a claim of the paper


def test_a_run_that_diverged_leaves_no_fair_sample():
    rows = comparison(seeds=(0, 1, 2))
    rows.append(row("about", "softmax", 1, "demo", of="run", example="diverged", key="diverged", value="step 7"))
    verdict = outcomes(rows)["loss"]
    assert (verdict.outcome, verdict.untested) == (Outcome.INCONCLUSIVE, "training diverged with seed 1")
    assert sorted(verdict.ours_by_seed) == [0, 2]


def test_seeds_that_were_not_run_do_not_spoil_the_others():
    rows = [*comparison(seeds=(0, 1, 2)), *model("softmax", 3), *model("softmax", 4)]
    assert outcomes(rows)["loss"].outcome is Outcome.HELD


def test_a_transformer_that_recalls_nothing_cannot_test_recall():
    found = outcomes(comparison())
    assert found["ar_hit"].outcome is Outcome.INCONCLUSIVE
    assert "does not recall there" in found["ar_hit"].untested


def test_other_examples_are_not_paired():
    rows = [*model("diff"), *({**each, "data_seed": 1} for each in model("softmax"))]
    assert not judge(Rows(rows), "diff", ["softmax"])


@pytest.mark.parametrize(
    ("experiment", "id", "key", "values"),
    [("needle", "needle_n1_r1", "length", (64, 128)), ("needle", "needle_n1_r1", "depths", ([0.5], [0.0, 1.0])),
     ("allocation", "answer", "part", ("all", "validation")), ("recall", "recall", "pairs", (2, 8))],
)  # fmt: skip
def test_measurements_with_other_settings_are_not_judged_against_each_other(experiment, id, key, values):
    rows = [row for row in comparison() if not (row["experiment"] == "about" and row.get("of") == experiment)]
    rows += [row("about", side, 0, "demo", of=experiment, example=key, key=key, value=value)
             for side, value in zip(("diff", "softmax"), values, strict=True)]  # fmt: skip
    verdict = outcomes(rows)[id]
    assert verdict.untested == f"measured with other settings: {key} {told(values[0])} and {told(values[1])}"
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_settings_are_told_without_brackets():
    assert [told(value) for value in ((0.0, 0.25), [[1, 1], [4, 2]], True, 128, 1e-5)] == [
        "0, 0.25", "(1, 1), (4, 2)", "True", "128", "1e-05",
    ]  # fmt: skip


def test_numbers_that_are_not_finite_decide_nothing():
    rows = comparison()
    for each in rows:
        if each["experiment"] == "associative_recall" and each["side"] == "diff" and each["example"] % 2:
            each["loss"] = math.inf
    verdict = outcomes(rows)["loss"]
    assert verdict.difference.examples == 20
    assert verdict.here[1] - verdict.here[0] == pytest.approx(verdict.difference.mean)  # of the same examples
    zero = [row("throughput", side, example=i, train_tokens_per_second=speed)
            for side, speed in (("diff", 5.0), ("softmax", 0.0)) for i in range(3)]  # fmt: skip
    verdict = judge(Rows(zero), "diff", ["softmax"])["throughput"]["softmax"]
    assert (verdict.outcome, verdict.untested) == (Outcome.INCONCLUSIVE, "the other model's number is 0")


def test_an_example_that_one_seed_lacks_is_left_out_of_all():
    rows = comparison(seeds=(0, 1, 2), explorer=False)
    lacking = [each for each in rows if (each["experiment"], each["seed"], each["example"]) != ("allocation", 1, 3)]
    difference = outcomes(lacking)["answer"].difference
    assert (difference.over, difference.examples) == ("seeds and examples", 39)


def test_equal_differences_in_every_seed_are_no_certainty():
    rows = [row("recall", side, seed, example=0, length=8, hits=hits, questions=8)
            for side, hits in (("diff", 8), ("softmax", 4)) for seed in range(3)]  # fmt: skip
    verdict = judge(Rows(rows), "diff", ["softmax"])["recall"]["softmax"]
    assert (verdict.outcome, verdict.difference.p) == (Outcome.INCONCLUSIVE, 0.25)
