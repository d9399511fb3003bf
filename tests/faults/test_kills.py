"""kill -9 at random moments: what is resumed ends as an unbroken run, byte for byte."""

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
from killed_runs import (
    FORK,
    assert_same_run,
    history,
    in_child,
    killed_and_resumed,
    pace,
    start_command,
)

from diff_transformer.lab import worker
from diff_transformer.lab.compare import compare
from diff_transformer.lab.pool import LOG, LocalProcesses
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import load_run
from diff_transformer.lab.results import read_comparison
from diff_transformer.lab.rows import FILE
from diff_transformer.lab.stages import SWEPT, Stage
from diff_transformer.lab.study import run_study
from diff_transformer.report.page import judged
from diff_transformer.train.config import override
from diff_transformer.train.training_data import load_training_data

pytestmark = pytest.mark.faults
KILLS = 24
PART = "kill -9 at random moments, then `--resume`"
EQUAL = "equal to an unbroken run byte for byte"
LEARNT = ["train.steps=12", "train.checkpoint_every=2", "train.log_every=1", "train.validate_every=4"]


@pytest.mark.parametrize("background", [False, True])
def test_train(texts, tmp_path, reliability, background):
    settings = [
        f"data.corpus={texts}", "data.max_bytes=null", "data.length=32", 'data.mixture={"text": 0.5, "recall": 0.5}',
        "data.recall.symbols=8", "train.steps=150", "train.batch_size=4", "train.log_every=1", "train.validate_every=8",
        "train.validation_rows=4", "train.checkpoint_every=1", f"train.checkpoint_async={str(background).lower()}",
    ]  # fmt: skip
    config = override(recipe("debug"), settings)
    training_data = load_training_data(config)
    a_step = pace(config, tmp_path / "whole", training_data)
    hit = killed_and_resumed(config, tmp_path / "run", training_data, KILLS, a_step, seed=2)
    assert hit["while one was written"] > 0
    assert hit["before the first step of a life"] > 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    reliability(PART, "`train`, checkpoints in the background" if background else "`train`", {EQUAL: hit["kills"]})


def test_prepare(tmp_path, reliability):
    """Forty files, a task each; a life ends after 0 to 3 more tasks and a random part of the next."""
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"{number}.txt").write_text(f"words of text {number} " * 20_000)
    command = ["prepare", str(tmp_path / "in"), "--tokenizer", "bytes", "--resume", "--out"]
    draw, out, said = random.Random(7), tmp_path / "out", tmp_path / "said"
    whole = start_command([*command, str(tmp_path / "whole")], said)
    whole.join(300)
    assert whole.exitcode == 0, said.read_text()
    kills = 0
    while kills < KILLS:
        before, few = len([*out.glob("shards/*.json")]), draw.randint(0, 3)
        process = start_command([*command, str(out)], said)
        while len([*out.glob("shards/*.json")]) <= before + few and process.is_alive():
            time.sleep(0.0005)
        time.sleep(draw.random() * 0.02)
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:  # it was finished: begin anew
            assert content(out) == content(tmp_path / "whole")
            shutil.rmtree(out)
        kills += process.exitcode == -signal.SIGKILL
    process = start_command([*command, str(out)], said)
    process.join(300)
    assert process.exitcode == 0, said.read_text()
    assert content(out) == content(tmp_path / "whole")
    reliability(PART, "`prepare` of a folder", {EQUAL: KILLS})


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_compare(forked_workers, texts, tmp_path, reliability):
    config = override(recipe("debug"), [f"data.corpus={texts}", "data.max_bytes=null", *LEARNT])

    def assert_same(out: Path, other: Path):
        for side in ("diff", "softmax"):
            assert_same_record(*(one / "members" / f"{side}-seed0" for one in (out, other)))
        verdicts = [judged(read_comparison(place))[1] for place in (out, other)]
        claims = [{id: of for id, of in each.items() if id != "throughput"} for each in verdicts]
        assert str(claims[0]) == str(claims[1])

    killed = killed_lives(lambda out: compare(config, out, jobs=2, resume=True), assert_same, tmp_path, seed=5)
    reliability(PART, "`compare`", killed)


