"""README is true: its code runs, its commands and files exist, the figures' tables are those of their records."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_code_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    *sizes, parameters = done.stdout.splitlines()
    assert sizes == ["torch.Size([1, 8, 256, 128])", "torch.Size([2, 100, 512])"]
    diff, softmax = json.loads(parameters)
    assert 1.0 < diff / softmax < 1.01


def test_the_targets_of_make_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets


@pytest.mark.slow
def test_tables_of_the_figures_are_those_of_their_records():
    done = subprocess.run(
        [sys.executable, str(ROOT / "figures" / "make.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_speed_is_that_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speed_tables

    operator = re.findall(r"\d\.\d\d", " ".join(speed_tables.operator_cpu(speed_tables.RESULTS)[2:-1]))
    gpu = next(line for line in speed_tables.operator_gpu(speed_tables.RESULTS) if line.startswith("| 128 "))
    models = {line.split(" | ")[0]: line.split(" | ") for line in speed_tables.models(speed_tables.RESULTS)}
    training, decoding = models["| 3B, bf16"][2], models["| 3B, bf16, compiled"][6]
    rows = README.split("| DIFF / softmax |")[1].splitlines()[2:6]
    shown = [row.split(" | ")[2].removesuffix(" |") for row in rows]
    assert shown[0] == f"{min(operator)} to {max(operator)}"
    assert shown[1] == gpu.split(" | ")[3]
    assert training.startswith(shown[2])
    assert decoding.startswith(shown[3])


def test_words_stay_within_their_budgets():
    pages = {"README.md": [ROOT / "README.md"], "docs": ROOT.glob("docs/*.md"), "figures": ROOT.glob("figures/**/*.md")}
    words = {name: sum(len(page.read_text().split()) for page in some) for name, some in pages.items()}
    assert words["README.md"] <= 700
    assert words["docs"] <= 14_000
    assert words["figures"] <= 12_000
