import pytest

from diff_transformer.evals.types import Result
from diff_transformer.lab import claims as lab_claims
from diff_transformer.lab.claims import paper_claims
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.lab.record import averaged, of_result

CELLS = ((1, 1), (4, 2))


def of_run(result):
    """The record of a result whose model is called SIDE-seedK in these tests."""
    side, _, seed = result.model.rpartition("-seed")
    return of_result(result, side=side, seed=int(seed))


def judge(claims, results):
    """The claims over records of single results."""
    return lab_claims.judge(claims, [of_run(result) for result in results])


def loss(side, seed, values):
    rows = [{"loss": v, "ar_hit_sum": v, "ar_hit_count": 1, "others_sum": 2 * v, "others_count": 2} for v in values]
    mean = sum(values) / len(values)
    return Result(
        "associative_recall", f"{side}-seed{seed}", {"validation": mean, "ar_hit": mean, "others": mean}, rows
    )


def needle(side, scores):
    rows = [{"needles": n, "queries": r, "score": s} for (n, r), cell in scores.items() for s in cell]
    metrics = {f"n{n}_r{r}": sum(cell) / len(cell) for (n, r), cell in scores.items()}
    return Result("needle", f"{side}-seed0", metrics, rows)


def verdicts(results):
    return {claim["id"]: claim["verdict"] for claim in judge(paper_claims(CELLS), results)}


def test_a_lower_loss_on_every_example_holds():
    results = [loss("diff", 0, [2.0, 3.0, 2.5, 1.0]), loss("softmax", 0, [2.1, 3.1, 2.6, 1.1])]
    claims = judge(paper_claims(CELLS), results)
    assert [claim["id"] for claim in claims] == ["loss", "ar_hit", "others"]
    assert {claim["verdict"] for claim in claims} == {"held"}
    assert claims[0]["difference"]["mean"] == pytest.approx(-0.1)
    assert claims[0]["here"] == "2.225 / 2.125"
    assert "examples (one run)" in claims[0]["detail"]
    assert claims[0]["power"] == ""


def test_a_loss_that_is_worse_does_not_hold():
    results = [loss("softmax", 0, [2.0, 3.0, 2.5, 1.0]), loss("diff", 0, [2.1, 3.1, 2.6, 1.1])]
    assert set(verdicts(results).values()) == {"did not hold"}


def test_three_seeds_give_an_interval_over_seeds():
    ours, theirs = [2.0, 2.1, 2.2], [2.1, 2.2, 2.35]
    results = [loss("diff", k, [v]) for k, v in enumerate(ours)] + [
        loss("softmax", k, [v]) for k, v in enumerate(theirs)
    ]
    claim = judge(paper_claims(CELLS), results)[0]
    assert "3 seeds" in claim["detail"]
    assert claim["diff"] == ours
    assert claim["verdict"] == "held"


def losses(differences):
    ours = [loss("diff", k, [2.0 + d]) for k, d in enumerate(differences)]
    return judge(paper_claims(CELLS), ours + [loss("softmax", k, [2.0]) for k in range(len(differences))])[0]


@pytest.mark.parametrize(("differences", "seeds"), [((-0.1, -0.3, 0.1), "18"), ((-0.001, -0.2, 0.2), "more than 1000")])
def test_an_undecided_claim_says_how_many_seeds_would_decide_it(differences, seeds):
    claim = losses(differences)
    assert (claim["verdict"], claim["power"]) == (
        "undecided", f"with this mean and spread, {seeds} seeds would decide it in half of all cases"
    )  # fmt: skip


@pytest.mark.parametrize("differences", [(-0.1, -0.1001, -0.1), (-0.1, 0.1), (0.0, 0.0, 0.0)])
def test_no_number_of_seeds_where_it_is_decided_or_has_no_spread_over_seeds(differences):
    assert losses(differences)["power"] == ""


