import pytest

from diff_transformer.compare.claims import judge, paper_claims
from diff_transformer.evals.types import Result

CELLS = ((1, 1), (4, 2))


def loss(side, seed, values):
    rows = [{"loss": v, "ar_hit_sum": v, "ar_hit_count": 1, "others_sum": 2 * v, "others_count": 2} for v in values]
    mean = sum(values) / len(values)
    return Result("loss", f"{side}-seed{seed}", {"validation": mean, "ar_hit": mean, "others": mean}, rows)


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
    assert "examples (1 seed)" in claims[0]["detail"]


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
