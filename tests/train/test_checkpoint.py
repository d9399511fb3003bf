"""Checkpoints: exact, written whole or not at all, and the one before where the newest is damaged."""

import logging
import os
import resource
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.errors import UserError
from diff_transformer.model.presets import preset
from diff_transformer.train import checkpoint
from diff_transformer.train.checkpoint import Checkpoints, checkpoints, latest_checkpoint

IDS = torch.arange(48).view(2, 24) % 31


def trainer(**fields):
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug", vocab_size=64, **fields))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def step(model, optimizer):
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    moments = {f"{i}.{k}": v for i, values in optimizer.state_dict()["state"].items() for k, v in values.items()}
    return {name: value.clone() for name, value in (model.state_dict() | moments).items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def saved(folder, count=3, **options):
    """``count`` checkpoints, and the state of each."""
    model, optimizer = trainer()
    store, states = Checkpoints(folder, **options), []
    for done in range(1, count + 1):
        step(model, optimizer)
        store.save(done, model, optimizer)
        store.wait()
        states.append(state_of(model, optimizer))
    return states


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_state_is_loaded_exactly(tmp_path, background, tied):
    model, optimizer = trainer(tie_word_embeddings=tied)
    store = Checkpoints(tmp_path, background=background)
    assert store.load(model, optimizer) == 0
    step(model, optimizer)
    store.save(1, model, optimizer)
    expected = state_of(model, optimizer)
    step(model, optimizer)  # while the background writes what was
    store.wait()
    fresh = trainer(tie_word_embeddings=tied)
    assert Checkpoints(tmp_path).load(*fresh) == 1
    assert same(state_of(*fresh), expected)
    step(*fresh)
    assert same(state_of(*fresh), state_of(model, optimizer))
    (file,) = latest_checkpoint(tmp_path).glob("*.safetensors")
    assert {path.name for path in latest_checkpoint(tmp_path).iterdir()} == {file.name, "checkpoint.json"}
    assert all(isinstance(value, torch.Tensor) for value in load_file(file).values())


def test_the_newest_stay(tmp_path):
    saved(tmp_path, 5, keep=2)
    assert [int(path.name[5:]) for path in checkpoints(tmp_path)] == [4, 5]


def cut(folder):
    file = next(folder.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 10)


DAMAGES = {
    "file gone": lambda folder: next(folder.glob("*.safetensors")).unlink(),
    "file cut": cut,
    "note gone": lambda folder: (folder / "checkpoint.json").unlink(),
    "note cut": lambda folder: (folder / "checkpoint.json").write_text('{"torch": 3'),
    "note other": lambda folder: (folder / "checkpoint.json").write_text("[1]"),
    "header": lambda folder: next(folder.glob("*.safetensors")).open("r+b").write(b"\xff" * 8),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog, kind):
    states = saved(tmp_path)
    DAMAGES[kind](latest_checkpoint(tmp_path))
    model, optimizer = trainer()
    store = Checkpoints(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert store.load(model, optimizer) == 2
    assert same(state_of(model, optimizer), states[1])
    assert "step-00000003 is damaged (" in caplog.text
    assert "Traceback" not in caplog.text
    step(model, optimizer)
    store.save(3, model, optimizer)
    assert store.load(*trainer()) == 3
    for folder in checkpoints(tmp_path):
        shutil.rmtree(folder) if folder.name == "step-00000001" else DAMAGES[kind](folder)
    with pytest.raises(UserError, match=r"all checkpoints in .* are damaged; restore one"):
        store.load(model, optimizer)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_is_intact(tmp_path, background):
    model, optimizer = trainer()
    store = Checkpoints(tmp_path, background=background)
    step(model, optimizer)
    store.save(1, model, optimizer)
    store.wait()
    expected, size = state_of(model, optimizer), sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
        step(model, optimizer)
        message = r"checkpoint of step 2 could not be written: .*step-00000001 is intact\. Once"
        with pytest.raises(UserError, match=message):  # noqa: PT012  (in the background, by the second)
            store.save(2, model, optimizer)
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    fresh = trainer()
    assert store.load(*fresh) == 1
    assert same(state_of(*fresh), expected)
    store.save(2, model, optimizer)
    store.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()].count("step-00000002") == 1
    assert not [*(tmp_path / "checkpoints").glob("*.tmp")]


def test_a_bug_while_writing_is_no_message(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        Checkpoints(tmp_path).save(1, *trainer())
