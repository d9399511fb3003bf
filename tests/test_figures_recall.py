"""The summary of the recall study: its numbers are those of the records; settings that tell nothing are left out."""

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from recall.plan import AT_RATE, CORE, FACTORS, FURTHER_RATES, GRID, LEARNING_RATES, UNLEARNED

from diff_transformer.lab.record import Record

ROOT = Path(__file__).parent.parent
LEAD = {"p8_n2": 0.1, "p8_n4": 0.2}  # of DIFF over the Transformer, where neither is at chance or at 1


@pytest.fixture
def page(figure_module):
    return figure_module("recall")


def record(setting, side, seed, final, reached=None, lr=1e-3):
    """A run of 600 steps with the accuracy ``final``, at ``GOAL`` halfway between two validations if ``reached``."""
    steps, accuracy = [0, 300, 600], [0.1, 0.1, final]
    if reached:
        steps, accuracy = [0, reached - 50, reached + 50, 600], [0.1, 0.85, 0.95, final]
    chance = 1 / GRID[setting][0]
    names = ("accuracy_2x", "accuracy_4x", "answer", "noise", "answer_mean_map", "noise_mean_map")
    metrics = {"recall": {"accuracy": final, "first_question": final, "chance": chance, **dict.fromkeys(names, 0.5)}}
    return Record(
        setting, side, seed, {"train": {"steps": 600}, "optim": {"lr": lr}}, metrics,
        curves={"recall": {"step": steps, "accuracy": accuracy}},
    )  # fmt: skip


@pytest.fixture
def cells():
    """Without noise all are at 1, DIFF in half of the steps; 4 and 16 pairs in noise are at chance; see ``LEAD``."""
    made = {}
    for where, (pairs, noise) in GRID.items():
        sides = made.setdefault(where, {"softmax": {}, "diff_norm1": {}})
        for seed in range(5):
            jitter = 0.01 * (seed - 2)
            if not noise:
                finals, reached = (1.0, 1.0), (400, 200)
            elif pairs == 8:
                finals, reached = (0.5, 0.5 + LEAD[where] + jitter), (None, None)
            else:
                finals, reached = (1 / pairs, 1 / pairs), (None, None)
            for side, final, step in zip(sides, finals, reached, strict=True):
                sides[side][seed] = record(where, side, seed, final, step)
    return made


def test_the_primary_outcome_is_over_the_settings_that_tell_something(page, cells):
    row = page.over_grid(cells, "diff_norm1", "softmax", page.ACCURACY)
    assert "2 settings" in row.measure
    assert row.difference.mean == pytest.approx(0.15)
    assert (row.baseline, row.side) == pytest.approx((0.5, 0.65))
    assert (row.seeds, row.verdict) == (5, "held")
    steps = page.over_grid(cells, "diff_norm1", "softmax", page.STEPS)
    assert "3 settings" in steps.measure
    assert steps.difference.mean == pytest.approx(-1)
    both = page.corrected([row, steps])
    assert 0 < both[0].p_value == row.p_value < 0.01  # the larger of two
    assert [one.verdict for one in both] == ["held", "held"]
    assert page.corrected([replace(row, p_value=0.03), replace(steps, p_value=0.03)])[0].verdict == "undecided"
    assert page.corrected([replace(row, p_value=0.02)], 4)[0].p_value == pytest.approx(0.08)  # three have not run
    assert page.over_grid(cells, "diff_norm1", "softmax_norm1", page.ACCURACY) is None


def test_a_seed_counts_with_all_settings_or_not_at_all(page, cells):
    del cells["p8_n4"]["diff_norm1"][4]
    row = page.over_grid(cells, "diff_norm1", "softmax", page.ACCURACY)
    assert row.seeds == 4
    assert row.difference.mean == pytest.approx(0.15 - 0.005)
    assert "134 of 135" not in page.progress(cells)
    assert "89 of 135 runs of the core" in page.progress(cells)
    assert "nothing is decided" in page.tables(cells)


def test_the_slope_is_over_all_levels_of_noise(page, cells):
    row = page.slope(cells, "diff_norm1", "softmax", page.ACCURACY)
    by_level = [0, LEAD["p8_n2"] / 3, LEAD["p8_n4"] / 3]
    assert row.difference.mean == pytest.approx((by_level[2] - by_level[0]) / 2)


def test_the_step_at_the_goal_lies_between_two_validations(page):
    assert page.steps_to_goal(record("p4_n0", "diff", 0, 1.0, 200)) == pytest.approx(200)
    assert page.steps_to_goal(record("p4_n0", "diff", 0, 0.95)) == pytest.approx(300 + 300 * 0.8 / 0.85)
    assert page.steps_to_goal(record("p4_n0", "diff", 0, 0.5)) == 600
    assert page.STEPS.read(record("p4_n0", "diff", 0, 0.5)) == math.log2(600)


def test_no_seed_chooses_its_own_rate(page):
    """A seed's rate is that of the other four; what has a diverged run, or one at another rate, is not compared."""
    import rates

    cells = {}
    for rate in LEARNING_RATES:
        where = "p8_n2" if rate == 5e-4 else AT_RATE.format(setting="p8_n2", rate=rate)
        finals = {5e-4: [0.5] * 5, 1e-3: [1.0, 0.2, 0.2, 0.9, 0.9]}.get(rate, [0.125] * 5)
        cells[where] = {
            "softmax": {seed: record("p8_n2", "softmax", seed, final, lr=rate) for seed, final in enumerate(finals)},
            "diff_norm1": {seed: record("p8_n2", "diff_norm1", seed, 0.95, lr=rate) for seed in range(5)},
        }
    runs = page.by_rate(cells, "p8_n2", "softmax")
    chosen = [rates.of_others(runs, seed) for seed in range(5)]
    assert chosen == [1e-3, 1e-3, 1e-3, 1e-3, 1e-3]
    cells["p8_n2_lr0.001"]["softmax"][4] = record("p8_n2", "softmax", 4, 0.3, lr=1e-3)
    runs = page.by_rate(cells, "p8_n2", "softmax")
    assert [rates.of_others(runs, seed) for seed in range(5)] == [5e-4, 1e-3, 1e-3, 5e-4, 1e-3]
    row = page.own_rates(cells, ["p8_n2"], "diff_norm1", "softmax")
    assert row.baseline == pytest.approx((0.5 + 0.2 + 0.2 + 0.5 + 0.3) / 5)
    assert row.side == pytest.approx(0.95)
    assert "| p8_n2 | Transformer | 0.12 (0 of 5) | 0.50 (0 of 5) |" in page.every_rate(cells)
    for missing in (replace(runs[1e-3][4], diverged=True), record("p8_n2", "softmax", 4, 0.3, lr=5e-4)):
        cells["p8_n2_lr0.001"]["softmax"][4] = missing
        assert page.every_rate(cells) == ""
    assert page.own_rates(cells, ["p8_n2"], "diff_norm1", "softmax") is None


def test_a_rate_at_the_edge_of_a_finished_sweep_is_marked(page, cells):
    rates = ("0.00025", "0.0005", "0.001", "0.002")
    for side, best in {"softmax": 0, "diff_norm1": 1, "diff_v2": 3}.items():
        for i, rate in enumerate(rates):
            run = record("p8_n2", side, 100, 0.9 if i == best else 0.5)
            cells.setdefault(f"sweep/lr{rate}", {})[side] = {100: run}
    lines = page.sweep(cells).splitlines()
    assert [line.count("at the edge") for line in lines[-3:]] == [1, 0, 1]
    assert lines[-3].endswith("| 0.90 (best, at the edge) | 0.50 | 0.50 | 0.50 |")
    cells["sweep/lr0.001"] = {"softmax_norm1": {100: run}}  # which has further rates to come
    assert "at the edge" not in page.sweep(cells)


def test_what_findings_says_of_every_side_is_the_record(page):
    """At 8 pairs: runs that reached 0.9 without noise, with 2 noise tokens a pair, and with 4."""
    from archive import cells_of

    cells = cells_of(ROOT / "figures" / "recall")
    recorded = [side for side in page.SIDES if side in cells["p8_n0"]]
    assert all(len(cells[where][side]) == 5 for where in ("p8_n0", "p8_n2", "p8_n4") for side in recorded)
    lines = {line.split(" | ")[0]: line.split(" | ")[1:] for line in page.by_noise(cells, page.SIDES).splitlines()[4:]}
    reached = {
        side: [int(re.search(r"\((\d) of 5", shown)[1]) for shown in lines[f"| {page.SHOWN[side]}"]]
        for side in recorded
    }
    for control in ("softmax_norm1", "softmax_wide_norm1", "softmax_norm", "diff_lambda0", "dint"):
        assert reached[control][1:] == [0, 0], control
    assert reached["softmax_norm_matched"] == [5, 2, 0]
    assert reached["diff_lambda0_matched"] == [5, 1, 0]
    assert reached["softmax_norm_own_scale"] == [4, 0, 0]
    assert reached["diff_lambda0_own_scale"] == [5, 1, 0]
    assert reached["softmax_norm1"] == reached["diff_lambda0"] == reached["dint"] == [0, 0, 0]
    assert reached["softmax_norm_matched_7e-4"] == reached["softmax_norm_own_scale_7e-4"] == [5, 1, 0]
    further = {
        side: max(
            record.curves["recall"]["accuracy"][-1]
            for rate in FURTHER_RATES
            for record in cells[f"sweep/lr{rate:g}"][side].values()
        )
        for side in UNLEARNED
    }
    assert sorted(f"{best:.2f}" for best in further.values()) == ["0.13"] * 5 + ["0.24", "0.36"]
    assert reached["diff_no_norm"] == reached["softmax"] == [5, 2, 0]
    assert reached["diff_matched"] == [5, 5, 5]
    assert reached["diff_norm1"] == [5, 4, 2]
    assert reached["diff_v2"] == [5, 3, 0]
    assert reached["grouped_diff"] == [5, 2, 1]
    assert lines[f"| {page.SHOWN['diff_matched']}"][2].startswith("1.00")
    assert lines["| Transformer"][2].startswith("0.13")


