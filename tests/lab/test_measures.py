"""Means, paired intervals and tokens to an equal loss, against numbers worked by hand."""

import pytest

from diff_transformer.lab.measures import Row, after_holm, final_loss, metric, paired_rows, tokens_to_equal_loss
from diff_transformer.lab.record import Record
from diff_transformer.lab.stats import Interval


def record(losses, **metrics):
    config = {"train": {"batch_size": 1}, "data": {"length": 10}}
    return Record("x", "", 0, config, metrics, curves={"validation": {"step": [0, 100, 200], "loss": losses}})


def test_paired_differences_are_taken_seed_by_seed():
    ours = {0: record([0, 0, 2.0]), 1: record([0, 0, 3.0]), 2: record([0, 0, 4.0]), 7: record([0, 0, 99.0])}
    theirs = {0: record([0, 0, 2.1]), 1: record([0, 0, 3.2]), 2: record([0, 0, 4.3])}
    (row,) = paired_rows({"x": {"diff": ours, "softmax": theirs}}, "x", "diff", [final_loss()])
    assert (row.seeds, row.side, row.baseline) == (3, 3.0, pytest.approx(3.2))
    half = 4.303 * 0.1 / 3**0.5  # Student's t for two degrees of freedom times the standard error of -.1, -.2, -.3
    assert row.difference[:3] == pytest.approx((-0.2, -0.2 - half, -0.2 + half))
    assert row.verdict == "undecided"
    assert row.p_value == pytest.approx(1 - (12 / 14) ** 0.5)  # t is 2 sqrt(3)
    ours = {seed: record([0, 0, theirs[seed].final_loss - 0.2]) for seed in theirs}
    assert paired_rows({"x": {"diff": ours, "softmax": theirs}}, "x", "diff", [final_loss()])[0].verdict == "held"


def test_what_stays_significant_after_holm():
    def row(name, verdict, p_value):
        return Row(name, 0.0, 0.0, Interval(0.0, 0.0, 0.0, "seeds"), verdict, 5, p_value)

    rows = [row("a", "held", 0.01), row("b", "did not hold", 0.03), row("c", "undecided", 0.2), row("d", "", 0.001)]
    assert after_holm(rows) == (
        "Without a correction 2 of 3 tested measures are significant; with Holm's correction 1 is: a."
    )
    assert after_holm([row("b", "held", 0.03), *rows[1:]]).endswith("2 of 3 tested measures are significant; with "
                                                                   "Holm's correction none are.")  # fmt: skip
    assert after_holm(rows[2:]) == ""


def test_what_a_cell_lacks_is_left_out():
    ours, theirs = {0: record([1, 1, 1], needle={"n1_r1": 0.5})}, {0: record([1, 1, 1])}
    cells = {"x": {"diff": ours, "softmax": theirs}}
    assert paired_rows(cells, "x", "diff", [metric("needle", "n1_r1", "higher")]) == []
    assert paired_rows(cells, "x", "absent", [final_loss()]) == []


def test_tokens_to_equal_loss():
    baseline = record([5.0, 3.0, 2.0])
    assert tokens_to_equal_loss(record([5.0, 2.5, 1.5]), baseline) == pytest.approx(0.75)  # half way from 100 to 200
    assert tokens_to_equal_loss(record([5.0, 2.0, 1.5]), baseline) == 0.5
    assert tokens_to_equal_loss(record([5.0, 3.0, 2.1]), baseline) is None
    assert tokens_to_equal_loss(record([1.0, 1.0, 1.0]), baseline) == 0.0
