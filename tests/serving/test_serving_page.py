"""docs/serving.md is true: its code runs, its command has the options that it names, its table is the code's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diff_transformer.model.implementations import IMPLEMENTATIONS

pytest.importorskip("openai", reason="serving is an extra: pip install 'diff-transformer[serving]'")
DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "serving.md").read_text()


def test_the_client_of_the_page_runs(server):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ghijkl\n")


def test_the_options_of_the_page_exist():
    from diff_transformer.cli import app

    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).output
    others = ("diff-transformer convert", " export ", "vllm", "vLLM", "SGLang")
    lines = [line.partition(" -- ")[0] for line in PAGE.splitlines() if not any(name in line for name in others)]
    named = set(re.findall(r"--[a-z][a-z-]*", "\n".join(lines)))
    assert {"--port", "--name", "--host", "--engine", "--continuous-batching", "--requests-at-once"} <= named
    assert [name for name in named if name not in text] == []


def test_the_table_of_docs_inference_names_every_implementation():
    (table,) = re.findall(
        r"\| name \| differential.*?(?:\n\n|\Z)", DOCS.joinpath("inference.md").read_text(), re.DOTALL
    )
    named = set(re.findall(r"`(diff_\w+|eager|sdpa|flex_attention|flash_attention_2)`", table))
    assert named == IMPLEMENTATIONS.keys() - {"flash_attention_3", "flash_attention_4"}


def test_what_does_not_exist_is_a_message(monkeypatch, capsys):
    from diff_transformer import cli

    monkeypatch.setattr(sys, "argv", ["diff-transformer", "serve", "/nowhere/model"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "error: no model at /nowhere/model" in capsys.readouterr().err
