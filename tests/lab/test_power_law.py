"""The fit on curves whose parameters are known."""

import math

import numpy as np
import pytest

from diff_transformer.lab.stats import PowerLaw, bootstrap, fit_power_law

SIZES = [0.83e9, 1.4e9, 2.8e9, 6.8e9, 13.1e9]


def curve(a: float, b: float, c: float, x=SIZES) -> list[float]:
    return [a * v**-b + c for v in x]


@pytest.mark.parametrize(
    ("a", "b", "c"), [(400, 0.34, 1.7), (30, 0.1, 0.5), (5000, 0.5, 2.9), (1e6, 0.9, 3.0), (2e5, 0.6, 0.01)]
)
def test_exact_points_give_their_law_back(a, b, c):
    law = fit_power_law(SIZES, curve(a, b, c))
    assert (law.a, law.b, law.c) == (
        pytest.approx(a, rel=1e-4),
        pytest.approx(b, rel=1e-5),
        pytest.approx(c, rel=1e-4),
    )
    assert law.residual < 1e-8
    assert (law.low, law.high) == (SIZES[0], SIZES[-1])


def test_two_parameters_by_hand():
    law = fit_power_law([1, 4, 16], [8, 4, 2], form="plain")  # halves when x is four times as large: b = 1/2
    assert (law.a, law.b, law.c) == (pytest.approx(8), pytest.approx(0.5), 0.0)
    assert fit_power_law([1, 4], [8, 4], form="plain").b == pytest.approx(0.5)


def test_scale_of_x_changes_a_alone():
    small = fit_power_law([v / 1e9 for v in SIZES], curve(400, 0.34, 1.7))
    large = fit_power_law(SIZES, curve(400, 0.34, 1.7))
    assert (small.b, small.c) == (pytest.approx(large.b), pytest.approx(large.c))
    assert small.a == pytest.approx(large.a * 1e9**-large.b)


def test_noise_is_averaged_out():
    x = np.geomspace(1e8, 1e10, 40)
    noise = np.random.default_rng(0).normal(0, 0.003, 40)
    law = fit_power_law(x, np.array(curve(400, 0.34, 1.7, x)) * np.exp(noise))
    assert law.b == pytest.approx(0.34, abs=0.03)
    assert law.residual == pytest.approx(0.003, rel=0.3)


def test_one_bad_run_does_not_bend_the_curve():
    x = np.geomspace(1e8, 1e10, 12)
    losses = np.array(curve(30, 0.12, 0.0, x))
    losses[3] *= 1.3
    robust = fit_power_law(x, losses, form="plain")
    squares = fit_power_law(x, losses, form="plain", huber=100.0)
    assert abs(robust.b - 0.12) < 0.1 * abs(squares.b - 0.12)


def test_squares_in_the_logarithm_are_ordinary_regression():
    x, losses = [1.0, 2.0, 5.0, 9.0], [3.0, 2.7, 2.1, 2.0]
    slope, intercept = np.polyfit(np.log(x), np.log(losses), 1)
    law = fit_power_law(x, losses, form="plain", huber=100.0)
    assert (law.b, law.a) == (pytest.approx(-slope, rel=1e-6), pytest.approx(math.exp(intercept), rel=1e-6))


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    x, rng = np.geomspace(1e8, 1e10, 10), np.random.default_rng(1)
    truth, covered = np.array(curve(300, 0.3, 0.0, x)), 0
    for trial in range(60):
        draws = bootstrap(x, truth * np.exp(rng.normal(0, 0.01, 10)), form="plain", draws=100, seed=trial, huber=1.0)
        low, high = np.percentile([law.b for law in draws], [2.5, 97.5])
        covered += low <= 0.3 <= high
    assert 50 <= covered <= 60


def test_bootstrap_is_of_its_seed_and_needs_more_points_than_parameters():
    losses = [v * (1 + 0.01 * (-1) ** i) for i, v in enumerate(curve(400, 0.34, 1.7))]
    first, again, other = (bootstrap(SIZES, losses, draws=5, seed=s) for s in (0, 0, 1))
    assert first == again != other
    assert bootstrap(SIZES[:3], losses[:3]) == []


def test_inverse_and_match():
    law = PowerLaw(a=8.0, b=0.5, c=1.0, low=1.0, high=16.0)
    assert law.inverse(5.0) == pytest.approx(4.0)
    assert law.inverse(law.loss(7.0)) == pytest.approx(7.0)
    assert law.inverse(1.0) == law.inverse(0.5) == math.inf
    better = PowerLaw(a=4.0, b=0.5, c=1.0, low=1.0, high=16.0)  # the same curve at a quarter of x
    assert better.inverse(law.loss(16.0)) == pytest.approx(4.0)
    assert [law.covers(v) for v in (0.5, 1.0, 16.0, 17.0)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("x", "loss", "options", "message"),
    [
        ([1, 2], [2, 1], {}, "2 distinct x; 'offset' needs at least 3.*'plain'"),
        ([1, 1], [2, 1], {"form": "plain"}, "1 distinct x; 'plain' needs at least 2"),
        ([1, 2, 3], [1, 2, 3], {}, "does not fall: 1 at x = 1, 3 at 3"),
        ([1, 2, 3], [3, 2], {}, "3 values of x and 2 losses"),
        ([1, 2, -3], [3, 2, 1], {}, "positive and finite"),
        ([1, 2, 3], [3, 2, math.nan], {}, "positive and finite"),
        ([1, 2, 3], [3, 2, 1], {"form": "cubic"}, "form is 'cubic'; accepted: 'offset', 'plain'"),
        ([1, 2, 3], [3, 2, 1], {"huber": 0.0}, "huber is 0.0; it must be positive"),
    ],
)
def test_what_cannot_be_fitted_is_said(x, loss, options, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(x, loss, **options)
