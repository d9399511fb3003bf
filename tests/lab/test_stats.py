"""Intervals, tests, corrections and power."""

import math

import numpy as np
import pytest
from scipy import stats as reference

from diff_transformer.lab.quantities import largest, mean, ratio_of_sums
from diff_transformer.lab.stats import average, holm, paired, sign_flips


def scores(*seeds):
    """Pairs of scores, one column each."""
    return {k: tuple(np.array(side, float)[:, None] for side in both) for k, both in enumerate(seeds)}


def test_one_difference_a_seed_has_students_interval():
    values = [0.1, 0.3, 0.2, 0.35]
    found = paired(scores(*(([value], [0]) for value in values)), mean)
    test = reference.ttest_1samp(values, 0)
    low, high = test.confidence_interval()
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-4 * 0.06)  # quantiles have three decimals
    assert found.p == pytest.approx(test.pvalue)
    assert (found.over, found.seeds, found.flips) == ("seeds", 4, 0.125)


def test_one_or_two_seeds_have_an_interval_over_examples():
    draw = np.random.default_rng(0)
    a, b = draw.normal(1, 1, 200), draw.normal(0, 1, 200)
    found = paired(scores((a, b)), mean)
    half = 1.96 * np.std(a - b, ddof=1) / 200**0.5
    assert found.over == "examples"
    assert found.mean == pytest.approx(np.mean(a - b))
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.1)
    assert (found.p, found.flips) == (None, None)


def test_three_seeds_have_the_variance_of_seeds_and_of_examples():
    draw = np.random.default_rng(1)
    of_example, of_seed = draw.normal(0, 1, 300), draw.normal(0, 0.2, 5)
    seeds = [(of_example + shift + 1, np.zeros(300)) for shift in of_seed]
    found = paired(scores(*seeds), mean)
    error = math.sqrt(np.var(of_seed, ddof=1) / 5 + np.var(of_example) / 300)
    assert found.over == "seeds and examples"
    freedom = error**4 / ((np.var(of_seed, ddof=1) / 5) ** 2 / 4 + (np.var(of_example) / 300) ** 2 / 299)
    assert (found.high - found.low) / 2 == pytest.approx(reference.t.ppf(0.975, freedom) * error, rel=0.1)
    assert found.p == pytest.approx(2 * reference.t.sf(found.mean / error, freedom), rel=0.5)


def test_seeds_of_other_numbers_of_examples_have_an_interval_over_seeds():
    found = paired(scores(([1, 2], [0, 0]), ([1, 2, 3], [0, 0, 0]), ([2, 2], [0, 0])), mean)
    assert (found.over, found.examples) == ("seeds", 2)


def test_a_largest_value_has_no_bootstrap_interval():
    found = paired(scores((np.arange(9), np.zeros(9))), largest, bootstrap=False)
    assert (found.mean, found.low, found.high, found.over) == (8, None, None, "")


def test_a_ratio_of_sums_leaves_out_draws_without_a_token():
    columns = np.array([[1.0, 1], [0, 0], [0, 0]])
    found = paired({0: (columns, columns / [2, 1])}, ratio_of_sums)
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)


def test_relative_differences_are_of_the_other_side():
    assert paired(scores(([3, 3], [2, 2])), mean, relative=True).mean == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("differences", "p"), [([1, 2, 3, 4, 5], 2 / 32), ([1, 2, 3], 0.25), ([1.0, math.nan, 2], 1.0)]
)
def test_sign_flips_are_exact(differences, p):
    assert sign_flips(np.array(differences, float)) == pytest.approx(p)


def test_intervals_cover_as_they_say():
    """Of 300 repetitions with five seeds that share 50 examples, at least 93 % and not all hold the true difference."""
    draw, held = np.random.default_rng(3), 0
    for _ in range(300):
        of_example = draw.normal(0, 1, 50)
        seeds = [(of_example + draw.normal(0, 0.1) + draw.normal(0, 0.1, 50), np.zeros(50)) for _ in range(5)]
        found = paired(scores(*seeds), mean)
        held += found.low <= 0 <= found.high
    assert 0.93 * 300 <= held < 300


def test_holm_steps_down():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_a_proportion_has_wilsons_interval():
    found = average([np.array([1.0] * 9 + [0.0])], proportion=True)
    assert (found.mean, found.examples, found.seeds) == (0.9, 10, 1)
    assert (found.low, found.high) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    of_seeds = average([np.array([1.0, 0.0]), np.array([1.0, 1.0]), np.array([0.0, 0.0])], proportion=True)
    assert (of_seeds.mean, of_seeds.low, of_seeds.high) == (0.5, 0.0, 1.0)
    assert math.isnan(average([np.array([math.nan])]).mean)
