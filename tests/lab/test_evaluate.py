"""Plans of several experiments: refusals before anything runs, and the settings of each experiment."""

import os
from pathlib import Path

import numpy as np
import pytest
from tiny_models import save_tiny_model, tiny_lm
from typer.testing import CliRunner

from diff_transformer.cli import app
from diff_transformer.errors import UserError
from diff_transformer.evals.samples import Samples
from diff_transformer.lab import evaluate
from diff_transformer.lab.announce import amount
from diff_transformer.lab.evaluate import (
    Plan,
    check_models,
    experiment,
    labels_of,
    names_of,
    run_eval,
    run_suite,
    settings_of,
)
from diff_transformer.lab.record import load_records
from diff_transformer.lab.rows import read_file


def test_models_beside_experiments_without_one():
    check_models(Plan(names_of("all"), ["m"], dtype="float32"))
    check_models(Plan(["scaling"], []))
    with pytest.raises(ValueError, match="no model; give --model"):
        check_models(Plan(["scaling", "needle"], []))


def test_a_folder_that_may_not_be_written_to_is_said_before_a_model_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no rights bind root
    with pytest.raises(UserError, match=f"{tmp_path} may not be written to; choose another --out"):
        run_suite(Plan(["needle", "outliers"], ["/nowhere"]), tmp_path / "out")


@pytest.mark.parametrize("samples", [10.5, True, "10"])
def test_settings_made_in_python_are_checked_too(samples, tmp_path):
    from diff_transformer.evals.needle import Settings

    with pytest.raises(ValueError, match=f"needle.samples is {samples!r}; input should be a valid integer"):
        run_eval("needle", None, Settings(samples=samples), tmp_path / "r.jsonl.gz")


@pytest.mark.parametrize(
    ("name", "assignment", "message"),
    [
        ("needle", "lengths=64", "needle.lengths is 64; input should be a valid array"),
        ("needle", "colour=red", "no setting 'needle.colour'"),
        ("needle", f"seed={10**22}", "input should be less than or equal to 4294967295"),
        ("needle", "depths=[-0.2]", "needle.depths.0 is -0.2; input should be greater than or equal to 0"),
        ("needle", "cells=[[2,3]]", r"give a pair \[N, R\] of needles and cities asked for, with R from 1 to N"),
        ("ruler", "tasks=[]", r"ruler.tasks is \[\]; tuple should have at least 1 item"),
        ("quantization", "bits=[16,1]", "quantization.bits.1 is 1; input should be greater than or equal to 2"),
        ("needle", "scoring=column", "input should be 'next' or 'search'"),
    ],
)
def test_a_value_that_a_setting_does_not_accept_is_named(name, assignment, message):
    with pytest.raises(ValueError, match=message):
        settings_of(name, {}, [assignment])


MINE = Path(__file__).parents[2] / "examples" / "my_experiment.py"


@pytest.fixture(autouse=True)
def forget():
    yield
    experiment.cache_clear()


def test_an_experiment_of_a_user_s_file_runs_like_one_of_ours(tmp_path):
    """The example of docs/examples.md, on the command line: one result, then a folder with its page."""
    model = save_tiny_model(tmp_path / "tiny")
    command = ["eval", str(MINE), "--model", str(model), "--quick", "--set", "length=8", "--out"]
    assert len(MINE.read_text().splitlines()) <= 41
    done = CliRunner().invoke(app, [*command, str(tmp_path / "many")])
    assert done.exit_code == 0, done.output
    (record,) = load_records(tmp_path / "many")
    assert (record.side, len(record.rows["my_experiment"])) == ("tiny", 8)
    assert record.rows.about("my_experiment")["length"] == 8
    assert record.metrics == {"my_experiment_loss": pytest.approx(np.log(260), abs=1)}  # random weights guess
    assert "| my experiment loss | 5." in done.output
    assert "My experiment" in (tmp_path / "many" / "report.html").read_text()


def test_a_file_hides_no_module_of_its_name(tmp_path):
    (tmp_path / "random.py").write_text(MINE.read_text())
    assert experiment(str(tmp_path / "random.py")).run
    import random

    assert random.random


def test_a_file_that_is_no_experiment_is_said(tmp_path):
    (tmp_path / "nothing.py").write_text("Settings = 3\n")
    with pytest.raises(ValueError, match=r"nothing\.py is no experiment; give it a frozen dataclass Settings and run"):
        experiment(str(tmp_path / "nothing.py"))
    facts = """from dataclasses import dataclass

@dataclass(frozen=True)
class Settings:
    positions: int = 1

run = print
"""
    (tmp_path / "fact.py").write_text(facts)
    with pytest.raises(ValueError, match=r"fact\.py has the setting positions, a fact of every measurement; give it"):
        experiment(str(tmp_path / "fact.py"))
    with pytest.raises(ValueError, match=r"no experiment '.*absent\.py'.*, a file of Python, or all"):
        experiment(str(tmp_path / "absent.py"))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("needle", {"lengths": (300, 260), "cells": ((2, 2), (1, 1)), "depths": (0.0, 1.0)}),
        ("many_shot", {"shots": (1, 2), "order_seeds": 2}), ("many_shot", {"lengths": (280, 400), "order_seeds": 1}),
        ("hallucination", {"summary_tokens": 2, "answer_tokens": 2}), ("recall", {}),
        ("quantization", {"rows": 2, "length": 40, "bits": (8, 4)}), ("gradient_flow", {"length": 20, "batch_size": 2}),
        ("anatomy", {"length": 20}), ("harness", {"data": "python"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["diff", "gpt2"])
def test_the_announced_prompts_are_those_of_the_bar(name, given, family):
    if name == "harness":
        pytest.importorskip("lm_eval")
    lm, seen = tiny_lm(family, positions=900), {}
    settings = settings_of(name, given | {"samples": 3})
    experiment(name).run(lm, settings, Samples(lambda part, done, total: seen.update({part: (done, total)})))
    announced, _ = amount(Plan([name], ["m"], options=given | {"samples": 3}), name, lm.model.config)
    done, total = map(sum, zip(*seen.values(), strict=True))
    assert done == total == announced * (4 if name == "harness" else 1)  # which scores each choice


def test_every_model_has_a_name_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "request.json").write_text('{"side": "diff", "seed": 3, "setting": "demo"}')  # as in a run's folder
    assert evaluate._identity("tiny", "acme/tiny") == ("tiny", 0, "")
    assert evaluate._identity("model", str(tmp_path / "run" / "model")) == ("diff", 3, "demo")
    assert labels_of(["runs/a/model", "runs/b"]) == ["a", "b"]
    assert labels_of(["x/old", "y/old"]) == ["x_old", "y_old"]
    assert labels_of(["old/model", "../old/model"]) == ["old_model-1", "old_model-2"]
    with pytest.raises(ValueError, match="--model a is given twice"):
        labels_of(["a", "b", "a"])


def test_a_script_names_the_model_and_the_settings(tmp_path):
    """A folder, settings by name over the quick ones, and paths as text; a wrong name writes nothing."""
    save_tiny_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"no setting 'outliers.sample' .did you mean 'outliers.samples'"):
        run_eval("outliers", tmp_path / "model", {"sample": 1}, str(tmp_path / "one.jsonl.gz"))
    assert not (tmp_path / "one.jsonl.gz").exists()
    (tmp_path / "text.txt").write_text("A line of plain words about the weather in the hills.\n" * 600)
    given = {"length": 32, "corpus": tmp_path / "text.txt"}
    record = run_eval("outliers", str(tmp_path / "model"), given, str(tmp_path / "one.jsonl.gz"), quick=True)
    about, rows = record.rows.about("outliers"), read_file(tmp_path / "one.jsonl.gz")
    assert (about["length"], about["samples"], about["corpus"]) == (32, 32, str(tmp_path / "text.txt"))
    assert max(row["logits_top1"] for row in rows if row["experiment"] == "outliers") == record.metrics["logits"]
    with pytest.raises(ValueError, match="outliers measures a model; give its folder"):
        run_eval("outliers", None, {}, tmp_path / "two.jsonl.gz")
    with pytest.raises(ValueError, match=r"two.json does not end with .jsonl.gz"):
        run_eval("outliers", tmp_path / "model", {}, tmp_path / "two.json")
