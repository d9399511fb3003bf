"""docs/data.md is true: its commands run in their order, and the files it draws are there."""

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from diff_transformer.cli import app

TEXT = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [shlex.split(line)[1:] for block in BLOCKS for line in block.splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with what the commands read: ``texts``."""
    root = tmp_path_factory.mktemp("home")
    generator = np.random.default_rng(0)
    words = ["river", "mountain", "letter", "window", "garden", "morning", "winter", "silence"]
    (root / "texts").mkdir()
    for i in range(24):
        chosen = generator.choice(words, 300 + 20 * i)
        (root / "texts" / f"{i}.txt").write_text(" ".join(chosen) + ".\n")
    return root


def run(arguments, home, monkeypatch):
    monkeypatch.chdir(home)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (arguments, done.output, done.exception)


def test_commands_run_in_their_order(home, monkeypatch):
    small = ["--set", "train.steps=11", "--set", "train.validation_rows=1"]
    assert [command[0] for command in COMMANDS] == ["prepare", "prepare", "train", "train"]
    for command in COMMANDS:
        run(command + (small if command[0] == "train" else []), home, monkeypatch)
    drawn = re.findall(r"^(prepared/\S+)", TEXT, re.MULTILINE)
    assert len(drawn) == 5
    assert all((home / path).exists() for path in drawn)
    for name in ("run", "recall-alone"):
        assert (home / name / "model" / "config.json").exists()
    (mending,) = re.findall(r"`diff-transformer (prepare --out \S+ --resume)`", TEXT)
    shard = home / "prepared" / "shards" / "train-00000.tokens"
    before = shard.read_bytes()
    os.truncate(shard, 10)
    run(shlex.split(mending), home, monkeypatch)
    assert shard.read_bytes() == before
