"""``diff-transformer generate``: what it prints, and that what is wrong is said in words."""

from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.cli import app
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.model.presets import preset


def save(folder, seed=0, **fields):
    torch.manual_seed(seed)
    config = preset("debug", vocab_size=258, embedding_initializer_range=1.0, tie_word_embeddings=False, **fields)
    DiffTransformerForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    return save(tmp_path_factory.mktemp("assistant"), seed=1, num_hidden_layers=1)


@pytest.fixture
def run():
    return partial(CliRunner().invoke, app, catch_exceptions=False)


def test_every_way_prints_the_same_text(run, model, assistant):
    plain = run(["generate", model, "hello", "--max-new-tokens", "12"])
    assert plain.exit_code == 0
    assert plain.stdout.startswith("hello")
    common = ["--max-new-tokens", "12"]
    assert run(["generate", model, "-", *common], input="hello\n").stdout == plain.stdout
    assert run(["generate", model, "hello", "--assistant", assistant, *common]).stdout == plain.stdout
    drawn = ["generate", model, "hello", "--temperature", "3", "--top-p", "0.95", *common]
    assert run([*drawn, "--seed", "1"]).stdout == run([*drawn, "--seed", "1"]).stdout != plain.stdout


def test_a_preset_says_that_it_is_untrained(run):
    out = run(["generate", "debug", "hello", "--max-new-tokens", "3"])
    assert out.exit_code == 0
    assert "debug is a preset: an untrained model" in out.stderr
    assert out.stdout.startswith("hello")
