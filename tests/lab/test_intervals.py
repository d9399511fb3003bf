import numpy as np
import pytest

from diff_transformer.lab.stats import Interval, over_examples, over_seeds, verdict


def test_interval_over_seeds_is_the_t_interval():
    interval = over_seeds([0.1, 0.2, 0.3, 0.4, 0.5])
    half = 2.776 * np.std([0.1, 0.2, 0.3, 0.4, 0.5], ddof=1) / 5**0.5
    assert interval[:3] == pytest.approx((0.3, 0.3 - half, 0.3 + half))


def test_one_seed_has_no_interval_over_seeds():
    assert over_seeds([0.4]) == (0.4, None, None, "seeds")


def test_bootstrap_covers_the_true_difference_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        first, second = rng.normal(0.3, 1, 60), rng.normal(0.0, 1, 60)
        interval = over_examples([first], [second])
        covered += interval.low <= 0.3 <= interval.high
    assert 88 <= covered <= 99


def test_bootstrap_is_paired():
    noise = np.random.default_rng(0).normal(0, 10, 50)
    interval = over_examples([noise + 0.5], [noise])
    assert (interval.low, interval.high) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize(
    ("low", "high", "better", "margin", "expected"),
    [
        (0.1, 0.3, "higher", 0.0, "held"),
        (-0.3, -0.1, "higher", 0.0, "did not hold"),
        (-0.1, 0.1, "higher", 0.0, "undecided"),
        (-0.3, -0.1, "lower", 0.0, "held"),
        (0.1, 0.3, "lower", 0.0, "did not hold"),
        (-0.04, 0.1, "higher", 0.05, "held"),
        (-0.3, -0.06, "higher", 0.05, "did not hold"),
        (0.0, 0.0, "higher", 0.0, "undecided"),
        (None, None, "higher", 0.0, "undecided"),
    ],
)
def test_verdicts(low, high, better, margin, expected):
    assert verdict(Interval(0.0, low, high, "seeds"), better, margin) == expected


def test_one_example_has_no_interval():
    assert over_examples([np.array([2.0])], [np.array([1.0])]) == (1.0, None, None, "examples")
