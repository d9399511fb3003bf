"""``compare`` from start to end on a corpus of a few files."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from diff_transformer.errors import UserError
from diff_transformer.lab.compare import compare, measure_speed
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import load_records
from diff_transformer.lab.results import read_comparison
from diff_transformer.lab.rows import FILE
from diff_transformer.lab.spec import RunSpec
from diff_transformer.report import write_report
from diff_transformer.train.config import override


@pytest.fixture(scope="module")
def assignments(texts):
    return [f"data.corpus={texts}", "data.max_bytes=null", "model.vocab_size=384"]


@pytest.fixture(scope="module")
def settings(assignments):
    return [*assignments, "evaluation.recall_steps=2"]


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    return out, compare(override(recipe("debug"), settings), out)


def test_everything_is_written(finished):
    out, verdicts = finished
    for side in ("diff", "softmax"):
        member = out / "members" / f"{side}-seed0"
        model = AutoModelForCausalLM.from_pretrained(member / "run" / "model")
        assert model.config.attention == side
        assert list((member / "run" / "tensorboard").glob("events*"))
    (whole,) = load_records(out / "members" / "softmax-seed0")
    assert (whole.setting, whole.side, whole.seed) == ("debug", "softmax", 0)
    assert {
        "loss",
        "answer",
        "noise",
        "logits",
        "validation_loss",
        "parameters",
        "flops_per_token",
    } <= whole.metrics.keys()
    assert "<html" in (out / "report.html").read_text()
    rows = read_comparison(out)
    assert (rows.sides, rows.settings) == (["diff", "softmax"], ["debug", ""])
    assert [*rows.only(side="softmax")["recall_curve"]["step"]] == [0, 2]
    assert len(rows["validation"]) == len(rows.only(setting="debug")["validation"]) > 0
    assert [entry["title"] for entry in rows.only(side="softmax")["explorer"]["entry"]] == [
        "One needle", "Two needles, one asked for", "Key-value recall in noise"
    ]  # fmt: skip
    assert rows.about("comparison").keys() == {"seconds", "seeds"}  # a script is no command
    assert list(verdicts) == [
        "loss", "recall", "ar_hit", "others", "needle_n1_r1", "needle_n2_r1", "answer", "noise", "logits",
        "logits_in_medians", "hidden", "hidden_in_medians", "throughput", "long_nll",
    ]  # fmt: skip


def test_both_sides_saw_the_same(finished):
    out, _ = finished
    requests = [
        json.loads((out / "members" / f"{side}-seed0" / "request.json").read_text()) for side in ("diff", "softmax")
    ]
    for request, side in zip(requests, ("diff", "softmax"), strict=True):
        assert (request.pop("side"), request["config"]["model"].pop("attention")) == (side, side)
    assert requests[0] == requests[1]
    first = [
        json.loads((out / "members" / f"{side}-seed0" / "run" / "metrics.jsonl").read_text().splitlines()[0])
        for side in ("diff", "softmax")
    ]
    assert first[0]["validation_loss"] == pytest.approx(first[1]["validation_loss"], abs=0.2)


def test_the_small_pair_differs_in_one_field_and_its_rows_are_answered_right(finished):
    out, _ = finished
    diff, softmax = (RunSpec.load(out / "recall" / f"{side}-seed0").config for side in ("diff", "softmax"))
    assert (diff.model.pop("attention"), softmax.model.pop("attention")) == ("diff", "softmax")
    assert diff == softmax
    entry = read_comparison(out).only(side="softmax")["explorer"]["entry"].iloc[-1]
    key, place = entry["tokens"][-1], entry["span"][0]
    assert entry["tokens"].count("·") == 16
    assert entry["tokens"].index(key) + 1 == place
    assert entry["tokens"][place] == entry["answer"] == key.replace("k", "v")


def test_a_finished_folder_is_not_overwritten_but_resumes(finished, settings):
    out, verdicts = finished
    config = override(recipe("debug"), settings)
    with pytest.raises(UserError, match="holds a comparison already"):
        compare(config, out)
    with pytest.raises(ValueError, match=r"another configuration(.|\n)*optim\.lr: 0\.003 against 0\.001"):
        compare(override(config, ["optim.lr=0.001"]), out, resume=True)
    model = out / "members" / "diff-seed0" / "run" / "model" / "model.safetensors"
    before = model.read_bytes()
    (out / "members" / "diff-seed0" / FILE).unlink()
    again = compare(config, out, resume=True)
    assert model.read_bytes() == before
    for id, of in verdicts.items():
        assert again[id]["softmax"].difference == of["softmax"].difference


def test_time_ends_with_everything_saved_and_the_page_is_made_later(finished, settings, tmp_path, monkeypatch, capsys):
    """The rows of a comparison that was made without the report's packages give the page anywhere."""
    first, _ = finished
    config = override(recipe("debug"), settings)
    assert compare(config, tmp_path / "short", minutes=1e-6, report=False) == {}
    assert "0 of 4 models are finished; the same command with --resume goes on" in capsys.readouterr().out
    shutil.copytree(first, tmp_path / "whole")
    (tmp_path / "whole" / "report.html").unlink()
    monkeypatch.setattr("diff_transformer.report.page.require_installed", lambda: pytest.fail("asked for the extra"))
    assert compare(config, tmp_path / "whole", resume=True, report=False) == {}
    said = capsys.readouterr().out
    assert "0 runs: 0 tokens of training\n" in said  # what is finished is not announced again
    assert "diff-transformer report " in said
    assert not (tmp_path / "whole" / "report.html").exists()
    monkeypatch.undo()
    assert "<h1>DIFF against" in write_report([tmp_path / "whole"], tmp_path / "page.html").read_text()
    (tmp_path / "whole" / "members" / "softmax-seed0" / FILE).unlink()
    verdicts = compare(config, tmp_path / "whole", resume=True, minutes=1e-6)
    assert "recall" in verdicts  # the small models are finished
    assert "loss" not in verdicts