def test_the_number_of_seeds_counts_from_the_margin():
    """1 needle may be found 0.05 less often: a mean of 0.05 is 0.1 from the threshold, with a deviation of 0.2."""
    scores = {"diff": (0.85, 1.0, 0.65), "softmax": (0.8, 0.75, 0.8)}
    cells = [(side, k, {(1, 1): [score] * 5}) for side, found in scores.items() for k, score in enumerate(found)]
    results = [Result("needle", f"{side}-seed{k}", needle(side, cell).metrics, needle(side, cell).rows)
               for side, k, cell in cells]  # fmt: skip
    (claim,) = judge(paper_claims(CELLS[:1]), results)
    assert claim["difference"]["mean"] == pytest.approx(0.05)
    assert ", 18 seeds would" in claim["power"]
    assert claim["p_value"] == pytest.approx(0.4778, abs=1e-3)  # of t = 0.1 / (0.2 / 3 ** 0.5)


@pytest.mark.parametrize(
    ("differences", "kept"), [((-0.1, -0.11, -0.12), True), ((-0.1,), False), ((-0.1, -0.1), False)]
)
def test_a_claim_has_a_p_value_with_three_seeds_or_more(differences, kept):
    assert ("p_value" in losses(differences)) == kept


def test_no_worse_than_a_model_that_fails_proves_nothing():
    nothing, everything = [0.0] * 20, [1.0] * 20
    cells = {(1, 1): nothing, (4, 2): nothing}
    assert verdicts([needle("diff", cells), needle("softmax", cells)]) == {
        "needle_n1_r1": "undecided",
        "needle_n4_r2": "undecided",
    }
    found = {(1, 1): everything, (4, 2): everything}
    assert verdicts([needle("diff", found), needle("softmax", {(1, 1): everything, (4, 2): nothing})]) == {
        "needle_n1_r1": "held",
        "needle_n4_r2": "held",
    }


def test_throughput_is_judged_as_a_ratio():
    def timed(side, values):
        rows = [{"train_tokens_per_second": v} for v in values]
        return Result("throughput", f"{side}-seed0", {"train_tokens_per_second": values[0]}, rows)

    assert verdicts([timed("diff", [95.0, 96.0, 94.0]), timed("softmax", [100.0] * 3)]) == {"throughput": "held"}
    assert verdicts([timed("diff", [70.0, 71.0, 72.0]), timed("softmax", [100.0] * 3)]) == {
        "throughput": "did not hold"
    }


def test_a_missing_side_makes_no_claim():
    assert judge(paper_claims(CELLS), [loss("diff", 0, [1.0])]) == []


def test_the_normalised_transformer_stands_beside_a_claim_and_changes_nothing_of_it():
    pair = [loss("diff", 0, [2.0, 3.0, 2.5]), loss("softmax", 0, [2.1, 3.1, 2.6])]
    alone = judge(paper_claims(CELLS), pair)[0]
    beside = judge(paper_claims(CELLS), [*pair, loss("softmax_norm", 0, [1.9, 2.9, 2.4])])[0]
    control = beside.pop("control")
    assert beside == alone
    assert (alone["verdict"], control["verdict"]) == ("held", "did not hold")
    assert (control["here"], control["values"]) == ("2.400", [pytest.approx(2.4)])
    assert control["difference"]["mean"] == pytest.approx(0.1)


@pytest.mark.parametrize("values", [[float("nan")], None])
def test_a_control_without_a_number_or_with_other_seeds_is_left_out(values):
    control = loss("softmax_norm", 0, values) if values else loss("softmax_norm", 1, [1.9])
    judged = judge(paper_claims(CELLS), [loss("diff", 0, [2.0]), loss("softmax", 0, [2.1]), control])
    assert "control" not in judged[0]


def many_shot(side, scores):
    """``scores``: for each order seed, the score of each question."""
    rows = [
        {"shots": shots, "order": order, "order_seed": seed, "score": score}
        for shots in (1, 8)
        for order in ("random", "alternate")
        for seed, of_seed in enumerate(scores)
        for score in (of_seed if shots == 8 else [0.0] * len(of_seed))
    ]
    means = [sum(of_seed) / len(of_seed) for of_seed in scores]
    of_order = {"mean": sum(means) / len(means), "margin": max(means) - min(means)}
    metrics = {f"{order}_{key}": value for order in ("random", "alternate") for key, value in of_order.items()}
    return Result("many_shot", f"{side}-seed0", metrics, rows)


