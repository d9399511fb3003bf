import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diff_transformer.errors import UserError
from diff_transformer.lab.recipes import recipe
from diff_transformer.train.checkpoint import latest_checkpoint
from diff_transformer.train.config import override
from diff_transformer.train.loop import Diverged, Interrupted, train
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.training_data import without_first_tokens


@pytest.fixture(scope="module")
def config(texts):
    return override(recipe("debug"), [f"data.corpus={texts}", "data.max_bytes=null"])


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("side", ["diff", "softmax"])
def test_training_learns_and_writes_what_it_promises(config, side, tmp_path):
    threads = torch.get_num_threads()
    config = override(config, [f"model.attention={side}", f"train.threads={threads + 1}"])
    seen = []
    trained = train(config, tmp_path / "run", progress=lambda step, values: seen.append(torch.get_num_threads()))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    checked = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert checked[-1] < checked[0] - 0.3
    assert seen == [threads + 1] * 20
    assert torch.get_num_threads() == threads
    assert ("lambda" in lines[-1]) == (side == "diff")
    assert all(line["tokens_per_second"] > 0 and line["grad_norm"] > 0 for line in lines if "loss" in line)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids = torch.tensor([tokenizer("the old fox")["input_ids"]])
    assert torch.equal(loaded(ids).logits, trained.model(ids).logits)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_request_to_stop_in_the_last_step_is_heard_once_the_model_is_saved(config, number, code, tmp_path):
    config = override(config, ["train.steps=2", "optim.warmup_steps=1"])

    def stop(done, values):
        if done == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="run is finished, and was then asked to stop") as stopped:
        train(config, tmp_path / "run", progress=stop)
    assert stopped.value.exit_code == code
    assert train(config, tmp_path / "run", resume=True).model is not None


def test_a_run_does_not_go_on_with_another_text(config, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(config.data.corpus, text)
    config = override(config, [f"data.corpus={text}"])

    def stop(done, values):
        if done == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", progress=stop)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    name = max((path for path in text.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    original = name.read_text()
    name.write_text("Another beginning. " + original)
    with pytest.raises(UserError, match="was trained on other rows than these settings give now: the text, "):
        train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    name.write_text(original)
    train(config, tmp_path / "run", resume=True)


def test_activation_checkpointing_changes_nothing(config, tmp_path):
    train(config, tmp_path / "plain")
    for what in ("full", "selective"):
        train(override(config, [f"train.activation_checkpointing={what}"]), tmp_path / what)
        assert same(weights(tmp_path / what), weights(tmp_path / "plain")), what


def test_what_is_not_finite_raises_and_leaves_the_checkpoint(config, tmp_path):
    config = override(
        config, ["optim.lr=1e30", "optim.warmup_steps=0", "optim.grad_clip=0", "train.checkpoint_every=1"]
    )
    with pytest.raises(Diverged, match=r"step \d+: loss .*, gradient norm .*checkpoint: .*step-.*with a lower optim"):
        train(config, tmp_path / "run")
    assert latest_checkpoint(tmp_path / "run") is not None
    assert not (tmp_path / "run" / "model").exists()


def test_folders_are_never_overwritten(config, tmp_path):
    train(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"holds a run already; resume it \(--resume\) or choose another folder"):
        train(config, tmp_path / "run")
    with pytest.raises(ValueError, match=r"run of another configuration(.|\n)*optim\.lr: 0\.003 against 0\.1"):
        train(override(config, ["optim.lr=0.1"]), tmp_path / "run", resume=True)
    (tmp_path / "run" / "model" / "notes.txt").write_text("mine")
    train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model" / "notes.txt").read_text() == "mine", "a finished run is not written again"
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match=r"is finished, and its checkpoints are gone; use .*model, or train in"):
        train(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model" / "notes.txt").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        train(config, tmp_path / "other", resume=True)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.tokenizer=bytes", None),
        ("data.corpus=/nowhere", "/nowhere"),
        ("model.head_dim=300", "backend='blockwise' is not available: it takes widths up to"),
    ],
)
def test_data_that_does_not_fit(config, assignment, message, tmp_path):
    config = override(config, [assignment, "train.steps=1", "model.backend=blockwise"])
    if message is None:
        config = override(config, ["model.vocab_size=100"])
        message = "have ids up to 256, model.vocab_size is 100; set model.vocab_size to at least 257"
    with pytest.raises(UserError, match=message):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trained_model_is_not_compiled(config, tmp_path, monkeypatch):
    """Each length and batch of an experiment would be compiled again."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    model = train(override(config, ["train.steps=1", "train.compile=true"]), tmp_path / "run").model
    assert len(compiled) == config.model["num_hidden_layers"] + 1  # the layers and the loss
    assert not any("forward" in vars(layer) for layer in model.base_model.layers)


@pytest.mark.slow
def test_compiled_training_gives_the_same_model(texts, config, tmp_path):
    short = override(config, ["train.steps=10"])
    train(short, tmp_path / "plain")
    settings = (f"data.corpus={texts}", "data.max_bytes=null", "train.steps=10", "train.compile=true")
    assignments = [item for setting in settings for item in ("--set", setting)]
    command = [
        sys.executable,
        "-m",
        "diff_transformer",
        "train",
        "--recipe",
        "debug",
        "--out",
        str(tmp_path / "compiled"),
    ]
    subprocess.run([*command, *assignments], check=True, capture_output=True)
    plain, compiled = weights(tmp_path / "plain"), weights(tmp_path / "compiled")
    assert plain.keys() == compiled.keys()
    assert all(torch.allclose(plain[name], compiled[name], atol=2e-3) for name in plain)
    assert "lambda" in read_metrics(tmp_path / "compiled" / "metrics.jsonl")[-1]


def test_first_tokens_of_documents_have_no_label():
    ids = np.array([[5, 9, 6, 7, 9, 8]])
    assert without_first_tokens(ids, ids, eos_id=9).tolist() == [[5, 9, -100, 7, 9, -100]]
    assert ids.tolist() == [[5, 9, 6, 7, 9, 8]]
