"""The page of the needle study, over records of known differences."""

import math
from pathlib import Path
from statistics import fmean

import pytest
from needles.plan import CELLS, LENGTHS, SEEDS, SETTING, STARTS
from recall.plan import CORE
from scipy.stats import fisher_exact

from diff_transformer.lab.record import Record, grouped

ROOT = Path(__file__).parent.parent
LEAD = {
    "diff_norm1": 0.1,
    "softmax_norm1": -0.3,
    "diff_matched": 0.2,
}  # of the accuracy in every cell, over the Transformer's
REACHED = {"softmax": 3000, "diff_norm1": 1500, "softmax_norm1": None, "diff_matched": 2000}  # steps to 0.9


@pytest.fixture
def page(figure_module):
    return figure_module("needles")


def record(side, seed):
    shown = 0.6 + LEAD.get(side, 0.0) + 0.001 * (seed - 2) * (side == "diff_norm1")
    needle = {f"n{n}_r{r}_len{length}": shown for n, r in CELLS for length in LENGTHS}
    needle |= {f"n8_r1_len{length}_depth{depth}": shown for length in LENGTHS for depth in (0, 25, 50, 75, 100)}
    parts = ("answer", "noise", "answer_mean_map", "noise_mean_map")
    steps, accuracy = [0, 3500], [0.0, 0.5]
    if reached := REACHED[side]:
        steps, accuracy = [0, reached - 50 + seed, reached + 50 + seed, 3500], [0.0, 0.85, 0.95, 0.95]
    return Record(
        SETTING, side, seed, {"train": {"steps": 3500}},
        {"needle": needle, "allocation": dict.fromkeys(parts, shown / 2)},
        curves={
            "needles": {"step": steps, "accuracy": accuracy},
            "sources": {"pairs": [None, 1.2, 0.05, 0.2], "clauses": [None, None, 1.2, 0.05 if reached else 1.2]},
        },
    )  # fmt: skip


def cells(seeds=SEEDS, sides=CORE):
    return grouped(record(side, seed) for side in sides for seed in seeds)


def test_the_primary_outcome_is_that_of_the_records(page):
    lines = page.primary(cells()).splitlines()
    accuracy, steps, against_norm, steps_against_norm = lines[-4:]
    assert "minus Transformer: accuracy" in accuracy
    assert "| +0.100 (+0.098 to +0.102) | +63.2 | < 0.001 | held |" in accuracy
    assert "-0.999 (-1.000 to -0.998) |" in steps
    assert steps.endswith("| < 0.001 | held |")
    assert "minus Transformer + head norm" in against_norm
    assert "| +0.400 " in against_norm
    assert f"{math.log2(1502 / 3500):+.3f}" in steps_against_norm
    assert "nothing is decided" not in lines[0]


def test_an_unfinished_core_decides_nothing(page):
    assert "nothing is decided" in page.tables(cells(range(4)))
    assert "12 of 15 runs of the core" in page.tables(cells(range(4)))
    assert page.primary(cells(sides=("softmax",))) == ""


def test_runs_that_never_reach_the_goal_count_with_all_steps_and_are_said(page):
    assert page.steps(record("softmax_norm1", 0)) == 3500
    assert page.steps(record("softmax", 3)) == pytest.approx(3003)
    lines = page.binding(cells()).splitlines()
    assert "| 5 of 5 | 1500, 1501, 1502, 1503, 1504 |" in lines[3]
    assert lines[4].endswith("| 0 of 5 |  |")
    assert [line.split("|")[3:5] for line in lines[3:]] == [[" 5 of 5 "] * 2, [" 5 of 5 ", " 0 of 5 "]]


def test_every_cell_is_shown_at_both_lengths_with_its_difference(page):
    rows = [line for line in page.by_cell(cells()).splitlines() if line.startswith(("| DIFF", "| Transformer"))]
    assert [line.split("|")[2].strip() for line in rows] == ["128", "256"] * 3
    diff = rows[2].split("|")[3:-1]
    assert len(diff) == len(CELLS)
    assert all(shown.strip().startswith("0.70; +0.100") for shown in diff)


