"""The summary of the answer study: its plan, the rule that leaves settings out, and the numbers of its tables."""

from pathlib import Path
from statistics import fmean

import pytest
from answers.plan import GROUNDED, LONGER, SHOTS, SIDES, stages
from recall.plan import LEARNING_RATES, SEEDS
from scipy.stats import fisher_exact

from diff_transformer.lab.record import Record

ROOT = Path(__file__).parent.parent


@pytest.fixture
def page(figure_module):
    return figure_module("answers")


def record(setting, side, seed, lr=1e-3, **metrics):
    curves = {"recall": {"step": [0, 1000], "accuracy": [0.1, metrics["accuracy"]]}}
    return Record(
        setting, side, seed, {"train": {"steps": 1000}, "optim": {"lr": lr}}, {"recall": metrics}, curves=curves
    )


def grounded(setting, side, seed, answerable, hallucinated):
    found = {"answerable": answerable, "hallucinated": hallucinated}
    return record(setting, side, seed, accuracy=0.9 * answerable, chance=0.125, **found,
                  answerable_2x=answerable / 2, hallucinated_2x=hallucinated)  # fmt: skip


@pytest.fixture
def cells():
    """Without an answer DIFF is ahead with 2 noise tokens, and with 4 all say "none"; on shots it reaches 0.95."""
    made = {}
    for seed in SEEDS:
        for side in ("softmax", "softmax_norm_own_scale", "diff_matched"):
            ahead = (side == "diff_matched") * (0.3 + 0.01 * seed)
            made.setdefault("grounded_n2", {}).setdefault(side, {})[seed] = grounded(
                "grounded_n2", side, seed, 0.5 + ahead, 0.1
            )
            made.setdefault("grounded_n4", {}).setdefault(side, {})[seed] = grounded("grounded_n4", side, seed, 0, 0)
            for where, chance in (("shots_p4", 0.375), ("shots_p8", 0.29)):
                accuracy = 0.95 + 0.001 * seed if side == "diff_matched" else chance
                made.setdefault(where, {}).setdefault(side, {})[seed] = record(
                    where, side, seed, accuracy=accuracy, chance=chance, shots1=0.1, shots2=0.2, new_form=0.3,
                    order_flips=0.4,
                )  # fmt: skip
    return made


def test_the_plan_of_every_rate_and_three_times_the_steps():
    runs = [spec for stage in stages("none")[4:] for spec in stage.specs({})]
    assert len(runs) == len({spec.key for spec in runs}) == 400
    first = runs[: 3 * 5 * 3 * 4]  # rates that were not chosen, seeds, sides of the primary outcome, settings
    assert {spec.side for spec in first} == {"softmax", "diff_matched", "softmax_norm_own_scale"}
    for spec in runs:
        assert spec.setting.endswith(f"_lr{spec.config.optim.lr:g}")
        short = 1000 if spec.setting.startswith("grounded") else 2000
        assert spec.config.train.steps == short * (3 if "_x3_" in spec.setting else 1)
    assert [spec.setting[:11] for spec in runs[-100:]] == ["grounded_n2"] * 40 + ["shots_p4_x3"] * 60


def test_the_primary_outcome(page, cells):
    row, lost = page.tested(cells, "grounded", "softmax")
    assert lost == ["grounded_n4"]  # where both always say "none": 0.5
    assert row.difference.mean == pytest.approx(0.32 / 2)
    assert (row.baseline, row.side) == pytest.approx((0.7, 0.86))
    row, lost = page.tested(cells, "shots", "softmax_norm_own_scale")
    assert lost == []
    assert row.difference.mean == pytest.approx(0.952 - (0.375 + 0.29) / 2)
    text = page.primary(cells)
    assert text.count("| held |") == 4
    assert "left out by the rule of the plan: grounded_n4 (against the Transformer); grounded_n4 (against" in text
    del cells["shots_p8"]["softmax"]
    assert page.tested(cells, "shots", "softmax")[0].measure.endswith("accuracy on shots, 1 settings")
    assert page.primary({}) == ""


def test_tables_show_what_the_runs_have(page, cells):
    lines = page.grounded_table(cells).splitlines()
    assert "| grounded_n2 | Transformer | 0.70 | 0.50 (0.25) | 0.10 (0.10) | 0 of 5 |  |  |" in lines
    cells["grounded_n2"]["diff_matched"][0].metrics["recall"] |= {"answerable": 0.95, "hallucinated": 0.04}
    (line,) = (
        line for line in page.grounded_table(cells).splitlines() if line.startswith("| grounded_n2 | DIFF, matched")
    )
    assert line.endswith("| 1 of 5 | 0.95 (0.40) | 0.04 (0.10) |")
    (line,) = (line for line in page.shots_table(cells).splitlines() if line.startswith("| shots_p4 | Transformer |"))
    assert line == "| shots_p4 | Transformer | 0.38 | 0.38 | 0 of 5 | 0.10 | 0.20 |  | 0.30 | 0.40 |"
    assert page.shots_table({}) == ""


