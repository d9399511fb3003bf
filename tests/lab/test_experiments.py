"""Plans of several experiments: refusals before anything runs, and the settings of each experiment."""

import importlib.util
import os

import pytest

from diff_transformer.durable import DiskError
from diff_transformer.lab.experiments import Plan, check_models, names_of, run_eval, run_suite, settings_of


@pytest.mark.parametrize("name", ["ablation", "scaling"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"models": ["m"]}, "--model would"),
        ({"models": [], "device": "cpu", "batch_size": 3}, "--device, --batch-size would"),
        ({"models": [], "dtype": "float32"}, "--dtype would"),
    ],
)
def test_what_is_of_a_model_is_refused_where_none_runs(name, options, said):
    with pytest.raises(ValueError, match=f"{name} takes no model, so {said} change nothing; leave them out"):
        check_models(Plan([name], **options))


def test_models_beside_experiments_without_one():
    check_models(Plan(names_of("all", quick=True), ["m"], dtype="float32"))
    check_models(Plan(["ablation"], []))
    with pytest.raises(ValueError, match="no model; give --model"):
        check_models(Plan(["ablation", "needle"], []))


def test_a_folder_that_may_not_be_written_to_is_said_before_a_model_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # no rights bind root
    with pytest.raises(DiskError, match=f"{tmp_path} may not be written to; choose another --out"):
        run_suite(Plan(["needle", "outliers"], ["/nowhere"]), tmp_path / "out")


def test_an_ablation_without_the_extra_for_training_writes_nothing(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightning" else found(name))
    settings = settings_of("ablation", {}, quick=True)
    with pytest.raises(RuntimeError, match="training needs lightning; install with"):
        run_eval("ablation", None, settings, tmp_path / "one.json")
    with pytest.raises(RuntimeError, match="training needs lightning; install with"):
        run_suite(Plan(["ablation"], [], quick=True), tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("seed", [-5, 10**22])
def test_a_seed_that_some_generator_does_not_take(seed):
    with pytest.raises(ValueError, match=f"needle: seed is {seed}; give a whole number from 0 to 4294967295"):
        settings_of("needle", {"seed": seed})


@pytest.mark.parametrize(
    ("name", "assignment", "example"),
    [
        ("needle", "lengths=64", r"lengths is 64; give a value like \[64\]$"),
        ("many_shot", "shots=4", r"shots is 4; give a value like \[1, 10, 100\]$"),
        ("ablation", "rows=diff", r"rows is 'diff'; give a value like '\[\"transformer\", \"diff\"\]'$"),
        ("needle", "cells=4", r"cells is 4; give a value like \[\[1, 1\], \[2, 2\]"),
        ("long_nll", "allow_beyond=yes", "allow_beyond is 'yes'; give a value like false$"),
    ],
)
def test_the_example_of_a_value_can_be_given(name, assignment, example):
    with pytest.raises(ValueError, match=example) as caught:
        settings_of(name, {}, [assignment])
    value = str(caught.value).rsplit("value like ", 1)[1].strip("'")
    settings_of(name, {}, [f"{assignment.split('=')[0]}={value}"])
