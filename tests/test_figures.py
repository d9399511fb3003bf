"""The folders of the paper's tables and figures: complete, indexed, and with commands that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[1] / "figures"
FOLDERS = sorted(path.parent for path in FIGURES.glob("*/expected.json"))
FILLED = re.compile(r"<!-- measured -->\n(.+)\n<!-- /measured -->", re.DOTALL)


def test_the_index_names_every_folder():
    index = (FIGURES / "README.md").read_text()
    assert {path.name for path in FIGURES.iterdir() if path.is_dir()} == set(
        re.findall(r"\]\((\w+)/README\.md\)", index)
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_has_its_commands_and_the_paper_s_numbers(folder):
    from diff_transformer.evals.command import EXPERIMENTS

    expected = json.loads((folder / "expected.json").read_text())
    assert {"paper", "source"} <= set(expected)
    text = (folder / "README.md").read_text()
    named = set(re.findall(r"diff-transformer (?:eval|bench) (\w+)", text))
    assert named
    assert named <= {*EXPERIMENTS, "all", "throughput"}
    assert FILLED.search(text) or "<!-- table: throughput -->" in text


def test_what_was_measured_comes_from_the_record():
    """Each README's table is that of ``measured.json``: run ``python figures/fill.py`` after a new record."""
    done = subprocess.run([sys.executable, str(FIGURES / "fill.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
