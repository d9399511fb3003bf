"""The folders of the paper's tables and figures: complete, indexed, and with commands that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diff_transformer.lab.record import Record, load_run
from diff_transformer.report.generated import filled, keep

FIGURES = Path(__file__).parents[1] / "figures"
FOLDERS = sorted(path.parent for path in FIGURES.glob("*/expected.json"))
FILLED = re.compile(r"<!-- measured -->\n(.+)\n<!-- /measured -->", re.DOTALL)


def test_the_index_names_every_folder():
    index = (FIGURES / "README.md").read_text()
    assert {path.name for path in FIGURES.iterdir() if path.is_dir()} == set(
        re.findall(r"\]\((\w+)/README\.md\)", index)
    )


def test_markers_are_filled_emptied_and_missed(tmp_path):
    page = tmp_path / "page.md"
    for inside in ("", "old\n", "two\nlines\n"):
        page.write_text(f"a\n<!-- made -->\n{inside}<!-- /made -->\nb\n")
        assert filled(page, {"made": "new"}) == "a\n<!-- made -->\nnew\n<!-- /made -->\nb\n"
        assert filled(page, {"made": ""}) == "a\n<!-- made -->\n<!-- /made -->\nb\n"
    for name in ("other", "mad"):
        with pytest.raises(ValueError, match=f"0 pairs of lines <!-- {name} -->"):
            filled(page, {name: "new"})
    page.write_text(2 * page.read_text())
    with pytest.raises(ValueError, match="2 pairs"):
        filled(page, {"made": "new"})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_has_its_commands_and_the_paper_s_numbers(folder):
    from diff_transformer.lab.evaluate import EXPERIMENTS

    expected = json.loads((folder / "expected.json").read_text())
    assert {"paper", "source"} <= set(expected)
    text = (folder / "README.md").read_text()
    named = set(re.findall(r"diff-transformer (?:eval|bench) (\w+)", text))
    assert named
    assert named <= {*EXPERIMENTS, "all", "throughput"}
    assert FILLED.search(text) or "<!-- throughput -->" in text


def test_the_paper_s_numbers_are_those_of_the_package():
    """Pages and claims have theirs from ``lab/paper.py``; each folder has what a reader of the paper finds there."""
    from diff_transformer.lab import paper

    def of(folder, key):
        return json.loads((FIGURES / folder / "expected.json").read_text())[key]

    def both(found):
        return {name: (found["Transformer"][name], found["DIFF"][name]) for name in found["DIFF"]}

    assert both(of("table2_needle", "accuracy")) == {f"n{n}_r{r}": two for (n, r), two in paper.NEEDLES.items()}
    for part, sides in paper.ALLOCATION.items():
        assert [*both(of("table3_allocation", part)).values()] == [*zip(*sides, strict=True)]
    for kind, (top, median) in paper.OUTLIERS.items():
        found = both(of("table5_outliers", kind))
        assert (found["top1"], found["median"]) == (top, median)
    assert [*both(of("table4_hallucination", "models")).values()] == [*paper.HALLUCINATION.values()]
    assert [*of("figure6_many_shot", "gain").values()] == [*paper.SHOTS.values()]
    assert both(of("figure7_order", "margin")) == paper.ORDERS
    rows = of("table6_ablation", "rows")
    assert [*zip(rows["transformer"][3:], rows["diff"][3:], strict=True)] == [*paper.LOSSES.values()]
    assert [row[3] for name, row in rows.items() if name not in ("transformer", "diff")] == [*paper.ABLATION.values()]
    speeds = of("table7_throughput", "tokens_per_second").values()
    ours = [[*kinds.values()] for kinds in paper.THROUGHPUT.values()]
    assert [[*zip(found["Transformer"], found["DIFF"], strict=True)] for found in speeds] == [
        [tuple(map(float, two)) for two in kinds] for kinds in ours
    ]


@pytest.fixture
def figures(monkeypatch):
    """The modules that stand in figures/, which is no package."""
    monkeypatch.syspath_prepend(str(FIGURES))


def test_results_of_eval_are_recorded_without_examples(figures, tmp_path, monkeypatch):
    import fill

    from diff_transformer.evals.types import Result

    for label, accuracy in (("diff-seed0", 0.9), ("softmax-seed0", 0.5)):
        result = Result("needle", label, {"n1_r1": accuracy}, [{"score": accuracy}], {"seed": 0, "commit": "abc"})
        result.save(tmp_path / "evals" / "needle" / f"{label}.json")
    (tmp_path / "table2_needle").mkdir()
    monkeypatch.setattr(fill, "FIGURES", tmp_path)
    fill.record(tmp_path / "evals", "a trial", ["table2_needle"])
    kept = json.loads((tmp_path / "table2_needle" / "measured.json").read_text())
    assert [one["model"] for one in kept["results"]] == ["diff-seed0", "softmax-seed0"]
    assert not any("rows" in one for one in kept["results"])
    assert [one["metrics"] for one in kept["results"]] == [{"n1_r1": 0.9}, {"n1_r1": 0.5}]


def cell(loss: float, **metrics) -> Record:
    steps = [0, 100, 200]
    model = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100}
    return Record(
        "novels", "", 0,
        {"model": model, "train": {"batch_size": 1}, "data": {"length": 10}},
        {"associative_recall": {"validation": loss, "ar_hit": loss + 1, "others": loss}, **metrics},
        curves={"validation": {"step": steps, "loss": [5.0, loss + 1, loss]},
                "sources": {"needles": [None, 1.0, loss / 4]}},
    )  # fmt: skip


def test_a_plot_of_every_kind_is_drawn(figures, tmp_path):
    from folder_plots import ablation_chart, folder_chart, scaling_chart, throughput_chart, ticks_of
    from paper import FOLDERS, TABLE_6, Panel
    from scaling import SIDES, records, scaling_runs

    from diff_transformer.lab.measures import paired_rows

    def expected(name):
        return json.loads((FIGURES / name / "expected.json").read_text())

    numbers = {"softmax": {"shots1": [0.1, 0.2], "shots16": [0.3, 0.2], "chance": [0.06]}, "diff": {"shots16": [0.4]}}
    assert ticks_of(Panel("", r"shots(\d+)", ""), numbers) == {"1": "shots1", "16": "shots16"}
    charts = {
        "folder.svg": folder_chart(FOLDERS["figure6_many_shot"].panels, numbers, {}),
        "paper.svg": folder_chart(FOLDERS["table2_needle"].panels, {}, expected("table2_needle")),
    }
    main = {side: {seed: cell(3.0 + seed / 10) for seed in range(3)} for side in ("softmax", "diff_same_rate")}
    rows = paired_rows({"table6": main}, "table6", "diff_same_rate", TABLE_6)
    assert [row.difference.mean for row in rows] == [0, 0, 0]
    charts["ablation.svg"] = ablation_chart({"diff_same_rate": rows}, expected("table6_ablation"))
    seeds = {side: records({"novels": main}, "novels", side) for side in SIDES}
    assert [len(of) for of in seeds.values()] == [3, 3]
    charts["scaling.svg"] = scaling_chart(scaling_runs({"novels": main}), seeds)
    record = FIGURES.parent / "benchmarks" / "results" / "throughput_cpu.json"
    charts["speed.svg"] = throughput_chart(record, expected("table7_throughput"))
    made = {tmp_path / name: chart for name, chart in charts.items()}
    assert keep(made, check=True) == 1
    assert keep(made) == 0
    assert keep(made, check=True) == 0
    assert all(path.stat().st_size > 3000 for path in tmp_path.glob("*.svg"))
    assert len([*tmp_path.glob("*.svg")]) == 5


def test_the_share_of_parameters_comes_from_sizes_that_differ(figures):
    from scaling import matched

    def sized(loss, width):
        made = cell(loss)
        made.config["model"]["hidden_size"] = width
        return made

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


def test_recorded_runs_can_be_gone_on_with(figures, tmp_path):
    from archive import cells_of

    recorded = cells_of(FIGURES / "desk")
    kept = recorded["novels"]["softmax"].pop(0)
    there = recorded["novels"]["softmax"][1]
    there.save(tmp_path / "novels" / "softmax-seed0" / "record.json")
    restore = [sys.executable, str(FIGURES / "desk" / "run.py"), "--restore", str(tmp_path)]
    subprocess.run(restore, check=True, timeout=120)
    assert load_run(tmp_path / "novels" / "softmax-seed0") == there, "a run that is there stays"
    kept.save(tmp_path / "novels" / "softmax-seed0" / "record.json")
    recorded["novels"]["softmax"][0] = kept
    assert cells_of(tmp_path) == recorded


def test_what_is_committed_of_a_run_is_small_and_true(figures):
    from archive import cells_of, committed

    (record, *_) = cells_of(FIGURES / "desk")["novels"]["softmax"].values()
    assert committed(record).final_loss == record.final_loss
    assert committed(committed(record)) == committed(record)
    long = list(range(600))
    full = Record(
        "novels", "diff", 0, {"data": {"corpus": "/home/me/novels"}},
        {"needle": {"n1_r1": 0.123456789, "all_n1_r1": 1.0}, "harness": {"x": 1.0}}, {"needle": [{"score": 1.0}]},
        {"training": {"step": long, "loss": [1.0] * 600},
         "lambda": {"step": long, "layers": [[0.5]] * 600, "init": [0.8]}},
    )  # fmt: skip
    small = committed(full)
    assert small.metrics == {"needle": {"n1_r1": 0.12346}}
    assert (small.rows, small.config) == ({}, {"data": {"corpus": "novels"}})
    assert len(small.curves["training"]["step"]) == len(small.curves["lambda"]["layers"]) == 60
    assert small.curves["lambda"]["init"] == [0.8]


@pytest.mark.parametrize("name", ["table2_needle", "table3_allocation", "table5_outliers", "table6_associative_recall"])
def test_the_control_stands_in_tables_and_plots(name):
    """The Transformer + head norm of the desk study, without a verdict: the claims are DIFF's."""
    text = (FIGURES / name / "README.md").read_text()
    head, _, *rows = text[text.index("| DIFF, its own rate |") - 200 :].split("\n\n")[1].splitlines()
    assert head.endswith("| Transformer + head norm | difference from the Transformer |")
    assert all("(" in row.split("|")[-2] and row.split("|")[-2].strip()[0] in "+-" for row in rows)
    assert "Transformer + head norm" in (FIGURES / name / "plot.svg").read_text()