def test_study(forked_workers, texts, tmp_path, reliability):
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "evaluation.more={}", *LEARNT]
    tiny, sides = override(recipe("debug"), settings), {side: {"attention": side} for side in ("diff", "softmax")}
    sweep = Stage(
        {"": tiny}, sides, (0,), (1e-3, 1e-2), "sweep/lr{rate:g}", (), lambda record: record.metrics["validation_loss"]
    )
    stages = [sweep, Stage({"main": tiny}, sides, (0,), SWEPT)]

    def assert_same(out: Path, other: Path):
        records = sorted(record.parent.relative_to(other) for record in other.rglob(FILE))
        assert len(records) == 6
        for record in records:
            assert_same_record(out / record, other / record)

    killed = killed_lives(lambda out: run_study(stages, out, jobs=2), assert_same, tmp_path, seed=6)
    reliability(PART, "`study`", killed)


def killed_lives(action, assert_same, folder: Path, seed: int) -> dict[str, int]:
    """Kill ``action(out)``, a driver of several runs, one of its workers, or all of them, and go on; count the kills.

    A life ends at a random moment of half the time that an unbroken run takes. What is finished is compared with that
    run, and another one begins.
    """
    whole, born = folder / "whole", time.monotonic()
    assert ended(in_child(lambda: action(whole))) == 0
    longest = (time.monotonic() - born) / 2
    draw, kills, number = random.Random(seed), Counter(), 0
    while kills.total() < KILLS:
        out = folder / f"out{number}"
        process = in_child(lambda out=out: action(out))
        process.join(draw.random() * longest)
        if process.exitcode is None:
            workers = [pid for pid in children(process.pid) if alive(pid)]
            whom = draw.choice(["the driver", "a worker", "the driver and its workers"] if workers else ["the driver"])
            killed = {"the driver": [], "a worker": workers[:1]}.get(whom, workers)
            for pid in [*killed, *([] if whom == "a worker" else [process.pid])]:
                os.kill(pid, signal.SIGKILL)
            if ended(process) == 0:  # the worker had ended; one whose worker was killed stops the others
                assert whom == "a worker"
                assert_same(out, whole)
                number += 1
                continue
            kills[f"{EQUAL}; {whom} killed"] += 1
            end = time.monotonic() + 30
            while any(map(alive, workers)):
                assert time.monotonic() < end, "a worker outlived its driver"
                time.sleep(0.01)
        else:
            assert process.exitcode == 0
            assert_same(out, whole)
            number += 1
    out = folder / f"out{number}"
    assert ended(in_child(lambda: action(out))) == 0
    assert_same(out, whole)
    return kills


class ForkedWorker:
    """A worker that is forked, with everything imported, instead of started; the rest is as in ``LocalProcesses``."""

    pipes: ClassVar[list[int]] = []  # the ends that the driver holds

    def __init__(self, folder: Path):
        here, there = os.pipe()
        self.pipes.append(there)

        def work():
            for pipe in self.pipes:
                os.close(pipe)
            os.dup2(here, 0)
            for number in (1, 2):
                os.dup2(os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            sys.argv = ["worker", str(folder), worker.ENDS_WITH_INPUT]
            sys.exit(worker.main())

        self.process = FORK.Process(target=work)
        self.process.start()
        os.close(here)

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int):
        os.kill(self.process.pid, number)

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode


@pytest.fixture
def forked_workers(monkeypatch):
    monkeypatch.setattr(LocalProcesses, "start", lambda self, folder: ForkedWorker(folder))
    monkeypatch.setattr("diff_transformer.lab.pool._POLL_SECONDS", 0.02)


def ended(process) -> int | None:
    process.join(300)
    return process.exitcode


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def assert_same_record(folder: Path, other: Path):
    """Weights, logged numbers, measurements with all their rows, and curves but for those of time."""
    one, two = (load_run(place) for place in (folder, other))
    weights = [(place / "run/model/model.safetensors").read_bytes() for place in (folder, other)]
    assert weights[0] == weights[1]
    assert history(folder / "run") == history(other / "run")
    assert one.rows.experiments == two.rows.experiments
    for name in one.rows.experiments:
        first, second = (record.rows[name].drop(columns="tokens_per_second", errors="ignore") for record in (one, two))
        assert first.to_json() == second.to_json(), name
    assert one.config == two.config
