"""README is true: its code runs, its commands and files exist, the figures' tables are those of their records."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_code_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[1, 2, 3, ")
    assert 1.0 < float(done.stdout.split()[-1]) < 1.01


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets
    help_text = subprocess.run(
        [sys.executable, "-m", "diff_transformer", "--help"], capture_output=True, text=True
    ).stdout
    named = set(re.findall(r"`diff-transformer (\w+)", README))
    assert len(named) >= 5
    assert all(re.search(rf"\b{command}\b", help_text) for command in named)


def test_linked_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_tables_of_the_figures_are_those_of_their_records():
    done = subprocess.run(
        [sys.executable, str(ROOT / "figures" / "make.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_short():
    assert len(README.splitlines()) <= 120
    assert len(README.split()) < 1300