def test_the_spread_over_orders_is_judged_at_the_most_examples():
    steady, swinging = [[1.0] * 30, [1.0] * 30], [[1.0] * 30, [0.0] * 30]
    claims = judge(paper_claims(CELLS), [many_shot("diff", steady), many_shot("softmax", swinging)])
    assert {c["id"]: c["verdict"] for c in claims} == dict.fromkeys(
        ("many_shot", "order_random", "order_alternate"), "held"
    )
    assert claims[1]["difference"]["mean"] == pytest.approx(-1.0)
    other_way = judge(paper_claims(CELLS), [many_shot("diff", swinging), many_shot("softmax", steady)])
    assert {c["verdict"] for c in other_way} == {"did not hold"}


def test_four_bits_are_judged_by_what_they_cost():
    def quantization(side, cost):
        rows = [{"bits": bits, "row": n, "loss": 3.0 + n + cost * (bits == 4)} for bits in (16, 4) for n in range(9)]
        return Result("quantization", f"{side}-seed0", {"loss_4bit_change": cost}, [{"bits": 4, "score": 1.0}, *rows])

    (claim,) = judge(paper_claims(CELLS), [quantization("diff", 0.1), quantization("softmax", 0.3)])
    assert claim["verdict"] == "held"
    assert claim["difference"]["mean"] == pytest.approx(-0.2)


def test_without_losses_at_four_bits_nothing_is_judged():
    def quantization(side, bits):
        rows = [{"bits": one, "row": n, "loss": 3.0} for one in bits for n in range(9)]
        return Result("quantization", f"{side}-seed0", {}, [{"bits": 4, "score": 1.0}, *rows])

    for bits in ((), (16, 8)):
        assert judge(paper_claims(CELLS), [quantization(side, bits) for side in ("diff", "softmax")]) == []


def test_a_record_that_keeps_other_columns_has_its_metrics():
    kept = Result("associative_recall", "diff-seed0", {"ar_hit": 1.5}, [{"loss": 2.0}])
    assert QUANTITIES["ar_hit"].value(of_result(kept)) == 1.5


def test_examples_of_several_data_seeds_all_count():
    """What costs 0.2 in one drawing of the examples and 0.4 in the other costs 0.3; recall likewise."""

    def measured(side, seed, cost):
        bits = [{"bits": bits, "row": n, "loss": 3.0 + cost * (bits == 4)} for bits in (16, 4) for n in range(9)]
        recall = [{"length": length, "questions": 4, "hits": [10 * cost] * 3} for length in (64, 128)]
        return [
            of_run(Result(name, f"{side}-seed0", {"x": cost}, rows, {"seed": seed}))
            for name, rows in (("quantization", bits), ("recall", recall))
        ]

    records = [
        record
        for side, less in (("diff", 0.1), ("softmax", 0.0))
        for seed, cost in enumerate((0.2, 0.4))
        for record in measured(side, seed, cost - less)
    ]
    claims = lab_claims.judge(list(QUANTITIES.values()), averaged(records))
    assert {claim["id"]: claim["softmax"] for claim in claims} == {
        "four_bits": [pytest.approx(0.3)],
        "recall": [pytest.approx(0.75)],
    }


def test_long_documents_are_judged_by_the_mean_over_their_length():
    def long_nll(side, late):
        rows = [{"book": f"{n}", "sums": [4.0, 3 * late], "counts": [1, 3]} for n in range(5)]
        return Result("long_nll", f"{side}-seed0", {}, rows)

    (claim,) = judge(paper_claims(CELLS), [long_nll("diff", 1.0), long_nll("softmax", 2.0)])
    assert (claim["verdict"], claim["diff"], claim["softmax"]) == ("held", [1.75], [2.5])


def test_outputs_without_a_verdict_do_not_count():
    def hallucination(side, scores):
        decided = [score for score in scores if score is not None]
        rows = [{"score": score} for score in scores]
        return Result("hallucination", f"{side}-seed0", {"mean": sum(decided) / len(decided)}, rows)

    results = [hallucination("diff", [1.0, None] * 10), hallucination("softmax", [0.0, None] * 10)]
    (claim,) = judge(paper_claims(CELLS), results)
    assert (claim["verdict"], claim["difference"]["mean"]) == ("held", 1.0)


