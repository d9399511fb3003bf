"""The page of single results: any number of models and experiments, from files or objects."""

import json
import re
from pathlib import Path

import pytest

from diff_transformer.errors import UserError
from diff_transformer.evals.types import Result
from diff_transformer.lab.record import Record, save_all
from diff_transformer.report import ResultsError
from diff_transformer.report.evals_page import render_evals_page, write_evals_report
from diff_transformer.report.load import load_evals

ATTACK = "</script><img src=x onerror=alert(1)>"


def result(name="other", model="tiny", metrics=None, rows=(), **provenance) -> dict:
    return {
        "eval": name, "model": model, "metrics": {"score": 0.5} if metrics is None else metrics, "rows": list(rows),
        "provenance": {"seed": 0, "device": "cpu", "cpu": "Example CPU", "date": "2026-03-01T12:00:00", **provenance},
    }  # fmt: skip


def needle(model: str, score: float, **provenance) -> dict:
    rows = [
        {"needles": 1, "queries": 1, "depth": 0.0, "prompt": f"The number {i} is", "expected": "4", "got": "4.",
         "score": 1.0} for i in range(300)
    ]  # fmt: skip
    metrics = {"n1_r1": score, "n1_r1_depth0": score, "n1_r1_depth100": score, "chance": 0.1}
    return result("needle", model, metrics, rows, **provenance)


def ablation(steps: int) -> dict:
    names = ("transformer", "diff", "diff_no_norm")
    rows = [{"row": n, "seed": s, "validation": 3.0 + i + s / 10} for i, n in enumerate(names) for s in (0, 1)]
    metrics = {f"{n}_validation": 3.05 + i for i, n in enumerate(names)}
    return result("ablation", "demo", metrics, rows, steps=steps)


def scaling(ours=("diff", 0.9), **provenance) -> dict:
    name, share = ours
    metrics, rows = {}, []
    for model, factor in ((name, share), ("softmax", 1.0)):
        law = {"a": 10.0 * factor, "b": 0.5, "c": 1.0, "first": 1e6, "last": 1e9, "b_low": 0.4, "b_high": 0.6}
        metrics |= {f"parameters_{model}_{key}": value for key, value in law.items()}
        for x in (1e6, 1e7, 1e9):
            loss = 1 + factor * 10 * x**-0.5
            rows.append({"fit": "parameters", "model": model, "parameters": x, "tokens": 1e9, "loss": loss})
    ratio = {"": share**2, "_at": 1e7, "_low": share**2 - 0.05, "_high": share**2 + 0.05}
    metrics |= {f"parameters_ratio_from_ours{end}": value for end, value in ratio.items()}
    rows.append({"fit": "parameters", "measured": name, "at": 1e7, "loss": 1.0028, "matched": 1e7, "ratio": share**2})
    return result("scaling", "table", metrics, rows, ours=name, reference="softmax", **provenance)


def gradients(model: str, kinds: str, **provenance) -> dict:
    metrics = {f"model_{k}_layer{i}": 0.01 * (i + 1) for k in kinds.split() for i in range(2)}
    if provenance:
        metrics |= {f"init_{a}_{k}_layer0": 0.02 for a in ("diff", "softmax") for k in "qkvo"}
        metrics |= {f"init_ratio_{k}": 1.5 for k in "qkvo"}
    return result("gradient_flow", model, metrics, **provenance)


EVERYTHING = [
    needle("ours", 0.9, attention="diff"),
    needle("plain", 0.7, attention="softmax"),
    needle("llama", 0.8),
    gradients("ours", "q q1 q2 k k1 k2 v o lambda head_norm", attention="diff"),
    gradients("llama", "q k v o"),
    ablation(4000),
    scaling(),
    result("brand_new", "llama", rows=[{"prompt": "a", "got": "b", "score": 1}]),
]


def sections(page: str) -> list[str]:
    return re.findall(r'<section id="([\w-]+)"', page)


def visible(page: str) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def test_every_experiment_has_a_section_once():
    page = render_evals_page(load_evals(EVERYTHING))
    assert sorted(sections(page)) == sorted(["scaling", "needles", "ablation", "gradients", "eval-brand-new"])
    links = re.findall(r'<li><a href="#([\w-]+)"', page)
    assert links == sections(page)
    assert "5 experiments on ours, plain, llama." in page


def test_each_section_has_its_numbers_examples_and_settings():
    page = render_evals_page(load_evals(EVERYTHING))
    body = page[page.index('<section id="needles"') :]
    body = body[: body.index("</section>")]
    assert re.findall(r"<summary>(.*?)</summary>", body)[-3:] == [
        "Every number", "Examples (120 of 900)", "Settings and machine",
    ]  # fmt: skip
    head = re.search(r'aria-label="Metrics">.*?</thead>', body)[0]
    assert re.findall(r'scope="col">(.*?)<', head) == ["", "ours", "plain", "llama"]
    assert body.count("The number 0 is") >= 3
    assert "The number 299 is" not in body
    assert "Example CPU" in body


@pytest.mark.parametrize("name", ["needle", "brand_new"])
def test_the_note_of_a_result_stands_at_its_figure(name):
    plain, noted = needle("ours", 0.9), needle("llama", 0.9, note="too small")
    page = visible(render_evals_page(load_evals([{**one, "eval": name} for one in (plain, noted)])))
    notes = re.findall(r'<li><span class="who note">Note</span><span class="said">(.*?)</span>', page)
    assert notes[0] == "llama: too small."
    assert page.count("too small.") == 1


def test_examples_come_from_the_whole_run_and_long_text_is_cut():
    rows = [{"prompt": "x" * 5000 + f" end {i}", "got": "y" * 500, "score": i} for i in range(1000)]
    page = render_evals_page(load_evals([result("brand_new", rows=rows)]))
    scores = re.findall(r"end (\d+)<", page)
    assert len(scores) == 120
    assert int(scores[-1]) > 980
    assert "x" * 400 not in page
    assert "y" * 200 not in page


def test_colours_are_the_same_in_every_section():
    page = render_evals_page(load_evals(EVERYTHING))
    keys = dict.fromkeys(re.findall(r'swatch (\w+)" aria-hidden="true"></i>(\w+)<', page))
    assert ("diff", "ours") in keys
    assert {side for side, name in keys if name == "llama"} == {"s1"}


def test_files_folders_and_objects_give_the_same_page(tmp_path):
    folder = tmp_path / "results"
    for i, one in enumerate(EVERYTHING):
        Result(**one).save(folder / "deep" / f"{i}.json")
    (folder / "other.json").write_text('{"a": 1}')
    (folder / "broken.json").write_text("{")
    files = sorted((folder / "deep").glob("*.json"))
    pages = [
        write_evals_report(source, tmp_path / f"{i}.html").read_text()
        for i, source in enumerate([folder, files, [Result(**one) for one in EVERYTHING], EVERYTHING])
    ]
    assert pages[0] == pages[1] == pages[2] == pages[3]
    assert write_evals_report(Result(**EVERYTHING[0]), tmp_path / "one.html").exists()


def test_page_stands_alone():
    page = render_evals_page(load_evals(EVERYTHING))
    assert not re.findall(r"https?://|@import|url\((?!#c)|srcset=|<img|<iframe", page)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', page)) == {"", "data:,"}
    assert "$" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_an_existing_file_is_kept_unless_told(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("mine")
    with pytest.raises(UserError, match="overwrite=True"):
        write_evals_report(EVERYTHING, path)
    assert path.read_text() == "mine"
    assert write_evals_report(EVERYTHING, path, overwrite=True).read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "no result given"),
        ({"schema": 1, "evals": []}, "is the results of a comparison"),
        ({"eval": "needle"}, r'has keys \[.eval.\]; a result has "eval", "model" and "metrics"'),
        (7, "has a int; a result has"),
        ("nowhere.json", "there is no file nowhere.json"),
    ],
)
def test_what_is_no_result_is_said_to_be_none(source, message):
    with pytest.raises(ResultsError, match=message):
        load_evals(source)


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ResultsError, match="holds no result of an experiment"):
        write_evals_report(tmp_path, tmp_path / "page.html")


def test_hostile_text_stays_text():
    def poison(value, key=""):
        if isinstance(value, str):
            return value if key in ("eval", "attention", "date") else ATTACK
        if isinstance(value, list):
            return [poison(v, key) for v in value]
        return {k: poison(v, k) for k, v in value.items()} if isinstance(value, dict) else value

    hostile = [poison(one) for one in EVERYTHING]
    hostile += [result(ATTACK, ATTACK, {ATTACK: 1.0}, [{ATTACK: ATTACK}])]
    page = render_evals_page(load_evals(hostile))
    assert "<img" not in page
    assert page.count("<script") == render_evals_page(load_evals(EVERYTHING)).count("<script")


def test_values_that_are_no_numbers_are_no_numbers_on_the_page():
    broken = [
        {**one, "metrics": {k: (None if i % 2 else v) for i, (k, v) in enumerate(one["metrics"].items())}}
        for one in EVERYTHING
    ]
    broken += [result("empty", "m", {"x": float("nan")}), {**result(), "rows": None, "provenance": None}]
    page = visible(render_evals_page(load_evals(json.loads(json.dumps(broken)))))
    assert not re.search(r"\bnan\b|\bNone\b", page)
    assert "1 result without a finite number is not drawn." in page


def test_a_short_ablation_says_nothing_of_the_models():
    long, short = (visible(render_evals_page(load_evals([ablation(steps)]))) for steps in (4000, 24))
    assert "DIFF 4.050, Transformer 3.050; DIFF higher by 1.000 (the same sign in 2 of 2 seeds)" in long
    assert "24 steps of training: this shows that every row runs" in short
    assert not re.search(r"ahead[\w ]*</span>", short)


def test_made_up_runs_are_called_made_up():
    real, fake = (visible(render_evals_page(load_evals([scaling(**more)]))) for more in ({}, {"synthetic": True}))
    assert "Parameters for the same loss: 81.0 % (95 % CI 76.0 % to 86.0 %), at the run of DIFF with 10 M." in real
    assert "DIFF ahead" in real
    assert "These runs are made up" in fake
    assert "DIFF ahead" not in fake


def test_scaling_of_other_models_has_their_names():
    page = visible(render_evals_page(load_evals([scaling(("mamba", 0.9))])))
    assert "mamba needs 81.0 % of the parameters for the same loss as Transformer." in page
    assert not re.search(r"ahead[\w ]*</span>", page)


def test_gradients_tell_ratios():
    page = visible(render_evals_page(load_evals(EVERYTHING)))
    assert "W_Q 1.50, W_K 1.50, W_V 1.50, W_O 1.50" in page


def test_the_record_of_a_run_stands_for_its_experiments(tmp_path):
    run = tmp_path / "diff-seed1"
    record = Record(
        "demo", "diff", 1, {}, {"needle": {"n1_r1": 0.5}, "gradients": {"largest": 2.0}}, {"needle": [{"a": 1}]}
    )
    record.save(run / "record.json")
    single = {"eval": "needle", "model": "diff-seed1", "metrics": {"n1_r1": 0.5}, "rows": [{"a": 1}]}
    (run / "evals").mkdir()
    (run / "evals" / "needle.json").write_text(json.dumps(single))
    assert load_evals(tmp_path) == [record]
    page = render_evals_page(load_evals(tmp_path))
    assert re.findall(r'<section id="([^"]*)"', page) == ["needles"]
    assert "1, with 1 rows" in page


def test_two_models_measured_with_three_data_seeds_are_one_training_seed():
    scores = {"diff": (0.5, 0.6, 0.55), "softmax": (0.3, 0.4, 0.35)}
    results = [
        needle(f"model-{kind}", score, seed=seed, attention=kind) | {"rows": []}
        for kind, by_seed in scores.items()
        for seed, score in enumerate(by_seed)
    ]
    said = visible(render_evals_page(load_evals(results)))
    assert "seeds" not in said.replace("data seeds", "")
    assert "one seed: no interval" in said
    assert "DIFF ahead in this run" in said
    assert "3 measurements of one model, with data seeds 0, 1, 2, are averaged; they are one training seed" in said
    trained = [
        needle("", score, seed=0, attention=kind, run={"setting": "demo", "side": kind, "seed": seed}) | {"rows": []}
        for kind, by_seed in scores.items()
        for seed, score in enumerate(by_seed)
    ]
    assert "over 3 seeds" in visible(render_evals_page(load_evals(trained)))


def test_files_of_records_are_read_whole(tmp_path):
    records = [
        Record(setting, side, seed, {"model": {"attention": side}}, {"recall": {"accuracy": 0.5, "chance": 0.1}},
               curves={"recall": {"step": [1, 2], "accuracy": [0.1, 0.5]}} if setting == "long" else {},
               provenance={"recall": {"attention": side, "seed": 0}})
        for setting in ("short", "long") for side in ("diff", "softmax") for seed in (0, 1)
    ]  # fmt: skip
    save_all([record for record in records if record.side == "diff"], tmp_path / "diff.json")
    save_all([record for record in records if record.side == "softmax"], tmp_path / "softmax.json")
    assert "side" in json.loads((tmp_path / "diff.json").read_text())["common"]
    found = load_evals([tmp_path / "diff.json", tmp_path / "softmax.json"])
    assert sorted(record.identity for record in found) == sorted(record.identity for record in records)
    page = write_evals_report([tmp_path / "diff.json", tmp_path / "softmax.json"], tmp_path / "x.html").read_text()
    for name in ("diff, short", "diff, long", "softmax, short", "softmax, long"):
        assert name in page
    short = [record for record in records if record.setting == "short"]
    assert "Accuracy over training" not in render_evals_page(short)


@pytest.mark.parametrize("folder", [pytest.param("recall", marks=pytest.mark.slow), "answers"])
def test_committed_records_of_studies_have_a_page(folder):
    file = Path(__file__).parents[2] / "figures" / folder / "measured.json"
    assert "Recall from noise" in render_evals_page(load_evals(file))


def test_curves_alone_have_no_page(tmp_path):
    save_all([Record("a", "diff", 0, curves={"validation": {"step": [1], "loss": [2.0]}})], tmp_path / "r.json")
    with pytest.raises(ResultsError, match=r"r\.json holds training curves and no result of an experiment"):
        load_evals(tmp_path / "r.json")
