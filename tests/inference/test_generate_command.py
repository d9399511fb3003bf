"""``diff-transformer generate``: what it prints, and that what is wrong is said in words."""

from functools import partial

import pytest
from tiny_models import save_tiny_model
from typer.testing import CliRunner

from diff_transformer.cli import app

FIELDS = {"embedding_initializer_range": 1.0, "tie_word_embeddings": False}


@pytest.fixture
def run():
    return partial(CliRunner().invoke, app, catch_exceptions=False)


def test_every_way_prints_the_same_text(run, tmp_path):
    model = str(save_tiny_model(tmp_path / "model", **FIELDS))
    plain = run(["generate", model, "hello", "--max-new-tokens", "12"])
    assert plain.exit_code == 0
    assert plain.stdout.startswith("hello")
    common = ["--max-new-tokens", "12"]
    assert run(["generate", model, "-", *common], input="hello\n").stdout == plain.stdout
    drawn = ["generate", model, "hello", "--temperature", "3", "--top-p", "0.95", *common]
    assert run([*drawn, "--seed", "1"]).stdout == run([*drawn, "--seed", "1"]).stdout != plain.stdout


def test_a_preset_says_that_it_is_untrained(run):
    out = run(["generate", "debug", "hello", "--max-new-tokens", "3"])
    assert out.exit_code == 0
    assert "debug is a preset: an untrained model" in out.stderr
    assert out.stdout.startswith("hello")
