"""The page of the prose study, over records of known differences."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prose.plan import MIXED_RATES, MIXED_SIDES, RAISED, SEEDS, SIDES, rates_of, stages

from diff_transformer.lab.record import Record, grouped

ROOT = Path(__file__).resolve().parent.parent
SHIFTS = {"diff": -0.1, "softmax_norm": -0.2}  # of the loss, from the Transformer's


@pytest.fixture
def page(figure_module):
    return figure_module("prose")


def record(setting, side, seed):
    loss = 3.0 + 0.01 * seed + SHIFTS.get(side, 0.0) + 0.001 * (seed % 2)
    rows = [{"sums": [loss * 10, 20 * book], "counts": [10, 10]} for book in range(4)]
    curves = {"validation": {"step": [0, 10], "loss": [5.0, loss]}}
    return Record(
        setting, side, seed, {"train": {"steps": 10, "batch_size": 1}, "data": {"length": 8}},
        {"associative_recall": {"validation": loss}}, {"long_nll": rows}, curves,
    )  # fmt: skip


def cells(page, seeds=SEEDS):
    found = [record("small", side, seed) for side in SIDES for seed in seeds]
    return grouped(replace(one, rows=page.kept_rows(one)) for one in found)


def test_a_finished_size_is_judged_and_an_unfinished_one_is_not(page):
    text = page.tables(cells(page))
    assert "| minus Transformer, small | -0.100" in text
    assert "difference (95 % CI, 5 seeds)" in text
    assert "| < 0.001 | held |" in text
    against = next(line for line in text.splitlines() if "minus Transformer + head norm" in line)
    assert "+0.100" in against
    assert "did not hold" in against
    assert "medium" not in text.split("**Primary outcome**")[1]
    assert "**Primary outcome**" not in page.tables(cells(page, SEEDS[:4]))


def test_intervals_on_books_are_over_seeds_and_books(page):
    lines = page.by_side(cells(page), "small").splitlines()
    line = next(x for x in lines if x.startswith("| DIFF, head norm initialised at 0.1"))
    assert "-0.050 (-0.050 to -0.050)" in line  # half of each book's tokens have the shift, the same in all


def test_a_restored_record_is_kept_as_it_is(page):
    one = record("small", "diff", 0)
    kept = replace(one, rows=page.kept_rows(one))
    assert page.kept_rows(kept) == kept.rows


def together(best):
    """All runs on prose and needles: a rate other than ``best`` of a side costs 1 nat of the objective."""
    found = []
    for side in MIXED_SIDES:
        for rate in MIXED_RATES:
            for seed in SEEDS:
                one = record(f"mixed_lr{rate:g}", side, seed)
                late = 2.0 + SHIFTS.get(side, 0.0) + 0.01 * seed + (rate != best.get(side, 2e-3))
                sources = {"text": [9.0] + [late + 0.2] * 8, "needles": [9.0] + [late - 0.2] * 8}
                config = one.config | {"optim": {"lr": rate}}
                rows = one.rows | {"associative_recall": [{"loss": late}] * 3}
                metrics = one.metrics | {"needle": {f"n{n}_r1": 0.5 for n in (1, 2, 4)}}
                found.append(
                    replace(one, config=config, metrics=metrics, rows=rows, curves=one.curves | {"sources": sources})
                )
    return found


def test_prose_and_needles_together_are_judged_at_the_first_rate_and_at_those_of_the_other_seeds(page):
    best = {"diff": 4e-3, "softmax": 2e-3, "softmax_norm": 2e-3}
    text = page.together(grouped(replace(one, rows=page.kept_rows(one)) for one in together(best)))
    at_first, of_others = text.split("At the rates that the other seeds choose")

    def cells(text):
        rows = [line.split("|") for line in text.splitlines() if line.startswith("| minus ")]
        return [(re.match(r"[+-][\d.]+", row[2].strip())[0], row[-2].strip()) for row in rows]

    held_out = [("-0.100", "held"), ("+0.100", "did not hold")]
    assert cells(at_first) == [("+0.900", "did not hold"), ("+1.100", "did not hold"), *held_out]
    assert [mean for mean, _ in cells(of_others)] == ["-0.100", "+0.100", "-0.100", "+0.100"]
    assert "| 0.002 | DIFF, head norm initialised at 0.1 | 2.920 | +0.900 (" in text
    assert "| of other seeds | DIFF, head norm initialised at 0.1 | 1.920 | -0.100 (" in text


def test_no_verdict_on_prose_and_needles_before_all_runs_of_the_rate_are_there(page):
    runs = [replace(one, rows=page.kept_rows(one)) for one in together({})]
    first = [one for one in runs if one.setting == "mixed_lr0.002"]
    assert page.repeated(grouped(first))
    assert "other seeds" not in page.together(grouped(first))
    assert page.together(grouped(first[1:])) == page.repeated(grouped(first[1:])) == ""
    assert "74 of 75 runs of prose and needles together" in page.progress(grouped(runs[1:]))


def test_held_out_prose_is_kept_by_stretches_of_text(page):
    one = together({})[0]
    rows = [{"row": i, "loss": 3.0 + i // 16, "ar_hit_sum": 1.0} for i in range(512)]
    kept = page.kept_rows(replace(one, rows=one.rows | {"associative_recall": rows}))["associative_recall"]
    assert [row["loss"] for row in kept] == [3.0 + i for i in range(32)]
    again = replace(one, rows={"associative_recall": kept})
    assert page.kept_rows(again)["associative_recall"] == kept
    assert "associative_recall" not in page.kept_rows(replace(again, setting="small"))


def test_sides_that_did_better_at_a_higher_rate_run_again_there():
    small, _, _, _, higher, raised, *_ = stages("python")
    first, swept = ({(spec.side, spec.config.optim.lr) for spec in stage.specs({})} for stage in (small, higher))
    again = raised.specs({})
    assert swept | first == {(side, rate) for side in SIDES for rate in rates_of("small", side)}
    assert {(spec.side, spec.config.optim.lr) for spec in again} == set(RAISED.items()) <= swept
    assert [spec.seed for spec in again] == sorted(len(RAISED) * list(SEEDS))


def test_what_pages_say_of_prose_alone_is_the_record():
    """The first rows of the primary outcome at each size and the exploratory rows, as the study's page has them."""
    lines = (ROOT / "figures" / "prose" / "README.md").read_text().splitlines()
    outcome = next(line for line in lines if line.startswith("| minus Transformer, small |"))
    mean, low, high = re.search(r"([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)", outcome).groups()
    assert "| undecided; " in outcome
    medium = next(line for line in lines if line.startswith("| minus Transformer, medium |"))
    lower, most, least = re.search(r"-([\d.]+) \(-([\d.]+) to -([\d.]+)\)", medium).groups()
    assert "| undecided; " in medium

    def less_the_transformer(name):
        """The column of the small and of the medium size."""
        return [line.split("|")[4].strip() for line in lines if line.startswith(f"| {name}") and "| 5 |" in line][:2]

    higher = [re.match(r"\+([\d.]+) \(\+", cell)[1] for cell in less_the_transformer("DIFF as published")]
    norm = "Transformer + head norm initialised at 0.1"
    names = (f"{norm} |", f"{norm}, half", "DIFF, lambda = 0")
    controls = [less_the_transformer(name) for name in names]
    assert all(re.search(r"\(-[\d.]+ to \+[\d.]+\)", small) for small, _ in controls)
    gains = [re.match(r"-([\d.]+) \(-[\d.]+ to -", at_medium)[1] for _, at_medium in controls]
    assert min(map(float, gains)) >= float(lower), "the controls are at least as low"
    assert not any("(best, at the edge)" in line for line in lines)
    for page in ("README.md", "docs/findings.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"differs by {mean} nats (95 % CI {low} to {high}, 5 seeds) from the Transformer" in text
    for name in ("Transformer", "DIFF, lambda = 0, head norm initialised at 0.1"):
        at_first, _, raised = (line.split("|")[3].strip() for line in lines if line.startswith(f"| {name} | 5 |"))
        assert float(raised) > float(at_first)
        assert f"{raised} against {at_first}" in text
    assert f"the difference is -{lower} (95 % CI -{most} to -{least}), which Holm" in text
    by_norm, by_half, by_lambda = gains
    assert (
        f"head norm by {by_norm} nats, with half as many heads by {by_half}, "
        f"DIFF with lambda fixed at 0 by {by_lambda}." in text
    )
    assert f"is {higher[0]} nats higher at the small size and {higher[1]} at the medium one" in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"at width 64, by -{lower} (-{most} to -{least}) at 128" in readme
    assert f"on prose alone {higher[0]} and {higher[1]}" in readme


def test_what_pages_say_of_prose_and_needles_together_is_the_record():
    """The primary outcome at the first rate, and the exploratory rows at it."""
    lines = (ROOT / "figures" / "prose" / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("**Prose and needles together**, nats"))
    objective, over_normed, held_out, normed = lines[start + 4 : start + 8]
    assert "objective" in objective
    assert "undecided" in objective
    assert "undecided" in over_normed
    assert "undecided" in normed
    assert "| held |" in held_out
    mean, low, high = re.search(r"-([\d.]+) \(-([\d.]+) to -([\d.]+)\)", held_out).groups()
    assert f"{mean} ({high} to {low})" in " ".join((ROOT / "README.md").read_text().split())

    def on_prose(name):
        """The difference from the Transformer on held-out prose at the first rate, over seeds and text."""
        return next(line.split("|")[7].strip() for line in lines[start:] if line.startswith(f"| 0.002 | {name}"))

    assert on_prose("DIFF, head norm") == f"-{mean} (-{low} to -{high})", "no wider than over seeds alone"
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[start:] if line.startswith("| 0.002 |")]
    assert len(rows) == 5
    for row in rows:
        assert float(row[10]) < 0.55, "of two needles one is named at random"
        assert float(row[11]) < 0.3
    assert not any(" to -" in row[8] for row in rows), "over 512 tokens nobody gains for certain"
    assert re.match(r"\+[\d.]+ \(\+", rows[-1][5]), "as published, prose is certainly worse"
    assert re.match(r"\+[\d.]+ \(-", rows[-1][6]), "and needles not certainly"
    names = ("Transformer + head norm initialised at 0.1 |", "DIFF, lambda")
    controls = [re.match(r"-([\d.]+) \(-[\d.]+ to -", on_prose(name))[1] for name in names]
    published = re.match(r"\+([\d.]+) \(\+", on_prose("DIFF as published"))[1]
    text = " ".join((ROOT / "docs" / "findings.md").read_text().split())
    assert (
        f"head norm is {controls[0]} nats lower than the Transformer, DIFF with lambda fixed at 0 is {controls[1]} "
        "lower." in text
    )
    assert f"As published, DIFF is {published} higher here" in text
