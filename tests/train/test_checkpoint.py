"""Checkpoints on their own: whole or absent at every moment, verified, few, and never the last good one lost."""

import errno
import json
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from diff_transformer import durable
from diff_transformer.durable import DiskError
from diff_transformer.train import checkpoint
from diff_transformer.train.checkpoint import (
    CheckpointError,
    Saver,
    best_checkpoint,
    checkpoint_path,
    choose_checkpoint,
    damage,
    latest_checkpoint,
    load_checkpoint,
    read_manifest,
)


@pytest.fixture(scope="module")
def fabric():
    return Fabric(accelerator="cpu", devices=1)


def state_of(value: float, size: int = 64) -> dict:
    model = nn.Linear(size, size, bias=False)
    nn.init.constant_(model.weight, value)
    return {"model": model, "step": int(value), "random": {"torch": torch.get_rng_state()}}


def save(fabric, folder, step, size=64, validation_loss=None, **options):
    Saver(fabric, folder, **options).save(step, state_of(step, size), validation_loss)
    return checkpoint_path(folder, step)


def loaded(fabric, folder, size=64) -> int | None:
    """The step that a resumed run would start from, from its weights; None without a checkpoint."""
    state = state_of(-1, size)
    load_checkpoint(fabric, folder, state)
    value = state["model"].weight.unique().tolist()
    assert value == [state["step"]]
    return None if value == [-1] else int(value[0])


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def test_what_is_saved_is_loaded(fabric, tmp_path):
    assert loaded(fabric, tmp_path) is None
    path = save(fabric, tmp_path, 3, validation_loss=1.5)
    assert loaded(fabric, tmp_path) == 3
    assert path == latest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 3)
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["world_size"], manifest["validation_loss"]) == (3, 1, 1.5)
    assert manifest["files"]["state.ckpt"]["bytes"] == (path / "state.ckpt").stat().st_size
    assert torch.load(path / "state.ckpt", weights_only=True)["step"] == 3


def test_a_loss_that_is_not_finite_is_not_the_best(fabric, tmp_path):
    for step, loss in enumerate([float("nan"), 1.0, 0.5], 1):
        save(fabric, tmp_path, step, keep=1, validation_loss=loss)
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 3)


def test_the_last_k_and_the_best_are_kept(fabric, tmp_path):
    for step, loss in enumerate([5.0, 2.0, 3.0, None, 4.0, 2.0], 1):
        save(fabric, tmp_path, step, keep=2, validation_loss=loss)
    assert steps(tmp_path) == [2, 5, 6]
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)
    pointer = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert pointer == {"checkpoint": "step-00000002", "step": 2, "validation_loss": 2.0}
    save(fabric, tmp_path, 7, keep=1, validation_loss=1.0)
    assert steps(tmp_path) == [7]
    save(fabric, tmp_path, 8, keep=1, keep_best=False)
    assert steps(tmp_path) == [8]


def truncate(path):
    os.truncate(path / "state.ckpt", (path / "state.ckpt").stat().st_size // 2)


def flip(path, name="state.ckpt"):
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)


