import numpy as np
import pytest

from diff_transformer.lab import stats
from diff_transformer.lab.stats import (
    Interval,
    OverExamples,
    holm,
    over_examples,
    over_seeds,
    over_seeds_and_examples,
    paired_p_value,
    seeds_to_decide,
    verdict,
)


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


def test_an_interval_over_seeds_and_examples_covers_new_ones_of_both(monkeypatch):
    """Five seeds on six books. Seeds alone cover the mean over all books much less often than they say."""
    monkeypatch.setattr(stats, "_RESAMPLES", 200)
    rng = np.random.default_rng(3)
    both = alone = 0
    for _ in range(200):
        first = 0.3 + rng.normal(0, 0.1, (5, 1)) + rng.normal(0, 0.3, 6) + rng.normal(0, 0.1, (5, 6))
        interval, of_examples = over_seeds_and_examples(list(first), list(np.zeros((5, 6))))
        seeds = over_seeds(first.mean(axis=1).tolist())
        both += interval.low <= 0.3 <= interval.high
        alone += seeds.low <= 0.3 <= seeds.high
        assert of_examples.variance > 0
    assert interval.over == "seeds and examples"
    assert both >= 180
    assert alone <= 160


def test_without_examples_of_their_own_the_interval_is_over_seeds():
    ones = [np.array([0.1]), np.array([0.3])]
    assert over_seeds_and_examples(ones, [np.zeros(1)] * 2) == (over_seeds([0.1, 0.3]), OverExamples())
    other = [np.array([0.1, 0.1]), np.array([0.3, 0.3, 0.3])]
    found, of_examples = over_seeds_and_examples(other, [np.zeros(2), np.zeros(3)])
    assert (found.over, of_examples.variance) == ("seeds", 0.0)
    with pytest.raises(ValueError, match="1 seeds have no spread"):
        over_seeds_and_examples(ones[:1], ones[:1])


def test_examples_that_agree_add_nothing():
    first = [np.full(4, value) for value in (0.1, 0.2, 0.6)]
    found, of_examples = over_seeds_and_examples(first, [np.zeros(4)] * 3)
    assert of_examples.variance == pytest.approx(0.0, abs=1e-20)
    assert found[:3] == pytest.approx(over_seeds([0.1, 0.2, 0.6])[:3])


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


def test_one_example_and_examples_of_unequal_number_have_no_interval():
    assert over_examples([np.array([2.0])], [np.array([1.0])]) == (1.0, None, None, "examples")
    by_depth = np.repeat([1.0, 0.0], 5), np.repeat([1.0, 0.0], 25)  # the same accuracy at each depth
    for first, second in (by_depth, by_depth[::-1]):
        assert over_examples([first], [second]) == (0.0, None, None, "examples")


def test_seeds_to_decide_by_hand():
    """Mean 0.1, deviation 0.2: t < 0.5 sqrt(n). n = 17: 2.120 > 2.062; n = 18: 2.110 < 2.121."""
    assert seeds_to_decide([0.1, 0.3, -0.1]) == 18
    assert seeds_to_decide([-0.1, -0.3, 0.1]) == 18
    assert seeds_to_decide([0.15, 0.35, -0.05], threshold=0.05) == 18
    assert seeds_to_decide([0.001, 0.2, -0.2]) is None
    assert seeds_to_decide([0.0, 0.0, 0.0]) is None
    assert seeds_to_decide([0.1, 0.3, -0.1], examples=OverExamples(0.1, 50)) is None
    assert seeds_to_decide([0.1, 0.3, -0.1], tests=4) > 18
    with pytest.raises(ValueError, match="1 differences have no spread"):
        seeds_to_decide([0.1])


def test_the_seeds_that_decide_are_those_of_the_interval_over_seeds_and_examples():
    """Differences by seed and example in three seeds, and in as many as it takes, with the same mean and spread."""
    examples = np.random.default_rng(0).normal(0, 1, 24)
    examples -= examples.mean()

    def interval(count):
        seeds = np.resize([-1.0, 1.0], count) if count > 3 else np.array([0.0, 0.2, -0.2]) / 0.2
        seeds = (seeds - seeds.mean()) / seeds.std(ddof=1)
        first = [0.5 + 0.6 * seed + 0.5 * examples for seed in seeds]
        return over_seeds_and_examples(first, [np.zeros(24)] * count)

    found, of_examples = interval(3)
    assert found.low < 0
    needed = seeds_to_decide([0.5, 1.1, -0.1], examples=of_examples)
    assert interval(needed - 1)[0].low < 0 < interval(needed)[0].low


def test_seeds_share_their_examples():
    """The mean of two equal seeds is as uncertain as one of them; resampled apart, it would look more certain."""
    first, second = np.random.default_rng(0).normal(0, 1, (2, 40))
    assert over_examples([first] * 2, [second] * 2)[:3] == pytest.approx(over_examples([first], [second])[:3])
    other = over_examples([first, first[:39]], [second, second[:39]])
    one = over_examples([first], [second])
    assert other.high - other.low < 0.8 * (one.high - one.low)


def test_the_seeds_that_decide_leave_the_threshold_outside_of_the_interval():
    def interval(count):
        spread = np.resize([-1.0, 1.0], count)
        return over_seeds(0.1 + 0.2 * (spread - spread.mean()) / spread.std(ddof=1))

    assert interval(17).low < 0 < interval(18).low


def test_p_value_of_the_paired_t_test():
    """With two degrees of freedom p = 1 - t / sqrt(t^2 + 2); here t is 2 sqrt(3)."""
    assert paired_p_value([1.0, 2.0, 3.0]) == pytest.approx(1 - (12 / 14) ** 0.5)
    assert paired_p_value([-1.0, -2.0, -3.0]) == paired_p_value([1.0, 2.0, 3.0])
    assert [paired_p_value(same) for same in ([0.0, 0.0], [0.1, 0.1])] == [1.0, 0.0]
    assert [paired_p_value(few) for few in ([0.3], [0.1, float("nan")])] == [1.0, 1.0]


def test_the_p_value_belongs_to_the_interval():
    """At an end of the interval, over seeds or over seeds and examples, it is 0.05."""
    values = [1.0, 2.0, 4.0]
    for end in over_seeds(values)[1:3]:
        assert paired_p_value(values, end) == pytest.approx(0.05, abs=1e-4)
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.3, 1, (4, 50)), rng.normal(0, 1, (4, 50))
    interval, examples = over_seeds_and_examples(list(first), list(second))
    assert examples.variance > 0
    for end in interval[1:3]:
        assert paired_p_value((first - second).mean(1), end, examples) == pytest.approx(0.05, abs=1e-4)
    assert paired_p_value([0.1, 0.1], 0.1) == 1.0


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, each at least as large as the one before."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
