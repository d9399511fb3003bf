"""The sentence on who is ahead, worked by hand."""

from diff_transformer.report.figure import Finding, versus


def found(*values, **options) -> Finding:
    """``versus`` of values for which it is not None."""
    finding = versus(*values, **options)
    assert finding is not None
    return finding


def test_two_seeds_that_agree_are_weak():
    said = found("Loss", {0: 3.90, 1: 3.94}, {0: 3.95, 1: 3.99}, "lower")
    assert (said.outcome, said.weak) == ("diff", True)
    assert said.text == "Loss: DIFF 3.920, Transformer 3.970; DIFF lower by 0.050 (the same sign in 2 of 2 seeds)."


def test_transformer_ahead_is_said_as_plainly():
    said = found("Loss", {0: 4.37, 1: 4.36}, {0: 3.95, 1: 3.96}, "lower")
    assert said.outcome == "softmax"
    assert said.text == "Loss: DIFF 4.365, Transformer 3.955; DIFF higher by 0.410 (the same sign in 2 of 2 seeds)."


def test_with_three_seeds_the_interval_decides_not_the_signs():
    soft = {0: 4.0, 1: 4.0, 2: 4.0}
    clear = found("Loss", {0: 3.90, 1: 3.91, 2: 3.92}, soft, "lower")
    assert (clear.outcome, clear.weak) == ("diff", False)
    assert clear.text.endswith("DIFF lower by 0.090 (95 % CI −0.115 to −0.065 over 3 seeds).")
    assert found("Loss", {0: 3.99, 1: 3.98, 2: 3.80}, soft, "lower").outcome == "level"  # one sign, far apart
    assert found("Score", {0: 3.90, 1: 3.91, 2: 3.92}, soft, "higher").outcome == "softmax"


def test_seeds_that_disagree_leave_nobody_ahead():
    said = found("Accuracy", {0: 0.5, 1: 0.3}, {0: 0.4, 1: 0.35}, "higher", digits=2)
    assert said.outcome == "level"
    assert said.text.endswith("DIFF higher by 0.03 (the same sign in 1 of 2 seeds).")


def test_one_seed_is_said_to_have_no_interval():
    said = found("Accuracy", {5: 0.5}, {5: 0.4}, "higher", digits=1)
    assert (said.outcome, said.weak, said.text) == (
        "diff",
        True,
        "Accuracy: DIFF 0.5, Transformer 0.4; DIFF higher by 0.1 (one seed: no interval).",
    )


def test_the_difference_is_that_of_the_seeds_of_both_models():
    said = found("Loss", {0: 1.0, 1: 5.0}, {0: 2.0}, "lower")
    assert said.text == "Loss: DIFF 3.000, Transformer 2.000; DIFF lower by 1.000 (one seed: no interval)."


def test_equal_at_the_precision_shown():
    assert found("Loss", {0: 3.9001}, {0: 3.9002}, "lower").outcome == "level"


def test_a_missing_side_gives_no_finding():
    assert versus("Loss", {}, {0: 1.0}, "lower") is None
