"""The fit on curves whose parameters are known."""

import math

import numpy as np
import pytest

from diff_transformer.lab.power_law import PowerLaw, exponent_interval, fit_power_law, match_interval

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


def test_the_interval_of_the_exponent_covers_the_truth_as_often_as_it_says():
    assert 186 <= coverage("plain", 5, exponents=200)[0] <= 194


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_intervals_cover_the_truth_in_93_to_97_of_100_tables():
    exponent, match = coverage("plain", 5, exponents=400, matches=400)
    assert 372 <= exponent <= 388
    assert 372 <= match <= 388


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_intervals_with_an_offset_cover_the_truth_too():
    """Of 200 and 100 tables of five losses: 187 and 92 did, of seven losses 196 and 95."""
    exponent, match = coverage("offset", 5, exponents=200, matches=100)
    assert 180 <= exponent <= 198
    assert 90 <= match <= 99


def coverage(form: str, count: int, *, exponents: int, matches: int = 0) -> tuple[int, int]:
    """Of how many simulated tables the intervals of b, and of the size with an equal loss, hold the true value."""
    x, rng, share, offset = np.geomspace(1e9, 13e9, count), np.random.default_rng(1), 0.622, 1.8 * (form == "offset")
    truths = [np.array(curve(300, 0.28, offset, size)) for size in (x, x / share)]
    exponent = match = 0
    for trial in range(max(exponents, matches)):
        reference, ours = ((x, truth * np.exp(rng.normal(0, 0.004, count))) for truth in truths)
        exponent += trial < exponents and holds(exponent_interval(*reference, form=form), 0.28)
        match += trial < matches and holds(match_interval(ours, reference, x[2], form=form), x[2] / share)
    return exponent, match


def holds(ends: tuple[float | None, float | None], value: float) -> bool:
    low, high = ends
    return (low is None or low <= value) and (high is None or value <= high)


def test_intervals_of_exact_and_of_few_losses():
    exact, u = curve(400, 0.34, 1.7), SIZES
    low, high = exponent_interval(u, exact)
    assert low < 0.34 < high
    assert high - low < 1e-6
    low, high = match_interval((u, exact), (u, exact), u[1])
    assert low == pytest.approx(high, rel=1e-6) == pytest.approx(u[1], rel=1e-6)
    assert exponent_interval(u[:3], exact[:3]) == (None, None)
    assert match_interval((u[:3], exact[:3]), (u[:3], exact[:3]), u[1]) == (None, None)


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