def forged(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 3', '"step": 9'))


DAMAGES = {
    "truncated": (truncate, r"state\.ckpt has [\d,]+ bytes instead of [\d,]+"),
    "flipped": (flip, r"the checksum of state\.ckpt differs"),
    "lost": (lambda path: (path / "state.ckpt").unlink(), r"state\.ckpt is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest\.json is missing"),
    "empty manifest": (lambda path: (path / "manifest.json").write_text(""), r"manifest\.json is damaged"),
    "forged manifest": (forged, r"manifest\.json is damaged \(its checksum differs\)"),
    "empty": (lambda path: [file.unlink() for file in path.iterdir()], r"manifest\.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(fabric, tmp_path, caplog, kind):
    harm, said = DAMAGES[kind]
    for step in (1, 2, 3):
        save(fabric, tmp_path, step, keep=3)
    harm(checkpoint_path(tmp_path, 3))
    with caplog.at_level(logging.WARNING):
        assert loaded(fabric, tmp_path) == 2
    (record,) = caplog.records
    assert record.getMessage().startswith("checkpoint step-00000003 is damaged: ")
    assert record.getMessage().endswith("; step-00000002 is used instead")
    assert re.search(said, record.getMessage())
    assert (tmp_path / "checkpoints" / "step-00000003.damaged").is_dir()
    save(fabric, tmp_path, 3)
    assert loaded(fabric, tmp_path) == 3
    assert not list((tmp_path / "checkpoints").glob("*.damaged"))


def test_when_all_are_damaged_nothing_is_touched(fabric, tmp_path):
    for step in (1, 2):
        flip(save(fabric, tmp_path, step))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be used \(step-00000002 is damaged.*step-00000001"
    ):
        loaded(fabric, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_damaged_best_is_not_the_best(fabric, tmp_path):
    for step, loss in ((1, 1.0), (2, 3.0), (3, 2.0)):
        save(fabric, tmp_path, step, keep=3, validation_loss=loss)
    forged_path = checkpoint_path(tmp_path, 1)
    (forged_path / "manifest.json").write_text("{")
    assert best_checkpoint(tmp_path) == checkpoint_path(tmp_path, 3)


def test_a_write_that_reads_back_damaged_keeps_what_was_there(fabric, tmp_path, monkeypatch):
    """A disk that returns other bytes than were written: no older checkpoint may be deleted."""
    for step in (1, 2):
        save(fabric, tmp_path, step)

    def lying(path, state):
        checksum = written(path, state)
        flip(path.parent, path.name)
        return checksum

    written = checkpoint.write_state
    monkeypatch.setattr(checkpoint, "write_state", lying)
    with pytest.raises(
        DiskError, match=r"step-00000003 was written but reads back damaged: the checksum.*step-00000002 is intact"
    ):
        save(fabric, tmp_path, 3, keep=1)
    monkeypatch.undo()
    assert loaded(fabric, tmp_path) == 2
    assert checkpoint_path(tmp_path, 1).exists()


CALLS = ("replace", "fsync", "open", "unlink", "rmdir", "mkdir")


def die_at(count: int):
    """Let this process be killed at call ``count`` of those that change a disk."""
    left = [count]

    def deadly(call):
        def called(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return called

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    write = checkpoint.write_state

    def torn(path, state):
        left[0] -= 1
        if left[0] == 0:
            path.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, state)

    checkpoint.write_state = torn


def killed_while_saving(folder: Path, count: int, step: int) -> bool:
    """Save in a child that is killed at its ``count``-th change of the disk. Returns whether it was killed."""

    def child():
        torch.set_num_threads(1)
        die_at(count)
        save(None, folder, step, keep=1, validation_loss=1 / step)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_at_any_step_of_the_write_leaves_a_whole_checkpoint(fabric, tmp_path, again):
    """Every change of the disk in turn: keep is 1, so that the old one is removed in the same breath. ``again``: the
    checkpoint is written over one of the same step."""
    step = 1 if again else 2
    save(fabric, tmp_path / "first", 1, keep=1, validation_loss=2.0)
    count, outcomes = 1, []
    while True:
        folder = tmp_path / f"at{count}"
        shutil.copytree(tmp_path / "first", folder)
        killed = killed_while_saving(folder, count, step)
        outcomes.append(loaded(fabric, folder))
        save(fabric, folder, 3, keep=1, validation_loss=3.0)
        assert loaded(fabric, folder) == 3
        left = {path.name for path in (folder / "checkpoints").iterdir()} - {"best.json", "step-00000003"}
        assert left <= {"step-00000002"} | ({"step-00000001"} if outcomes[-1] == 1 else set())
        shutil.rmtree(folder)
        if not killed:
            break
        count += 1
    assert count > 12
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, step}


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 2 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or os.system(f"mount -t tmpfs -o size=2m tmpfs {folder} 2> /dev/null"):
        pytest.skip("a file system of a few MB can be mounted by root alone")
    yield folder
    os.system(f"umount {folder}")


def test_a_full_disk_is_seen_before_the_write(fabric, tiny_disk):
    save(fabric, tiny_disk, 1, size=256)
    with pytest.raises(
        DiskError, match=r"the checkpoint of step 2 needs 4.2 MB in .*checkpoints, where 1.8\d MB are free"
    ) as caught:
        save(fabric, tiny_disk, 2, size=1024)
    assert "step-00000001 is intact. Once this is fixed, continue with --resume" in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert steps(tiny_disk) == [1]
    assert loaded(fabric, tiny_disk, 256) == 1


def test_a_disk_that_fills_up_during_the_write(fabric, tiny_disk, monkeypatch):
    """Another program fills the disk after the check."""
    save(fabric, tiny_disk, 1, size=256)
    monkeypatch.setattr(checkpoint, "require_room", lambda *_: None)
    with pytest.raises(
        DiskError, match=r"the disk or the quota is full \(4.2 MB needed, [\d.]+ .B free\).*step-00000001 is intact"
    ):
        save(fabric, tiny_disk, 2, size=1024)
    assert steps(tiny_disk) == [1]
    assert not list((tiny_disk / "checkpoints").glob("*.partial"))
    assert loaded(fabric, tiny_disk, 256) == 1
    monkeypatch.undo()
    save(fabric, tiny_disk, 2, size=256)
    assert loaded(fabric, tiny_disk, 256) == 2


@pytest.mark.parametrize("background", [False, True])
def test_a_limit_on_the_size_of_files(fabric, tmp_path, background):
    saver = Saver(fabric, tmp_path, background=background)
    saver.save(1, state_of(1, 256))
    saver.wait()

    def save_twice():  # in the background, the next save says what became of the one before
        saver.save(2, state_of(2, 256))
        saver.save(2, state_of(2, 256))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        with pytest.raises(DiskError, match=r"the disk or the quota is full \(267 kB needed.*step-00000001 is intact"):
            save_twice()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        saver.close()
    assert loaded(fabric, tmp_path, 256) == 1
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


def test_the_manifest_too_may_meet_a_full_disk(fabric, tmp_path, monkeypatch):
    save(fabric, tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("diff_transformer.train.manifest.write_whole", full)
    with pytest.raises(DiskError, match=r"the disk or the quota is full.*step-00000001 is intact"):
        save(fabric, tmp_path, 2, keep=1)
    assert steps(tmp_path) == [1]
    assert loaded(fabric, tmp_path) == 1


def test_the_background_writes_what_was_not_what_became_of_it(fabric, tmp_path, monkeypatch):
    """Training changes the weights while the thread writes; tied weights are copied, and written, once."""
    write = checkpoint.write_state

    def slow(path, state):
        resume_writing.wait(30)
        return write(path, state)

    resume_writing = multiprocessing.get_context("spawn").Event()
    monkeypatch.setattr(checkpoint, "write_state", slow)
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    model["b"].weight = model["a"].weight
    nn.init.constant_(model["a"].weight, 5.0)
    saver = Saver(fabric, tmp_path, background=True)
    saver.save(5, {"model": model, "step": 5})
    nn.init.constant_(model["a"].weight, 6.0)
    assert latest_checkpoint(tmp_path) is None
    resume_writing.set()
    saver.wait()
    saved = torch.load(latest_checkpoint(tmp_path) / "state.ckpt", weights_only=True)
    assert saved["model"]["a.weight"].unique().tolist() == [5.0]
    assert saved["model"]["a.weight"].data_ptr() == saved["model"]["b.weight"].data_ptr()
    assert (latest_checkpoint(tmp_path) / "state.ckpt").stat().st_size < 1.5 * 64 * 64 * 4
    saver.close()


def test_from_disk_reads_past_the_cache(fabric, tmp_path, monkeypatch):
    forgotten = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: forgotten.append(arguments[1:]), raising=False)
    path = save(fabric, tmp_path, 1)
    assert forgotten == [(0, 0, os.POSIX_FADV_DONTNEED)]
    assert damage(path) is None


def test_sizes_for_the_eye():
    assert [durable.human_bytes(n) for n in (5, 1200, 3_400_000, 56e9)] == ["5 bytes", "1.2 kB", "3.4 MB", "56 GB"]


def test_no_checkpoint_is_no_damage(tmp_path):
    assert choose_checkpoint(tmp_path) == (None, [])


def test_pickled_code_in_a_state_is_refused_unread(fabric, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = save(fabric, tmp_path, 1)
    torch.save(Trap(), path / "state.ckpt")
    (path / "manifest.json").unlink()
    checkpoint.write_manifest(path, step=1, world_size=1, validation_loss=None)
    with pytest.raises(checkpoint.CheckpointError, match=r"could run code.*or remove .*step-00000001 to continue"):
        loaded(fabric, tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_that_lacks_the_parts_is_refused_in_words(fabric, tmp_path):
    path = save(fabric, tmp_path, 1)
    (path / "state.ckpt").rename(path / "__0_0.distcp")
    (path / "state.ckpt").mkdir()
    (path / "__0_0.distcp").rename(path / "state.ckpt" / "__0_0.distcp")
    (path / "manifest.json").unlink()
    checkpoint.write_manifest(path, step=1, world_size=2, validation_loss=None)
    with pytest.raises(CheckpointError, match=r"state\.ckpt cannot be loaded: .*No such file.*meta\.pt"):
        loaded(fabric, tmp_path)
