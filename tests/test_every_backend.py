"""Every backend and every variant through the command line: train, generate, evaluate, convert, differentiate."""

import json
from pathlib import Path

import pytest
import torch
from command_line import cli

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.lab.record import load_records
from diff_transformer.model.heads import ATTENTIONS

BACKENDS = ("auto", "reference", "blockwise", "sdpa")  # all that run on a CPU
CASES = [  # without slow: each variant with its best backend, each backend with one variant
    pytest.param(attention, backend, marks=() if backend == "auto" or attention == "diff" else pytest.mark.slow)
    for attention in ATTENTIONS
    for backend in BACKENDS
    if backend != "reference"
]


def run(*arguments) -> str:
    """Standard output of a command that has to succeed."""
    done = cli(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(out: Path, attention: str, backend: str) -> Path:
    """The folder of a model after two steps."""
    settings = ("train.steps=2", "optim.warmup_steps=1", f"model.attention={attention}", f"model.backend={backend}")
    run("train", "--recipe", "debug", *(word for each in settings for word in ("--set", each)), "--out", out)
    return out / "model"


@pytest.fixture(autouse=True)
def memory_as_it_was(monkeypatch):
    monkeypatch.setattr("diff_transformer.memory.keep_freed_memory", lambda: True)


@pytest.fixture(scope="module")
def reference_outcome(tmp_path_factory):
    """Weights, continuation and loss of each variant under backend="reference", made when asked for."""
    outcomes: dict[str, tuple] = {}

    def of(attention: str):
        if attention not in outcomes:
            folder = tmp_path_factory.mktemp(attention)
            outcomes[attention] = measure(train(folder / "run", attention, "reference"), folder)
        return outcomes[attention]

    return of


def measure(model: Path, folder: Path):
    text = run("generate", model, "import ", "--max-new-tokens", 4)
    run("eval", "long_nll", "--quick", "--model", model, "--out", folder / "long_nll")
    (record,) = load_records(folder / "long_nll")
    return DiffTransformerForCausalLM.from_pretrained(model).state_dict(), text, record.metrics


@pytest.mark.parametrize(("attention", "backend"), CASES)
def test_a_backend_trains_generates_and_evaluates(attention, backend, tmp_path, reference_outcome):
    weights, text, metrics = measure(train(tmp_path / "run", attention, backend), tmp_path)
    expected_weights, expected_text, expected_metrics = reference_outcome(attention)
    assert json.loads((tmp_path / "run/model/config.json").read_text())["backend"] == backend
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, atol=2e-4, rtol=1e-3, msg=f"{attention}, {backend}: {name}")
    assert text == expected_text
    assert metrics == pytest.approx(expected_metrics, rel=1e-4)


@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
def test_a_softmax_model_becomes_differential(kind, tmp_path, reference_outcome):
    """The Transformer of the debug recipe, converted, continues a prompt with every backend as before."""
    _, text, _ = reference_outcome("softmax")
    model = train(tmp_path / "run", "softmax", "auto")
    run("convert", model, "--to", kind, "--out", tmp_path / kind)
    for backend in BACKENDS:
        config = json.loads((tmp_path / kind / "config.json").read_text())
        (tmp_path / kind / "config.json").write_text(json.dumps(config | {"backend": backend}))
        assert run("generate", tmp_path / kind, "import ", "--max-new-tokens", 4) == text
