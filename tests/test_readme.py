"""README is true: its code runs, its commands and files exist, its tables are those of the committed JSON."""

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
    assert len(named) >= 8
    assert all(re.search(rf"\b{command}\b", help_text) for command in named)


def test_linked_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_tables_are_the_committed_numbers():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "readme_tables.py"), "--check"])
    assert done.returncode == 0, "README's tables differ from the JSON: run python benchmarks/readme_tables.py"


def test_plots_are_the_committed_numbers():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "plot.py"), "--check"])
    assert done.returncode == 0, "docs/*.svg differ from the JSON: run python benchmarks/plot.py"
