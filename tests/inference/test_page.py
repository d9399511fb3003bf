"""docs/inference.md: its commands and its Python run, in order, in a folder with tiny models."""

import re
import shlex
from pathlib import Path

import pytest
from tiny_models import save_tiny_model
from typer.testing import CliRunner

from diff_transformer.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, layers in (("model", 2), ("small-model", 1)):
        save_tiny_model(tmp_path / name, num_hidden_layers=layers, embedding_initializer_range=1.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_runs(folder):
    pytest.importorskip("peft", reason="the extra `inference` is not installed")
    assert {kind for kind, _ in BLOCKS} == {"sh", "python"}
    for kind, code in BLOCKS:
        if kind == "python":
            exec(compile(code, "docs/inference.md", "exec"), {})
            continue
        for line in code.strip().splitlines():
            given, separator, line = line.rpartition(" | ")
            text = shlex.split(given)[1] + "\n" if separator else None
            done = CliRunner().invoke(app, shlex.split(line)[1:], input=text, catch_exceptions=False)
            assert done.exit_code == 0, line
            assert done.stdout, line
