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
    from diff_transformer.lab.experiments import EXPERIMENTS

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


@pytest.fixture
def figures(monkeypatch):
    """The modules that stand in figures/, which is no package."""
    monkeypatch.syspath_prepend(str(FIGURES))


def cell(loss: float, **metrics) -> dict:
    curve = {"step": [0, 100, 200], "loss": [5.0, loss + 1, loss]}
    model = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100}
    return {
        "validation": curve, "sources": {"needles": [None, 1.0, loss / 4]}, "tokens_per_step": 10, "model": model,
        "metrics": {"associative_recall": {"validation": loss, "ar_hit": loss + 1, "others": loss}, **metrics},
    }  # fmt: skip


def test_a_plot_of_every_kind_is_drawn(figures, tmp_path):
    from folder_plots import draw_ablation, draw_folder, draw_scaling, draw_throughput, ticks_of
    from paper import FOLDERS, TABLE_6, Panel

    from diff_transformer.lab.measures import paired_rows

    numbers = {"softmax": {"shots1": [0.1, 0.2], "shots16": [0.3, 0.2], "chance": [0.06]}, "diff": {"shots16": [0.4]}}
    assert ticks_of(Panel("", r"shots(\d+)", ""), numbers) == {"1": "shots1", "16": "shots16"}
    draw_folder(FOLDERS["figure6_many_shot"].panels, numbers, {}, tmp_path / "folder.svg")
    expected = json.loads((FIGURES / "table2_needle" / "expected.json").read_text())
    draw_folder(FOLDERS["table2_needle"].panels, {}, expected, tmp_path / "paper.svg")
    main = {side: {seed: cell(3.0 + seed / 10) for seed in range(3)} for side in ("softmax", "diff_same_rate")}
    rows = paired_rows({"table6": main}, "table6", "diff_same_rate", TABLE_6)
    assert [row.difference.mean for row in rows] == [0, 0, 0]
    expected = json.loads((FIGURES / "table6_ablation" / "expected.json").read_text())
    draw_ablation({"diff_same_rate": rows}, expected, tmp_path / "ablation.svg")
    from scaling import SIDES, records, scaling_runs

    seeds = {side: records({"novels": main}, "novels", side) for side in SIDES}
    assert [len(of) for of in seeds.values()] == [3, 3]
    draw_scaling(scaling_runs({"novels": main}), seeds, tmp_path / "scaling.svg")
    table_7 = tmp_path / "table7"
    table_7.mkdir()
    (table_7 / "expected.json").write_text((FIGURES / "table7_throughput" / "expected.json").read_text())
    draw_throughput(FIGURES.parent / "benchmarks" / "results" / "throughput_cpu.json", table_7)
    drawn = sorted(path.name for path in tmp_path.rglob("*.svg"))
    assert drawn == ["ablation.svg", "folder.svg", "paper.svg", "plot.svg", "scaling.svg"]
    assert all(path.stat().st_size > 3000 for path in tmp_path.rglob("*.svg"))


def test_the_share_of_parameters_comes_from_sizes_that_differ(figures):
    from scaling import matched

    def sized(loss, width):
        made = cell(loss)
        return {**made, "model": {**made["model"], "hidden_size": width}}

    cells = {
        name: {"softmax": {0: sized(loss, width)}, side: {0: sized(loss - 0.2, width)}}
        for name, side, loss, width in (
            ("narrow", "diff", 5.0, 32),
            ("novels", "diff_same_rate", 4.0, 64),
            ("wide", "diff", 3.5, 128),
        )
    }
    lines, said = matched(cells)
    assert lines.count("\n") == 4
    assert "3 sizes" in said
    share = float(re.search(r"DIFF needs (\d\.\d+)", said)[1])
    assert 0.5 < share < 1
    assert matched({"novels": cells["novels"]}) == []


def test_recorded_cells_can_be_gone_on_with(figures, tmp_path):
    from plots import cells_of

    from diff_transformer.lab.measures import collect

    kept = tmp_path / "novels" / "softmax-seed0" / "result.json"
    kept.parent.mkdir(parents=True)
    recorded = cells_of(FIGURES / "desk")
    kept.write_text(json.dumps(recorded["novels"]["softmax"][1]))
    restore = [sys.executable, str(FIGURES / "desk" / "run.py"), "--restore", str(tmp_path)]
    subprocess.run(restore, check=True, timeout=120)
    restored = collect(tmp_path)
    assert restored["novels"]["softmax"].pop(0) == recorded["novels"]["softmax"][1], "a cell that is there stays"
    recorded["novels"]["softmax"].pop(0)
    assert restored == recorded
