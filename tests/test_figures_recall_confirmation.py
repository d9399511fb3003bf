"""The confirmation of the recall study: planned tests on outcomes that are known."""

import re

import pytest
from recall.plan import GRID
from recall_confirmation.plan import CONFIRMED, FRESH_SEEDS, INFORMATIVE

from diff_transformer.lab.record import Record

LEARNED = {"softmax": 12, "diff_norm1": 18, "diff_matched": 30, "softmax_norm_own_scale": 12}  # of 30 seeds, the first


@pytest.fixture
def page(figure_module):
    return figure_module("recall_confirmation")


def record(where, side, seed, learned):
    """A run that ends at 1 and reaches the goal halfway, or stays at chance."""
    chance = 1 / GRID[where][0]
    final = 1.0 if learned else chance
    curve = {"step": [0, 300, 600], "accuracy": [chance, 0.95 if learned else chance, final]}
    config = {"train": {"steps": 600}, "optim": {"lr": 1e-3}}
    return Record(where, side, seed, config, {"recall": {"accuracy": final}}, curves={"recall": curve})


@pytest.fixture
def cells():
    return {
        where: {
            side: {seed: record(where, side, seed, i < LEARNED[side]) for i, seed in enumerate(FRESH_SEEDS)}
            for side in CONFIRMED
        }
        for where in INFORMATIVE
    }


def test_the_primary_outcome_is_the_planned_one(page, cells):
    found = page.differences(cells, "diff_norm1", "softmax", page.whole_seeds(cells))
    gain = (2 * (1 - 1 / 8) + (1 - 1 / 4)) / 3  # of a seed in which one side alone learns
    assert found == pytest.approx([0.0] * 12 + [gain] * 6 + [0.0] * 12)
    assert page.p_value(found) == pytest.approx(2 * 0.5**6, abs=0.003)  # six signs, flipped alike
    low, high = page.bootstrapped(found)
    assert 0 < low < sum(found) / 30 < high
    said = page.primary(cells)
    assert "30 seeds" in said
    assert re.findall(r"(held|undecided|did not hold) \|$", said, re.M) == ["held", "held", "held"]
    assert page.verdict(0.1, 0.2, 0.06, True) == "undecided"
    assert page.verdict(-0.2, -0.1, 0.01, True) == "did not hold"


def test_nothing_is_decided_before_all_seeds_are_there_and_half_a_seed_does_not_count(page, cells):
    del cells["p4_n4"]["softmax"][FRESH_SEEDS[-1]]
    assert page.whole_seeds(cells) == list(FRESH_SEEDS)[:-1]
    said = page.tables(cells)
    assert said.startswith("Finished: 359 of 360 runs of the plan; nothing is decided.")
    assert said.count("| not finished |") == 3


def test_a_run_that_diverged_counts_with_chance(page, cells):
    lost = cells["p4_n4"]["diff_matched"][FRESH_SEEDS[0]]
    lost.metrics["recall"]["accuracy"] = float("nan")
    assert page.accuracy(lost) == 1 / 4
    lost.metrics.clear()
    assert page.accuracy(lost) == 1 / 4


def test_shares_and_sign_tests_are_exact(page, cells):
    assert "| Transformer | 12 (0.40, 0.23 to 0.59) |" in page.shares(cells)  # Clopper-Pearson of 12 of 30
    assert "| 6 / 0 (0.031) | 6 / 0 (0.031) | 6 / 0 (0.031) |" in page.one_only(cells)