def test_what_is_shown_is_what_is_judged():
    """The difference (or ratio) is that of the two numbers beside it, whatever the experiment's own summary says."""

    def outliers(side, values):
        rows = [{"logits_top1": v, "hidden_top1": 2 * v, "logits_median": 2.0, "hidden_median": v} for v in values]
        return Result("outliers", f"{side}-seed0", {"logits_top1": max(values), "hidden_top1": 2 * max(values)}, rows)

    def timed(side, values):
        rows = [{"train_tokens_per_second": v} for v in values]
        return Result("throughput", f"{side}-seed0", {"train_tokens_per_second": 0.0}, rows)

    pairs = [outliers("diff", [1.0, 9.0, 2.0]), outliers("softmax", [4.0, 5.0, 6.0])]
    pairs += [timed("diff", [90.0, 120.0, 70.0]), timed("softmax", [100.0, 80.0, 130.0])]
    judged = judge(paper_claims(CELLS), pairs)
    expected = ["logits", "logits_in_medians", "hidden", "hidden_in_medians", "throughput"]
    assert [claim["id"] for claim in judged] == expected
    for claim in judged:
        ours, theirs = claim["diff"][0], claim["softmax"][0]
        relative = claim["difference"]["relative"]
        assert claim["difference"]["mean"] == pytest.approx(ours / theirs - 1 if relative else ours - theirs)
    here = {claim["id"]: claim["here"] for claim in judged}
    assert here["logits"] == "6.000 / 9.000"  # the largest of all texts, as in the paper's table
    assert here["logits_in_medians"] == "3.000 / 4.500"
    assert here["hidden_in_medians"] == "2.400 / 9.000"
    assert here["throughput"] == "100 / 90.0"


def test_recall_is_not_judged_against_a_model_that_does_not_recall():
    """A Transformer whose AR-Hit loss is not below its other loss does not recall, so the claim is not tested."""
    claims = {
        c["id"]: c for c in judge(paper_claims(CELLS), [loss("diff", 0, [2.0, 3.0]), loss("softmax", 0, [2.5, 3.5])])
    }
    assert (claims["ar_hit"]["verdict"], claims["ar_hit"]["untested"]) == ("held", "")
    worse = [loss("diff", 0, [2.0, 3.0]), loss("softmax", 0, [2.5, 3.5])]
    for row in worse[1].rows:
        row["ar_hit_sum"] += 1
    claims = {c["id"]: c for c in judge(paper_claims(CELLS), worse)}
    assert claims["ar_hit"]["verdict"] == "undecided"
    assert "its loss elsewhere is lower, 3.000" in claims["ar_hit"]["untested"]
    assert claims["others"]["verdict"] == "held"


def test_a_seed_without_a_token_of_a_slice_leaves_the_claim_undecided():
    results = [loss(side, k, [v + k]) for k in range(4) for side, v in (("diff", 2.0), ("softmax", 2.5))]
    for result in results[:2]:
        for row in result.rows:
            row["ar_hit_count"] = 0
    claim = next(c for c in judge(paper_claims(CELLS), results) if c["id"] == "ar_hit")
    assert (claim["verdict"], claim["untested"]) == ("undecided", "1 of 4 seeds has no example of it")
    assert claim["difference"]["mean"] == pytest.approx(-0.5)
    assert len(claim["diff"]) == 3


def test_a_slice_without_a_token_makes_no_claim():
    results = [loss(side, 0, [2.0, 3.0]) for side in ("diff", "softmax")]
    for result in results:
        for row in result.rows:
            row["ar_hit_count"] = 0
    assert [claim["id"] for claim in judge(paper_claims(CELLS), results)] == ["loss", "others"]


def test_only_recall_from_noise_is_ours():
    assert [claim.id for claim in paper_claims(((1, 1), (2, 1))) if claim.ours] == ["recall"]