@pytest.fixture
def trained_by(monkeypatch):
    """The folders that a comparison would train; training stops there."""
    handed = []

    def instead(runs, **options):
        handed.append({spec.name: spec.config.train for spec in runs.values()})
        raise KeyboardInterrupt

    monkeypatch.setattr("diff_transformer.lab.compare.run_pool", instead)
    return handed


def test_a_resumed_comparison_may_have_more_seeds_and_other_cores(assignments, trained_by, tmp_path, monkeypatch):
    config = override(recipe("debug"), [*assignments, "train.threads=0"])
    for cores, options in ((8, {"jobs": 2}), (2, {"seeds": 3, "resume": True})):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        with pytest.raises(KeyboardInterrupt):
            compare(config, tmp_path / "out", **options)
    assert list(trained_by[1]) == [f"{side}-seed{k}" for k in range(3) for side in ("diff", "softmax")]
    threads = [{settings.threads for settings in members.values()} for members in trained_by]
    assert threads == [{4}, {1}]


def test_strange_folders_are_left_alone(assignments, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not empty and holds no comparison"):
        compare(override(recipe("debug"), assignments), tmp_path)


def test_what_cannot_be_compared_is_refused_before_anything_is_written(assignments, tmp_path, monkeypatch):
    config, out = override(recipe("debug"), assignments), tmp_path / "out"
    with pytest.raises(ValueError, match=r"model.rope_parameters is .*; it lacks 'factor'"):
        compare(override(config, ['model.rope_parameters={"rope_type": "linear"}']), out)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vl_convert" else found(name))
    with pytest.raises(UserError, match="a report needs vl_convert; install with"):
        compare(config, out)
    assert not out.exists()


def test_an_experiment_with_too_little_held_out_text_is_refused_before_anything_trains(assignments, tmp_path):
    more = 'evaluation.more={"quantization": {"rows": 100000}}'
    wanted = r"evaluation.more.quantization: the held-out text .*--set evaluation.more.quantization.split=all reads"
    with pytest.raises(ValueError, match=wanted):
        compare(override(recipe("debug"), [*assignments, more]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("extra", "options", "message"),
    [
        (["evaluation.needles=[[9,2]]"], {}, "with N=9, R=2; give a length of"),
        (["evaluation.needles=[]"], {}, r"evaluation\.needles is \[\]"),
        (["evaluation.needle_lengths=[30,96]"], {}, "needles, question and answer take up to"),
        (['data.mixture={"text": 1}', "data.length=40", "evaluation.needle_lengths=[128]"], {}, "with N=1, R=1; give"),
        (["evaluation.needle_lengths=[96,4096]"], {}, "has 4096 tokens, more than model.max_position_embeddings 128"),
        ([], {"seeds": 0}, "seeds is 0"),
        ([], {"jobs": -1}, "jobs is -1"),
        (["train.steps=-5"], {}, r"train\.steps is -5"),
    ],
)
def test_what_cannot_work_is_said_before_the_folder_is_made(assignments, extra, options, message, tmp_path):
    (tmp_path / "empty").mkdir()
    for out, dry_run in (("out", True), ("out", False), ("empty", False)):
        with pytest.raises(ValueError, match=message):
            compare(override(recipe("debug"), [*assignments, *extra]), tmp_path / out, dry_run=dry_run, **options)
        assert not (tmp_path / "out").exists()
    assert not [*(tmp_path / "empty").iterdir()]


def test_a_pass_that_does_not_fit_beside_the_other_models_is_no_loss(tmp_path, monkeypatch, capsys):
    def full(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nmore")

    RunSpec("debug", "diff", 0, recipe("debug")).save(tmp_path / "members" / "diff-seed0")
    save_tiny_model(tmp_path / "members" / "diff-seed0" / "run" / "model")
    monkeypatch.setattr("diff_transformer.bench.throughput.measure_throughput", full)
    threads = torch.get_num_threads()
    measure_speed(recipe("debug"), tmp_path, ["diff"], Console())
    assert "CUDA out of memory. Tried to allocate 3 GiB" in " ".join(capsys.readouterr().out.split())
    assert torch.get_num_threads() == threads
    assert not (tmp_path / "throughput.jsonl.gz").exists()


@pytest.mark.slow
def test_an_interrupted_comparison_resumes(assignments, tmp_path):
    sets = [item for assignment in [*assignments, "train.steps=60"] for item in ("--set", assignment)]
    command = [
        sys.executable,
        "-m",
        "diff_transformer",
        "compare",
        "--recipe",
        "debug",
        "--out",
        str(tmp_path / "out"),
        *sets,
    ]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    status = tmp_path / "out" / "members" / "diff-seed0" / "status.json"
    while process.poll() is None and not (status.exists() and json.loads(status.read_text())["step"] >= 10):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in errors
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300, check=True)
    assert "report:" in done.stdout


def test_a_script_names_a_recipe_and_settings(tmp_path):
    with pytest.raises(ValueError, match="no recipe 'demoo'"):
        compare("demoo", tmp_path / "out")
    with pytest.raises(ValueError, match=r"optim\.lrr.*optim\.lr"):
        compare("debug", tmp_path / "out", settings={"optim.lrr": 1e-3})
    with pytest.raises(ValueError, match="steps"):
        compare("debug", tmp_path / "out", settings={"train.steps": -1})
    with pytest.raises(UserError, match="no_such_folder"):
        compare("debug", tmp_path / "out", settings={"data.corpus": tmp_path / "no_such_folder"})
    assert not (tmp_path / "out").exists()
