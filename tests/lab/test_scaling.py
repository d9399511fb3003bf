"""Fits of scaling laws, tables of runs, and what is refused."""

import re

import numpy as np
import pandas as pd
import pytest
from made_rows import CONFIG

from diff_transformer.errors import UserError
from diff_transformer.lab.evaluate import run_eval
from diff_transformer.lab.rows import Rows, read_rows, row
from diff_transformer.lab.scaling import (
    Settings,
    evaluate_scaling,
    exponent_interval,
    fit_power_law,
    ratio_interval,
    read_runs,
    run,
    runs_of,
)
from diff_transformer.report.tables import markdown

SIZES = [1e6, 3e6, 1e7, 3e7, 1e8]


def losses(sizes, a=40.0, b=0.3, c=1.7, noise=0.0, seed=0):
    draw = np.random.default_rng(seed)
    return [(a * size**-b + c) * np.exp(noise * draw.normal()) for size in sizes]


def made_up():
    """A table with the paper's sizes: DIFF needs exactly 62.2 % of the parameters and 63.7 % of the tokens."""
    made = []
    for name, of_size, of_tokens in (("softmax", 1.0, 1.0), ("diff", 0.622, 0.637)):
        made += [(name, size * 1e9, 10e9, 1.8 + 300 * (size * 1e9 / of_size) ** -0.28) for size in (0.8, 1.4, 2.8, 6.8)]
        made += [(name, 3e9, n * 1e9, 1.7 + 500 * (n * 1e9 / of_tokens) ** -0.27) for n in range(40, 361, 40)]
    return pd.DataFrame(made, columns=["model", "parameters", "tokens", "loss"])


def test_an_exact_law_is_recovered():
    law = fit_power_law(SIZES, losses(SIZES))
    assert law.exponent == pytest.approx(0.3, rel=1e-5)
    assert law.loss(1e7) == pytest.approx(losses([1e7])[0], rel=1e-8)
    assert law.inverse(law.loss(5e6)) == pytest.approx(5e6, rel=1e-5)
    assert law.inverse(1.7 / 2) == float("inf")


def test_one_bad_run_does_not_bend_the_curve():
    bent = losses(SIZES * 3)
    bent[4] *= 1.3
    assert fit_power_law(SIZES * 3, bent).exponent == pytest.approx(0.3, rel=0.15)


def test_intervals_cover_as_they_say():
    """Of 40 noisy repetitions at least 35 intervals hold the true exponent, and at least 35 the true ratio."""
    sizes, exponents, ratios = SIZES * 3, 0, 0
    for seed in range(40):
        mine = fit_power_law(sizes, losses(sizes, noise=0.003, seed=seed), huber=10)
        theirs = fit_power_law(sizes, losses([s / 2 for s in sizes], noise=0.003, seed=1000 + seed), huber=10)
        low, high = exponent_interval(mine)
        exponents += low <= 0.3 <= high
        low, high = ratio_interval(mine, theirs, 1e7)
        ratios += low <= 2.0 <= high
    assert exponents >= 35
    assert ratios >= 35


def test_as_many_parameters_as_losses_leave_no_interval():
    law = fit_power_law(SIZES[:3], losses(SIZES[:3]))
    assert exponent_interval(law) == (None, None)


@pytest.mark.parametrize(
    ("x", "loss", "words"),
    [
        ([1, 2, 3], [3, 2, float("nan")], "positive and finite"),
        ([1, 2, 0], [3, 2, 1], "positive and finite"),
        ([1, 1, 2], [3, 3, 2], "2 different sizes; a fit needs 3"),
        ([1, 2, 3], [1, 2, 3], "does not fall"),
    ],
)
def test_losses_that_are_no_law_are_refused(x, loss, words):
    with pytest.raises(UserError, match=words):
        fit_power_law(x, loss)


def test_the_papers_ratios_are_read_from_a_table_and_written_as_rows_of_both_models(tmp_path):
    made_up().to_csv(tmp_path / "runs.csv", index=False)
    record = run_eval("scaling", None, {"runs": str(tmp_path / "runs.csv")}, tmp_path / "r.jsonl.gz")
    assert record.side == "diff"
    rows = record.rows["scaling"].set_index("fit")
    assert rows["ratio"]["parameters"] == pytest.approx(0.622, rel=1e-6)
    assert rows["ratio"]["tokens"] == pytest.approx(0.637, rel=1e-6)
    assert rows["exponent"]["parameters"] == pytest.approx(0.28, rel=1e-6)
    table = markdown(read_rows(tmp_path / "r.jsonl.gz"))
    assert re.search(r"\| parameters for equal loss, ratio \| 0\.622[^|]* \|  \|", table)  # of ours alone
    assert "| exponent of loss against tokens | 0.270" in table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model,tokens,loss\n", "has no parameters; needed"),
        ("model,parameters,tokens,loss\ndiff,big,1e9,3\n", "parameters is big; give a positive number"),
        ("model,parameters,tokens,loss\ndiff,1e6,1e9,-3\n", "loss is -3"),
        ('model,parameters,tokens,loss\ndiff,1e6,1e9,"3,06"\n', "loss is 3,06"),
    ],
)
def test_a_table_that_is_wrong_is_refused(tmp_path, text, words):
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        read_runs([tmp_path / "runs.csv"])


def test_a_table_without_a_model_or_nothing_to_fit_is_refused(tmp_path):
    with pytest.raises(UserError, match="no table of runs at"):
        read_runs([tmp_path / "none.csv"])
    runs = made_up().assign(part="final")
    with pytest.raises(UserError, match="no run of 'dint'; the table has: diff, softmax"):
        evaluate_scaling(runs, Settings(ours="dint"))
    with pytest.raises(UserError, match="nothing to fit"):
        evaluate_scaling(runs.groupby("model").head(1))
    with pytest.raises(UserError, match="scaling needs a table"):
        run(None, Settings(), None)


def of_training(side, setting="novels", seed=0, size=640_000, diverged=None):
    key = (side, seed, setting)
    made = [row("validation", *key, example=step, step=step, loss=5 - step / 50) for step in (0, 50, 100)]
    made.append(row("model", *key, parameters=size))
    made.append(row("about", *key, of="run", example="config", key="config", value=CONFIG))
    return made + ([row("about", *key, of="run", example="d", key="diverged", value=diverged)] if diverged else [])


def test_runs_of_a_study_are_points_without_sweeps_toy_models_and_diverged_runs():
    rows = [
        *of_training("diff"),
        *of_training("softmax"),
        *of_training("diff", "sweep/lr1"),
        *of_training("diff", "recall"),
    ]
    found = runs_of(Rows([*rows, *of_training("diff", seed=1, diverged="step 3")]))
    final = found[found["part"] == "final"]
    assert list(final["model"]) == ["diff", "softmax"]
    assert list(final["tokens"]) == [100 * 16 * 128] * 2
    assert sorted(found[(found["part"] == "curve") & (found["model"] == "diff")]["tokens"]) == [102_400, 204_800]
    assert isinstance(found, pd.DataFrame)
