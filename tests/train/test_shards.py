"""Checkpoints in parts, by torch.distributed.checkpoint: hashed and read back by the process that wrote them."""

import logging
import pickle
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import _save_checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diff_transformer.durable import DiskError
from diff_transformer.train import shards
from diff_transformer.train.checkpoint import (
    CheckpointError,
    Saver,
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
    read_manifest,
    write_manifest,
)
from diff_transformer.train.state import TrainingState


@pytest.fixture(scope="module")
def fabric():
    """One process of a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Fabric(accelerator="cpu", devices=1)
    dist.destroy_process_group()


class Pair(nn.Module):
    """Tied weights, and a vector."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def training(sharded: bool = True, steps: int = 2) -> TrainingState:
    """A model after some steps of AdamW."""
    torch.manual_seed(steps)
    model = Pair()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for _ in range(steps):
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainingState(model, optimizer, sharded_files=True)


def saver(fabric, folder: Path, background: bool = True) -> Saver:
    return Saver(fabric, folder, background=background)


def save(writer: Saver, state: TrainingState, step: int, **options):
    writer.save(step, state.to_save(step), **options)
    writer.wait()


def whole(state: TrainingState) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer, copied."""
    parts = TrainingState(state.model, state.optimizer).to_save(0)
    moments = {f"{name} {key}": t for name, of in parts["optimizer"]["state"].items() for key, t in of.items()}
    return {name: tensor.clone() for name, tensor in {**parts["model"], **moments}.items()}


def assert_same(one: TrainingState, other: dict[str, torch.Tensor]):
    tensors = whole(one)
    assert list(tensors) == list(other)
    assert len(tensors) > 6
    assert all(torch.equal(tensors[name], other[name]) for name in tensors)


def load(fabric, folder: Path, sharded: bool = True) -> tuple[TrainingState, int]:
    state = training(sharded, steps=0)
    loaded = state.to_load()
    load_checkpoint(fabric, folder, loaded)
    return state, state.take(loaded, seed=0)


@pytest.mark.parametrize("background", [False, True])
def test_parts_load_under_any_strategy(fabric, tmp_path, background):
    """Into a sharded model and into one that is not; random draws go on."""
    state, writer = training(), saver(fabric, tmp_path, background)
    save(writer, state, 3, validation_loss=1.5)
    drawn, expected = torch.rand(3), whole(state)
    manifest = read_manifest(latest_checkpoint(tmp_path))
    assert (manifest["step"], manifest["validation_loss"]) == (3, 1.5)
    assert list(manifest["files"]) == [f"state.ckpt/{name}" for name in (".metadata", "__0_0.distcp", "meta.pt")]
    for sharded in (True, False):
        again, step = load(fabric, tmp_path, sharded)
        assert step == 3
        assert torch.equal(torch.rand(3), drawn)
        assert_same(again, expected)
    writer.close()


def test_parts_that_fabric_wrote_still_load(fabric, tmp_path):
    state, folder = training(), checkpoint_path(tmp_path, 3)
    saved = {"model": state.model, "optimizer": state.optimizer, "step": 3, "random": state.to_save(3)["random"]}
    _save_checkpoint(folder / "state.ckpt", saved, full_state_dict=False, rank=0)
    write_manifest(folder, step=3, world_size=1, validation_loss=None)
    for sharded in (True, False):
        again, step = load(fabric, tmp_path, sharded)
        assert step == 3
        assert_same(again, whole(state))


def test_the_background_writes_what_was_not_what_became_of_it(fabric, tmp_path, monkeypatch):
    resume_writing = threading.Event()
    write = shards.ShardWriter.write_data
    monkeypatch.setattr(shards.ShardWriter, "write_data", lambda *a: resume_writing.wait(30) and write(*a))
    state, writer = training(), saver(fabric, tmp_path)
    expected = whole(state)
    writer.save(3, state.to_save(3))
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.zero_()
    assert latest_checkpoint(tmp_path) is None
    resume_writing.set()
    writer.wait()
    assert_same(load(fabric, tmp_path)[0], expected)


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("background", [False, True])
def test_a_part_that_reads_back_damaged_keeps_what_was_there(fabric, tmp_path, monkeypatch, background):
    state, writer = training(), saver(fabric, tmp_path, background)
    save(writer, state, 3)
    read_back = shards.read_back
    monkeypatch.setattr(shards, "read_back", lambda path, checksum: flip(path) or read_back(path, checksum))
    with pytest.raises(DiskError, match=r"distcp was written but reads back damaged; .*step-00000003 is intact"):
        save(writer, state, 4)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    save(writer, state, 4)
    assert load(fabric, tmp_path)[1] == 4


def test_a_disk_that_fills_up_while_a_part_is_written(fabric, tmp_path, monkeypatch):
    state, writer = training(), saver(fabric, tmp_path)
    save(writer, state, 3)

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.HashingFile, "write", full)
    with pytest.raises(DiskError, match=r"the disk or the quota is full \([\d.]+ kB needed, .*step-00000003 is intact"):
        save(writer, state, 4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_damaged_part_is_named_and_the_checkpoint_before_is_used(fabric, tmp_path, caplog):
    state, writer = training(), saver(fabric, tmp_path)
    for step in (3, 4):
        writer.save(step, state.to_save(step))
    writer.wait()
    flip(checkpoint_path(tmp_path, 4) / "state.ckpt" / "__0_0.distcp")
    with caplog.at_level(logging.WARNING):
        assert load(fabric, tmp_path)[1] == 3
    assert "step-00000004 is damaged: the checksum of state.ckpt/__0_0.distcp differs" in caplog.text


class Trap:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", [".metadata", "meta.pt", "__0_0.distcp"])
def test_code_in_a_part_does_not_run(fabric, tmp_path, where):
    state, writer, trap = training(), saver(fabric, tmp_path, background=False), Trap(tmp_path / "sprung")
    saved = state.to_save(3)
    if where == "__0_0.distcp":
        saved["optimizer"]["param_groups"][0]["lr"] = trap
    writer.save(3, saved)
    writer.wait()
    path = latest_checkpoint(tmp_path)
    if where == ".metadata":
        (path / "state.ckpt" / where).write_bytes(pickle.dumps(trap))
    elif where == "meta.pt":
        torch.save(trap, path / "state.ckpt" / where)
    (path / "manifest.json").unlink()
    write_manifest(path, step=3, world_size=1, validation_loss=None)
    with pytest.raises(CheckpointError, match=r"could run code.*or remove .*step-00000003 to continue"):
        load(fabric, tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_state_that_does_not_fit_is_refused_in_words(fabric, tmp_path):
    state, writer = training(), saver(fabric, tmp_path)
    saved = state.to_save(3)
    del saved["model"]["a.bias"]
    writer.save(3, saved)
    writer.wait()
    with pytest.raises(CheckpointError, match=re.escape("state.ckpt cannot be loaded: ") + ".*model.a.bias"):
        load(fabric, tmp_path)