def test_what_pages_say_of_every_rate_is_the_record(page):
    """The lead at the rates of other seeds; the runs that reach 0.9 with and without norm and subtraction."""
    from archive import cells_of

    cells = cells_of(ROOT / "figures" / "recall")
    row = page.own_rates(cells, ["p8_n2", "p8_n4", "p4_n4"], "diff_norm1", "softmax")
    mean, low, high = (f"{x:.3f}" for x in row.difference[:3])
    text = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    assert f"{mean} higher ({low} to {high})" in text
    six = [where for where in page.GRID if not where.startswith("p16")]
    before, after = (
        [f"{x:.3f}" for x in row.difference[:3]]
        for row in (
            page.over_grid(cells, "diff_norm1", "softmax", page.STEPS),
            page.own_rates(cells, six, "diff_norm1", "softmax", page.STEPS),
        )
    )
    assert f"Of the {before[0]} in steps {after[0]} remains ({after[1]} to {after[2]}), inconclusive" in text
    page_text = " ".join((ROOT / "figures" / "recall" / "README.md").read_text().split())
    at = page.LEARNING_RATES.index(5e-4)
    ours, control = (
        [fmean(map(page.ACCURACY.read, runs.values())) for runs in page.by_rate(cells, "p4_n4", side).values()]
        for side in ("diff_matched", "softmax_norm_own_scale")
    )
    said = f"has {ours[at]:.2f} at that rate and the Transformer + head norm from that scale {control[at]:.2f}"
    assert f"{said}, against {max(control):.2f} at its best" in page_text

    def reached(where, side):
        return [int(page.reached(list(runs.values()))[0]) for runs in page.by_rate(cells, where, side).values()]

    both = [reached(where, "diff_matched") for where in ("p8_n2", "p8_n4")]
    assert [n2 == n4 == 5 for n2, n4 in zip(*both, strict=True)] == [False, True, True, False]
    for side in ("softmax_norm_own_scale", "diff_lambda0_own_scale", "diff_no_norm"):
        assert (max(reached("p8_n2", side)), max(reached("p8_n4", side))) == (2, 0), side
    assert (max(reached("p8_n2", "softmax")), max(reached("p8_n2", "diff_v2"))) == (2, 3)


def test_what_findings_says_of_one_factor_at_a_time_is_the_record(page):
    """Which settings around the centre tell DIFF from the Transformer, over five seeds."""
    from archive import cells_of

    cells = cells_of(ROOT / "figures" / "recall")
    assert set(page.VARIED) == set(FACTORS)
    found = {}
    for where in FACTORS:
        assert all(sorted(cells[where][side]) == [0, 1, 2, 3, 4] for side in CORE), where
        (found[where],) = page.paired_rows(cells, where, "diff_norm1", [page.ACCURACY])
        assert page.ACCURACY.read(cells[where]["softmax_norm1"][0]) < 1 / FACTORS[where].get("pairs", 8) + 0.05
    certain = {where for where, row in found.items() if row.difference.low > 0}
    ahead = {where for where, row in found.items() if row.difference.mean > 0.1} - certain
    assert certain == {"distractors", "layers4"}
    text = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    layers, keys = (page.own_rates(cells, [where], "diff_norm1", "softmax") for where in ("layers4", "distractors"))
    assert layers.difference.low > 0 > keys.difference.low
    assert f"4 layers alone ({layers.difference.mean:.3f} higher)" in text
    mean, low, high = (f"{x:.3f}" for x in keys.difference[:3])
    lead = f"its lead of {found['distractors'].difference.mean:.3f} was mostly one of the learning rate"
    assert f"{lead}: {mean} ({low} to {high}) remains" in text
    assert not any(
        int(page.reached(list(runs.values()))[0]) for runs in page.by_rate(cells, "layers4", "softmax").values()
    )
    for where in ("noise16", "head32", "width128"):
        row = page.own_rates(cells, [where], "diff_norm1", "softmax").difference
        assert row.low < 0 < row.mean
    assert ahead == {"noise16", "width128", "width256", "head32"}
    learned = {
        side: {w for w in FACTORS if page.reached(list(cells[w][side].values())) == "5 of 5"}
        for side in ("softmax", "diff_norm1")
    }
    assert "layers4" in learned["diff_norm1"] - learned["softmax"]
    assert page.reached(list(cells["layers4"]["softmax"].values())) == "0 of 5"
    counts = [page.reached(list(cells[w]["softmax"].values())) for w in ("width128", "width256", "head32", "noise16")]
    assert counts == ["2 of 5", "3 of 5", "4 of 5", "1 of 5"]
    assert page.reached(list(cells["noise16"]["diff_norm1"].values())) == "0 of 5"
    assert max(found["head8"].baseline, found["head8"].side) < 0.3
    assert found["head8"].difference.mean < 0
    for where, chance in (("p8_n16", 1 / 8), ("p32_n2", 1 / 32)):
        assert max(found[where].baseline, found[where].side) < chance + 0.02
