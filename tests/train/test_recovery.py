"""Runs that are killed, preempted, starved of disk or fed with what is not finite: nothing that was saved is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from killed_runs import assert_same_run, history, killed_and_resumed, pace, start, start_command, until

from diff_transformer.errors import UserError
from diff_transformer.lab.recipes import recipe
from diff_transformer.train.checkpoint import latest_checkpoint
from diff_transformer.train.config import RunConfig, override
from diff_transformer.train.loop import train
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.run_folder import run_folder
from diff_transformer.train.training_data import load_training_data

MIXTURE = '{"text": 0.5, "needles": 0.25, "recall": 0.25}'


@pytest.fixture(scope="module")
def assignments(texts):
    return [
        f"data.corpus={texts}", "data.max_bytes=null", "data.length=32", 'data.mixture={"text": 0.5, "recall": 0.5}',
        "data.recall.symbols=8", "train.steps=24", "train.batch_size=4", "train.log_every=1", "train.validate_every=8",
        "train.validation_rows=4", "train.checkpoint_every=1", "train.threads=1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def config(assignments):
    return override(recipe("debug"), assignments)


@pytest.fixture(scope="module")
def training_data(config):
    return load_training_data(config)


@pytest.fixture(scope="module")
def whole(config, training_data, tmp_path_factory):
    """The uninterrupted run, and seconds of its steps."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, pace(config, folder, training_data)


@pytest.mark.parametrize("background", [False, True])
def test_a_killed_run_ends_as_if_nothing_had_been(config, training_data, whole, tmp_path, background):
    folder, a_step = whole
    config = override(config, [f"train.checkpoint_async={str(background).lower()}"])
    hit = killed_and_resumed(config, tmp_path / "run", training_data, 3, a_step, seed=1)
    assert hit["kills"] == 3
    assert_same_run(tmp_path / "run", folder)


def test_random_draws_in_training_are_a_function_of_the_step(config, training_data, tmp_path):
    """A model that draws at every step (as dropout would) sees the same draws after a resume."""
    drawn = {}

    def draw(until):
        def progress(step, values):
            drawn.setdefault(step, []).append(torch.rand(()).item())
            if step == until:
                os.kill(os.getpid(), signal.SIGTERM)

        return progress

    train(config, tmp_path / "whole", data=training_data, progress=draw(None))
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "halved", data=training_data, progress=draw(9))
    said = []
    train(config, tmp_path / "halved", data=training_data, progress=draw(None), resume=True, announce=said.append)
    assert said[1] == "continues after step 9 of 24"
    assert all(len(set(values)) == 1 and len(values) == 2 for values in drawn.values())
    assert len({values[0] for values in drawn.values()}) == 24


def command(folder: Path, assignments: list[str], *more: str, name: str = "train") -> list[str]:
    sets = [item for assignment in assignments for item in ("--set", assignment)]
    return [name, "--recipe", "debug", "--out", str(folder), *sets, *more]


def test_sigterm_saves_and_exits_0_and_ctrl_c_130(assignments, whole, tmp_path):
    """A second SIGTERM while the state is saved changes nothing."""
    folder, said = tmp_path / "run", tmp_path / "said"
    for number, code, more in ((signal.SIGTERM, 0, ()), (signal.SIGINT, 130, ("--resume",))):
        seen = len(read_metrics(folder / "metrics.jsonl"))
        process = start_command(command(folder, assignments, *more), said)
        until(lambda seen=seen: len(read_metrics(folder / "metrics.jsonl")) > seen + 1, process.is_alive)
        os.kill(process.pid, number)
        if number == signal.SIGTERM:
            os.kill(process.pid, number)
        process.join(120)
        errors = said.read_text()
        assert process.exitcode == code, errors
        step = int(re.search(r"stopped after step (\d+), state saved in", errors)[1])
        assert "continue with --resume" in " ".join(errors.split())
        assert latest_checkpoint(folder).name == f"step-{step:08d}"
        assert not (folder / "model").exists()
    process = start_command(command(folder, assignments, "--resume"), said)
    process.join(120)
    assert process.exitcode == 0, said.read_text()
    assert_same_run(folder, whole[0])


@pytest.mark.parametrize(("name", "number", "code"), [("train", signal.SIGTERM, 143), ("compare", signal.SIGINT, 130)])
def test_a_signal_while_the_corpus_is_read_claims_nothing(assignments, tmp_path, monkeypatch, name, number, code):
    def reading(config):
        (tmp_path / "reading").touch()
        time.sleep(60)

    monkeypatch.setattr("diff_transformer.train.loop.load_training_data", reading)
    monkeypatch.setattr("diff_transformer.train.training_data.load_training_data", reading)
    process = start_command(command(tmp_path / "run", assignments, name=name), tmp_path / "said")
    until((tmp_path / "reading").exists, process.is_alive)
    time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == code
    assert (tmp_path / "said").read_text().strip().splitlines()[-1] == "stopped before anything was saved"
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_preempted_comparison_exits_0_and_resumes(assignments, tmp_path):
    """The scheduler signals only the parent. Its workers save, and the exit code is 0."""
    out, settings = tmp_path / "out", [*assignments, "data.length=96", "train.steps=60", f"data.mixture={MIXTURE}"]
    program = [sys.executable, "-m", "diff_transformer"]
    process = subprocess.Popen([*program, *command(out, settings, name="compare")], stderr=subprocess.PIPE, text=True)
    metrics = out / "members" / "diff-seed0" / "run" / "metrics.jsonl"
    until(lambda: len(read_metrics(metrics)) > 5, lambda: process.poll() is None)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "--resume" in errors
    assert not (out / "report.html").exists()
    assert latest_checkpoint(metrics.parent) is not None
    again = [*program, *command(out, settings, "--resume", name="compare")]
    done = subprocess.run(again, capture_output=True, text=True, check=True)
    assert "report:" in done.stdout


def test_two_processes_do_not_share_a_folder(config, training_data, tmp_path):
    folder = tmp_path / "run"
    with run_folder(folder, config, resume=False):
        process = start(config, folder, training_data)
        process.join(60)
        assert process.exitcode == 1
    process = start(config, folder, training_data)
    while latest_checkpoint(folder) is None:
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"another process works in .*run; wait for it, stop it, or choose another"):
        train(config, folder, data=training_data, resume=True)
    process.kill()
    process.join()
    with run_folder(folder, config, resume=True):
        pass


def reopened(folder, config, *assignments):
    with run_folder(folder, override(config, assignments), resume=(folder / "config.json").exists()):
        return RunConfig.load(folder / "config.json")


def test_what_only_rounds_or_observes_may_change(config, tmp_path):
    folder = tmp_path / "run"
    reopened(folder, config)
    for assignment in (
        "train.micro_batch_size=2", "train.activation_checkpointing=full", "train.loss_chunk=8", "train.compile=true",
        "train.threads=2", "train.log_every=3", "train.validate_every=5", "evaluation.needles=[[3,1]]",
        'evaluation.more={"long_nll": {}}', "train.checkpoint_keep=5", "train.parallel.strategy=ddp",
    ):  # fmt: skip
        assert reopened(folder, config, assignment) == override(config, [assignment])
    with pytest.raises(ValueError, match=r"train\.seed: 0 against 1"):
        reopened(folder, config, "train.seed=1")
    saved = json.loads((folder / "config.json").read_text())
    del saved["train"]["checkpoint_async"]
    (folder / "config.json").write_text(json.dumps(saved))
    reopened(folder, config)  # a setting that is left out has its default


def test_a_resumed_run_goes_on_in_other_pieces(config, training_data, whole, tmp_path):
    def stop(step, values):
        if step == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", data=training_data, progress=stop)
    other = override(config, ["train.micro_batch_size=2", "train.log_every=5", "evaluation.samples=3"])
    train(other, tmp_path / "run", data=training_data, resume=True)
    ours, uninterrupted = (
        [line["validation_loss"] for line in history(folder) if "validation_loss" in line]
        for folder in (tmp_path / "run", whole[0])
    )
    assert ours == pytest.approx(uninterrupted, rel=1e-4)
    train(config, tmp_path / "run", data=training_data, resume=True)
    assert RunConfig.load(tmp_path / "run" / "config.json") == other  # with which it was finished
