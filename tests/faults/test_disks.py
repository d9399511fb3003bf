"""Disks that are full or read-only, files that are cut short or have a bit flipped, and two at work in one folder."""

import os
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from killed_runs import assert_same_run, assert_words
from tiny_models import save_tiny_model

from diff_transformer.train.checkpoint import latest_checkpoint

pytestmark = pytest.mark.faults
DAMAGES = 20  # of each kind
WORDS = "refused in words"


@contextmanager
def tmpfs(folder: Path, size: int):
    """A disk of its own of ``size`` bytes; skips the test where this process may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, options: str):
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@pytest.fixture
def training(texts):
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "train.steps=9", "train.checkpoint_every=3"]
    return ["train", "--recipe", "debug", *(item for one in settings for item in ("--set", one))]


@pytest.fixture
def commands(texts, training, tmp_path):
    """Commands that write to a folder, and how each goes on."""
    model = str(save_tiny_model(tmp_path / "model"))
    rows = ["prepare", str(texts), "--tokenizer", "bytes"]
    return {
        "train": (training, ["--resume"]),
        "prepare": (rows, ["--resume"]),
        "convert": (["convert", model, "--to", "diffllama"], []),
        "compare": (["compare", *training[1:], "--set", "evaluation.more={}"], ["--resume"]),
        "eval": (["eval", "all", "--quick", "--model", model, "--samples", "1", "--length", "64"], ["--resume"]),
    }


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["train", "prepare", "convert", "compare"])
def test_a_full_disk(cli, commands, tmp_path, reliability, name):
    """From a disk on which nothing fits to one on which nearly all does. With room, the command goes on."""
    (command, goes_on), outcomes = commands[name], Counter()
    assert cli(*command, "--out", tmp_path / "whole")[0] == 0
    needed = size(tmp_path / "whole")
    for share in (0.02, 0.1, 0.25, 0.4, 0.6, 0.8):
        with tmpfs(tmp_path / f"disk{share}", int(needed * share)) as disk:
            assert_words(cli(*command, "--out", disk / "out"), "No space left", "the disk or the quota is full", "free")
            remount(disk, f"size={4 * needed}")
            resumed = goes_on if (disk / "out").exists() else []
            code, said = cli(*command, "--out", disk / "out", *resumed)
            assert code == 0, said
            assert_same_files(name, disk / "out", tmp_path / "whole")
            outcomes[f"{WORDS}; complete and equal once there was room"] += 1
    reliability("Full disk (tmpfs)", f"`{name}`", outcomes)


def assert_same_files(name: str, folder: Path, other: Path):
    if name == "train":
        assert_same_run(folder, other)
        return
    pattern = "*.safetensors" if name != "prepare" else "shards/*"
    files = sorted(path.relative_to(other) for path in other.rglob(pattern))
    assert files
    for file in files:
        assert (folder / file).read_bytes() == (other / file).read_bytes(), file


def test_a_read_only_disk(cli, commands, tmp_path, reliability):
    outcomes = Counter()
    with tmpfs(tmp_path / "disk", 1 << 28) as disk:
        for name in ("train", "prepare"):
            assert cli(*commands[name][0], "--out", disk / name)[0] == 0
        remount(disk, "ro")
        for name, (command, _) in commands.items():
            assert_words(cli(*command, "--out", disk / "new" / name), "may not be written to", "Read-only file system")
            outcomes[f"writing {WORDS}"] += 1
        for name in ("train", "prepare"):
            assert_words(cli(*commands[name][0], "--out", disk / name, "--resume"), "may not be", "Read-only file")
            outcomes[f"writing {WORDS}"] += 1
        shards = ["--set", f"data.corpus={disk / 'prepare'}", "--set", 'data.mixture={"text": 1.0}']
        reading = {
            "train": [*commands["train"][0], *shards, "--out", tmp_path / "again"],
            "generate": ["generate", disk / "train" / "model", "the", "--max-new-tokens", "2"],
            "verify": ["prepare", "--verify", disk / "prepare"],
        }
        for command in reading.values():
            code, said = cli(*command)
            assert code == 0, said
            outcomes["reading works"] += 1
    reliability("Read-only disk (tmpfs)", "every command that writes; three that read", outcomes)


def cut_short(path: Path, draw: random.Random):
    os.truncate(path, draw.randrange(path.stat().st_size - 1))  # the last byte of JSON is a line end


def flip_a_bit(path: Path, draw: random.Random, last: int | None = None):
    content = bytearray(path.read_bytes())
    content[draw.randrange(last or len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


DAMAGE = {"cut short": cut_short, "one bit flipped": flip_a_bit}


def test_a_damaged_checkpoint(cli, training, tmp_path, reliability):
    whole, draw, outcomes = tmp_path / "whole", random.Random(0), Counter()
    assert cli(*training, "--out", whole)[0] == 0
    for number in range(DAMAGES):
        run = tmp_path / f"run{number}"
        shutil.copytree(whole, run)
        shutil.rmtree(run / "model")
        last = latest_checkpoint(run)
        cut_short(draw.choice(sorted(last.iterdir())), draw)
        code, said = command(*training, "--out", run, "--resume")
        assert code == 0, said
        assert f"{last.name} is damaged" in said
        assert_same_weights(run / "model", whole / "model")
        outcomes["named; the older one is used, and the model is equal byte for byte"] += 1
        shutil.rmtree(run / "model")
        for path in (run / "checkpoints").glob("step-*/*.safetensors"):
            cut_short(path, draw)
        assert_words(cli(*training, "--out", run, "--resume"), "all checkpoints in")
        outcomes[f"all of them damaged: {WORDS}"] += 1
    reliability("Damaged files", "checkpoint, cut short", outcomes)


def assert_same_weights(folder: Path, other: Path):
    assert (folder / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard(cli, commands, tmp_path, reliability, kind):
    command, draw, outcomes = commands["prepare"][0], random.Random(kind), Counter()
    whole, out = tmp_path / "whole", tmp_path / "out"
    for folder in (whole, out):
        assert cli(*command, "--out", folder)[0] == 0
    shards = sorted(path for path in (out / "shards").iterdir() if path.stat().st_size)
    for _ in range(DAMAGES):
        path = draw.choice(shards)
        DAMAGE[kind](path, draw)
        assert_words(cli("prepare", "--verify", out), path.name)
        code, said = cli(*command, "--out", out, "--resume")
        assert code == 0, said
        assert_same_files("prepare", out, whole)
        outcomes["named by `--verify`, and made again by `--resume`"] += 1
    plan = (out / "plan.json").read_bytes()
    for _ in range(DAMAGES):
        cut_short(out / "plan.json", draw)
        assert_words(cli("prepare", "--verify", out), "")
        (out / "plan.json").write_bytes(plan)
        outcomes[f"plan: {WORDS}"] += 1
    reliability("Damaged files", f"prepared shards, {kind}", outcomes)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_model(cli, tmp_path, reliability, kind):
    """A bit in the numbers themselves is not noticed: safetensors has no checksum."""
    folder, draw, outcomes = save_tiny_model(tmp_path / "model"), random.Random(kind), Counter()
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(DAMAGES):
        for command in (["generate", folder, "a", "--max-new-tokens", "1"], ["convert", folder, "--to", "diffllama"]):
            if kind == "cut short":
                cut_short(weights, draw)
            else:
                flip_a_bit(weights, draw, header)
            more = ["--out", tmp_path / "out"] if command[0] == "convert" else []
            assert_words(cli(*command, *more), "")
            assert not (tmp_path / "out").exists()
            weights.write_bytes(content)
            outcomes[WORDS] += 1
    reliability("Damaged files", f"safetensors, {kind}" + (" in its header" if kind != "cut short" else ""), outcomes)


def command(*arguments) -> tuple[int, str]:
    """Exit code and words of a command in a process that inherits no log of the tests."""
    line = [sys.executable, "-m", "diff_transformer", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr
