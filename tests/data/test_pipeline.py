"""Preparation as a pipeline of datatrove."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from diff_transformer.data.prepare import PrepareConfig, begin, prepare, unfinished
from diff_transformer.data.tokens import Shards, verify

pytest.importorskip("datatrove", reason="needs pip install 'diff-transformer[prepare]'")
from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor

from diff_transformer.data.pipeline import Read, Write

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "prepare.py"


@pytest.fixture
def rows(tmp_path):
    """Settings of three files of rows of 100 bytes or so, for two tasks."""
    (tmp_path / "in").mkdir()
    for f in range(3):
        texts = [f"row {f} {i}: " + f"word{i} " * (12 + i % 3) for i in range(30)]
        (tmp_path / "in" / f"{f}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return PrepareConfig((str(tmp_path / "in"),), tokenizer="bytes", validation=0.2, tasks=2)


def content(folder):
    """Every file with its bytes, without the bookkeeping."""
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(("logs/", "dedup/"))}


def test_a_pipeline_gives_the_bytes_of_one_process_and_resumes(rows, tmp_path):
    prepare(rows, tmp_path / "here")
    out = tmp_path / "out"
    begin(rows, out)

    def run():
        read = Read(out)
        LocalPipelineExecutor([read, Write(read)], tasks=2, logging_dir=str(out / "logs")).run()

    run()
    assert content(out) == content(tmp_path / "here")
    kept = (out / "shards" / "train-00000.tokens").stat().st_mtime_ns
    (out / "shards" / "train-00001.tokens").unlink()
    assert unfinished(out) == [1]
    (out / "logs" / "completions" / "00001").unlink()
    run()
    assert content(out) == content(tmp_path / "here")
    assert (out / "shards" / "train-00000.tokens").stat().st_mtime_ns == kept


def test_slurm_gets_an_array_of_the_tasks(rows, tmp_path, monkeypatch):
    """With a command that stands for Slurm's sbatch."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/bash\necho Job 7\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    out = tmp_path / "out"
    tasks = begin(rows, out)["settings"]["tasks"]
    read = Read(out)
    SlurmPipelineExecutor(
        [read, Write(read)], tasks=tasks, time="01:00:00", partition="cpu", qos=None, logging_dir=str(out / "logs")
    ).run()
    assert "#SBATCH --array=0-1" in (out / "logs" / "launch_script.slurm").read_text()


def prose(rng, lines):
    """Lines of 16 words or so, which the filters keep."""
    words = ["".join(rng.choice(list("aeioubdlmnrst"), 6)) for _ in range(500)]
    return [" ".join(["The", *rng.choice(words, 9), "and", *rng.choice(words, 4), "with it."]) for _ in range(lines)]


@pytest.mark.slow
def test_the_example_drops_bad_and_repeated_documents_and_continues_after_a_kill(tmp_path, monkeypatch):
    pytest.importorskip("spacy", reason="needs pip install 'diff-transformer[prepare]'")
    lines = prose(np.random.default_rng(0), 400)
    good = ["\n".join(lines[n : n + 20]) for n in range(0, 400, 20)]
    bad = ["short.", "buy now " * 300, "\n".join("- item" for _ in range(90))]
    again = [good[0], good[1] + " One word.", "The " + good[15]]
    for f, texts in enumerate([good[:12], good[12:] + bad + again]):
        (tmp_path / f"{f}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out, sources = tmp_path / "out", [str(tmp_path / f"{f}.jsonl") for f in range(2)]
    arguments = [str(EXAMPLE), str(out), *sources, "--tokenizer", "bytes", "--validation", "0.2", "--workers", "2"]
    running = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.DEVNULL, start_new_session=True)
    while not (out / "logs" / "signatures" / "completions").is_dir() and running.poll() is None:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert verify(out) == []
    kept = []
    for side in ("train", "validation"):
        tokens = Shards(out, side)
        starts = [0, *(np.flatnonzero(tokens[:] == 256) + 1)]
        kept += [bytes(tokens[a : b - 1].tolist()).decode() for a, b in pairwise(starts)]
    assert len(kept) == len(good)
    assert {text.split("\n")[5] for text in kept} == {text.split("\n")[5] for text in good}