def test_every_rate_stands_beside_the_primary_outcome(page, cells):
    """At 5e-4 the baseline does better in all seeds; so that is its rate, and the difference shrinks."""
    assert page.every_rate(cells) == ""
    for where in SHOTS:
        for rate in (2.5e-4, 5e-4, 2e-3):
            for side in ("softmax", "diff_matched"):
                better = 0.2 if (side, rate) == ("softmax", 5e-4) else 0.0
                for seed, run in cells[where][side].items():
                    metrics = run.metrics["recall"] | {"accuracy": run.metrics["recall"]["accuracy"] + better}
                    at = cells.setdefault(f"{where}_lr{rate:g}", {}).setdefault(side, {})
                    at[seed] = record(where, side, seed, rate, **metrics)
    before, after = page.tested(cells, "shots", "softmax")[0], page.own_rates(cells, "shots", "softmax")
    assert before.difference.mean - after.difference.mean == pytest.approx(0.2)
    text = page.every_rate(cells)
    line = "| shots_p4 | Transformer | 0.38 (0 of 5) | 0.57 (0 of 5) | 0.38 (0 of 5) | 0.38 (0 of 5) | 0.57 (0 of 5) |"
    assert line in text.splitlines()
    assert "grounded" not in text, "it has one rate only"
    assert page.own_rates(cells, "shots", "softmax_norm_own_scale") is None
    for seed in SEEDS:
        cells["shots_p4_lr0.0005"]["softmax"].pop(seed)
    assert page.own_rates(cells, "shots", "softmax") is None
    longer = {rate: f"shots_p4_x3_lr{rate:g}" for rate in LEARNING_RATES}
    for rate, where in longer.items():
        cells[where] = {"softmax": {s: record(where, "softmax", s, rate, accuracy=0.95, chance=0.375) for s in SEEDS}}
    assert "| shots_p4_x3 | Transformer |" + " 0.95 (5 of 5) |" * 5 in page.every_rate(cells).splitlines()


def means(page, cells, where, side):
    """The mean accuracy at each rate, over all seeds."""
    return [fmean(map(page.ON_SHOTS.read, of.values())) for of in page.by_rate(cells, where, side).values()]


def test_what_findings_says_is_the_record(page):
    from archive import cells_of

    cells = cells_of(ROOT / "figures" / "answers")
    assert all(len(cells[where][side]) == 5 for where in (*GROUNDED, *SHOTS) for side in SIDES)
    text = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    both = [page.tested(cells, task, "softmax") for task in ("grounded", "shots")]
    (grounded, *numbers), (shots, *low_high) = ([f"{x:.3f}" for x in row.difference[:3]] for row, _ in both)
    assert [lost for _, lost in both] == [[], []]
    assert f"is {grounded} higher (95 % CI {numbers[0]} to {numbers[1]}, 5 seeds), its accuracy on" in text
    assert f"labelled examples {shots} higher ({low_high[0]} to {low_high[1]})" in text
    assert page.primary(cells).count("| held |") == 4
    longer = [page.mean("answerable_2x")(list(cells[where]["diff_matched"].values())) for where in GROUNDED]
    assert "finds only {} and {} of the values".format(*longer) in text
    invented = page.mean("hallucinated")(list(cells["grounded_n2"]["softmax"].values()))
    assert f"names a value in {100 * float(invented):.0f} % of the questions without an answer" in text
    reached = {side: [page.solved(list(cells[where][side].values())) for where in SHOTS] for side in SIDES}
    assert reached.pop("diff_matched") == ["5 of 5", "5 of 5"]
    assert reached.pop("diff_lambda0_own_scale") == ["2 of 5", "1 of 5"]
    assert set(map(tuple, reached.values())) == {("0 of 5", "0 of 5")}
    for where in SHOTS:
        assert min(run.metrics["recall"]["new_form"] for run in cells[where]["diff_matched"].values()) > 0.95
    found = {side: [len(page.retrieving(list(cells[where][side].values()))) for where in GROUNDED] for side in SIDES}
    assert (found["diff_matched"], found["softmax"]) == ([5, 4], [0, 0])
    noisy, elsewhere = (f"{fisher_exact([[n, 5 - n], [0, 5]]).pvalue:.3f}" for n in (4, 5))
    assert f"p = {noisy} at 4 noise tokens, {elsewhere} elsewhere" in text
    again = [page.own_rates(cells, task, "softmax").difference for task in ("grounded", "shots")]
    first, second = ([f"{x:.3f}" for x in found[:3]] for found in again)
    said = f"differences are {first[0]} ({first[1]} to {first[2]}) and {second[0]} ({second[1]} to {second[2]})"
    assert said in text
    for side in ("softmax", "diff_lambda0_own_scale"):
        runs = page.at_others(page.by_rate(cells, "grounded_n2", side))
        assert len(page.retrieving(runs)) == 2, side
    invented = page.mean("hallucinated")(page.at_others(page.by_rate(cells, "grounded_n2", "softmax")))
    assert f"runs of five and names one in {100 * float(invented):.0f} %" in text
    (best,) = [mean for mean in means(page, cells, "shots_p4", "diff_norm1") if mean > 0.375 + 0.05]
    assert f"has {best:.2f} with four examples at 5e-4" in (ROOT / "figures" / "answers" / "README.md").read_text()
    later = {side: page.by_rate(cells, "grounded_n2_x3", side) for side in LONGER["grounded_n2"]}
    reach = {side: [len(page.retrieving(list(of.values()))) for of in runs.values()] for side, runs in later.items()}
    assert reach == {"softmax": [5, 5, 2, 0], "diff_matched": [5, 5, 5, 5]}
    assert page.mean("hallucinated")(page.at_others(later["softmax"])) == "0.00"
    for where in SHOTS:
        for side in ("softmax", "softmax_norm_own_scale", "diff_norm1"):
            for runs in page.by_rate(cells, where, side).values():
                assert page.solved(list(runs.values())) == "0 of 5"
