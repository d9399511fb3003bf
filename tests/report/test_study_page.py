"""The page of a study: finished or not, from its folder or from a record of its cells."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diff_transformer.cli import app
from diff_transformer.errors import UserError
from diff_transformer.lab.measures import borrow_baselines
from diff_transformer.lab.record import Record, load_all, save_all
from diff_transformer.report import ResultsError
from diff_transformer.report.study_page import is_study, load_cells, render_study_page, write_study_report

FIGURES = Path(__file__).parents[2] / "figures"
RECORDED = [path for path in sorted(FIGURES.glob("*/measured.json")) if is_study(path)]
ATTACK = "<img src=x onerror=alert(1)>"


def record(loss: float, seed: int = 0, width: int = 64, where: str = "main", side: str = "diff") -> Record:
    model = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    train = {"seed": seed, "steps": 100, "batch_size": 1}
    config = {"model": model, "data": {"length": 10}, "optim": {"lr": 1e-3}, "train": train}
    metrics = {"needle": {"n1_r1": 0.5}, "gradients": {"median": 1.0, "largest": 2.0, "spikes": 0}}
    curves = {
        "validation": {"step": [0, 50, 100], "loss": [7.0, loss + 1, loss]},
        "training": {"step": [50], "loss": [3.0], "grad_norm": [1.0]},
    }
    return Record(where, side, seed, config, metrics, {}, curves)


@pytest.fixture
def folder(tmp_path):
    """Two settings, of which one has no baseline of its own, and a sweep."""
    for setting, side, losses in (
        ("main", "softmax", [3.0, 3.2, 3.1]),
        ("main", "diff", [2.9, 3.0, 2.8]),
        ("changed", "diff_other", [3.5, 3.6]),
        ("sweep/lr0.001", "diff", [4.0]),
    ):
        for seed, loss in enumerate(losses):
            place = tmp_path / "study" / setting / f"{side}-seed{seed}"
            record(loss, seed, where=setting, side=side).save(place / "record.json")
    return tmp_path / "study"


def test_the_page_has_every_setting_its_differences_and_the_numbers(folder, tmp_path):
    assert is_study(folder)
    path = write_study_report(folder, tmp_path / "study.html")
    page = path.read_text()
    words = re.sub(r"<[^>]+>", " ", page)
    assert "9 runs in 3 settings" in words
    for said in ("main: DIFF", "changed: diff_other", "Learning rates", "−0.200", "held", "1 needle"):
        assert said in words, said
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    with pytest.raises(UserError, match="--overwrite"):
        write_study_report(folder, path)


def test_a_model_that_diverged_is_counted_and_left_out_of_means(folder):
    others = [f"changed/diff_other-seed{seed}" for seed in (0, 1)]
    for place in ("main/diff-seed1", *others, "sweep/lr0.001/diff-seed0"):
        file = folder / place / "record.json"
        (one,) = load_all(file)
        metrics = {"gradients": {"median": None, "largest": None, "spikes": 0, "logged": 0}}
        curves = record(99.0).curves
        replace(one, diverged="step 7: loss nan", metrics=metrics, curves=curves).save(file)
    page = render_study_page(load_cells(folder))
    words = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert re.search(r"main: DIFF 3, 1 diverged 2.850 −0.200 [^a-z]*to [^a-z]*undecided", words)
    assert "changed: diff_other 2, 2 diverged –" in words
    assert "99" not in words


def test_a_setting_without_a_baseline_takes_that_of_its_size(folder):
    cells = borrow_baselines(load_cells(folder))
    assert cells["changed"]["softmax"] is cells["main"]["softmax"]
    wider = {"changed": {"diff": {0: record(3.0, width=128)}}, "main": load_cells(folder)["main"]}
    assert "softmax" not in borrow_baselines(wider)["changed"]
    fewer = record(3.0)
    fewer.config["model"]["num_attention_heads"] = 2
    cells = {"fewer": {"softmax": {0: fewer}}, **load_cells(folder)}
    assert borrow_baselines(cells)["changed"]["softmax"] is cells["main"]["softmax"]
    assert "changed: Transformer, of main" in re.sub(r"<[^>]+>", " ", render_study_page(load_cells(folder)))


def test_a_transformer_of_other_data_is_not_borrowed(folder):
    cells = load_cells(folder)
    cells["changed"]["diff_other"][0].config["data"]["recall"] = {"pairs": 4}
    cells["main"]["softmax"][0].config["data"]["recall"] = {"pairs": 4, "added_since": 1}
    assert "softmax" in borrow_baselines(cells)["changed"]
    cells["main"]["softmax"][0].config["data"]["recall"] = {"pairs": 8}
    assert "softmax" not in borrow_baselines(cells)["changed"]


def test_each_sweep_of_a_study_has_its_own_table(folder):
    for size, loss in (("small", 4.4), ("wide", 3.9)):
        place = f"sweep/{size}_lr0.001"
        record(loss, where=place).save(folder / place / "diff-seed0" / "record.json")
    words = re.sub(r"<[^>]+>", " ", render_study_page(load_cells(folder)))
    for said in ("Learning rates: small", "Learning rates: wide", "4.400", "3.900", "4.000"):
        assert said in words, said


def test_a_record_of_cells_is_a_study_too(folder, tmp_path):
    kept = tmp_path / "measured.json"
    cells = load_cells(folder)
    save_all((r for sides in cells.values() for seeds in sides.values() for r in seeds.values()), kept)
    assert is_study(kept)
    assert load_cells(kept) == cells


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(path, id=path.parent.name, marks=[pytest.mark.slow] * (path.parent.name == "recall"))
        for path in RECORDED
    ],
)
def test_every_recorded_study_has_a_page_or_says_why_not(record):
    cells = load_cells(record)
    records = [one for sides in cells.values() for seeds in sides.values() for one in seeds.values()]
    if any("validation" in one.curves for one in records):
        assert "Final validation loss" in render_study_page(cells)
    else:
        with pytest.raises(ResultsError, match="no run of this study keeps its validation loss"):
            render_study_page(cells)


def test_names_are_data(folder):
    cells = load_cells(folder)
    cells[ATTACK] = {ATTACK: cells["main"]["diff"], "softmax": cells["main"]["softmax"]}
    page = render_study_page(cells)
    assert ATTACK not in page
    assert "&lt;img src=x" in page


def test_the_command_writes_it_and_says_what_it_cannot(folder, tmp_path):
    run = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "page.html")])
    assert run.exit_code == 0, run.output
    assert "A study of matched pairs" in (tmp_path / "page.html").read_text()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert not is_study(empty)
    with pytest.raises(ResultsError, match="no finished run"):
        load_cells(empty)


def test_a_table_of_measures_says_what_stays_significant_after_holm(folder):
    for seed, loss in enumerate([2.9, 3.1, 3.0]):  # 0.1 below the baseline with every seed
        record(loss, seed).save(folder / f"main/diff-seed{seed}/record.json")
    page = render_study_page(load_cells(folder))
    said = (
        "Without a correction 1 of 2 tested measures is significant; with Holm&#x27;s correction 1 is: validation loss."
    )
    assert page.count(f"<p>{said}</p>") == 1