def test_if_nobody_reaches_the_goal_the_steps_have_no_test(page, monkeypatch):
    monkeypatch.setitem(REACHED, "softmax", None)
    text = page.primary(cells())
    assert text.count("steps to 0.9, log2") == 2
    monkeypatch.setitem(REACHED, "diff_norm1", None)
    text = page.primary(cells())
    assert "steps to 0.9, log2" not in text
    assert text.count("no run of either side reached 0.9") == 2


def test_what_pages_say_is_the_record(page):
    from archive import cells_of

    cells = cells_of(ROOT / "figures" / "needles")
    runs = {side: list(cells[SETTING][side].values()) for side in CORE}
    assert [page.reached(cells, side) for side in CORE] == [5, 2, 0]
    assert [sum(page.learned(run, "pairs") for run in runs[side]) for side in CORE] == [4, 5, 0]
    assert [sum(page.learned(run, "clauses") for run in runs[side]) for side in CORE] == [5, 2, 0]
    assert [page.reached(cells, side) for side in (*STARTS, "softmax_norm", "diff_v2")] == [5] * 5
    from_one = [list(cells[SETTING][side].values()) for side in ("diff_lambda0", "softmax_wide_norm1", "softmax_norm1")]
    assert all(len(of) == 5 and not any(page.learned(run, "pairs") for run in of) for of in from_one)
    pairs = [("diff", "softmax"), ("diff_matched", "softmax"), ("diff_matched", "softmax_norm_matched")]
    pairs += [("diff", "softmax_norm"), ("diff_v2", "softmax")]
    of_pairs = [page.compared(cells, *pair)[0] for pair in pairs]
    rows = [row for of in of_pairs for row in of]
    assert all(row.difference.low < 0 < row.difference.high for row in rows)
    accuracies = [row for of in of_pairs for row in of if "accuracy" in row.measure]
    assert len(accuracies) == len(pairs)
    assert all(max(map(abs, row.difference[:3])) <= 0.005 for row in accuracies[:3])
    assert all(min(row.baseline, row.side) >= 0.98 for row in accuracies)  # "nearly every question"
    through = [run for run in runs["diff_norm1"] if page.steps(run) < run.steps]
    assert min(run.metrics["needle"][f"n{n}_r{r}_len128"] for run in through for n, r in CELLS) >= 0.97
    assert max(map(page.steps, through)) < max(map(page.steps, runs["softmax"]))
    (row, *_) = page.paired_rows(cells, SETTING, "diff_norm1", [page.ACCURACY], "softmax")
    assert [round(x, 3) for x in row.difference[:3]] == [-0.41, -0.87, 0.05]
    attention = [fmean(page.ATTENTION[0].read(run) for run in runs[side]) for side in ("softmax", "diff_norm1")]
    learned = fmean(page.ATTENTION[0].read(run) for run in through)
    findings = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    for said in (
        "0.410 lower",
        "from 0.870 lower to 0.050 higher",
        f"(Fisher's exact test: p = {fisher_exact([[5, 0], [2, 3]]).pvalue:.2f})",
        "{:.3f} of its attention on the answer; DIFF {:.3f}".format(*attention),
        f"{learned:.3f} in the two runs that tell needles apart",
    ):
        assert said in findings


def test_other_starts_of_the_norm_are_compared_with_what_has_run(page):
    assert page.later(cells()) == ""
    text = page.later(cells(sides=("softmax", "diff_matched")))
    assert "**Other starts of the head norm** (exploratory)" in text
    assert "| DIFF, matched scale (0.12, 0.31 by layer) | difference (95 % " in text
    (line,) = (line for line in text.splitlines() if "accuracy" in line)
    assert line.startswith("| minus Transformer: accuracy")
    assert "| +0.200 (+0.200 to +0.200) |  | < 0.001 | on DIFF's side |" in line  # without spread there is no d


@pytest.mark.parametrize("given", [["nowhere"], ["one", "two"], ["--check", "one"]])
def test_a_wrong_argument_ends_in_one_sentence(page, given, capsys):
    with pytest.raises(SystemExit) as stopped:
        page.study_command(given, page.HERE, page.PAGES, page.needle_charts)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python figures/needles/run.py")
