"""Rows on disk, what tells models apart, and the records of trained models."""

import gzip
import json
import math

import numpy as np
import pytest
import torch
from made_rows import comparison, model

from diff_transformer.errors import UserError
from diff_transformer.lab.record import load_records
from diff_transformer.lab.results import read_results
from diff_transformer.lab.rows import FILE, REQUEST, Rows, encode, read_file, read_rows, row, rows_of, write_rows


def of_eval(side, path, weights, score=1.0, data_seed=0, **settings):
    """The rows of one measurement of a model, as ``eval needle`` writes them."""
    facts = {"path": path, "weights": weights}
    return [
        row("needle", side, example=0, data_seed=data_seed, n=1, r=1, score=score),
        *(row("about", side, example=key, of="model", key=key, value=value) for key, value in facts.items()),
        *(row("about", side, example=key, of="needle", key=key, value=value) for key, value in settings.items()),
    ]


def test_rows_survive_their_file_to_the_last_bit(tmp_path):
    values = [0.1 + 0.2, 1e-300, -0.0, 12345678901234567]
    write_rows(
        tmp_path / "deep" / "a.jsonl.gz", [row("mine", "m", example=i, score=value) for i, value in enumerate(values)]
    )
    assert [each["score"] for each in read_file(tmp_path / "deep" / "a.jsonl.gz")] == values
    odd = [math.nan, math.inf, np.float32("-inf"), np.bool_(True), np.int64(3), torch.tensor([0.5, math.nan])]
    write_rows(tmp_path / "b.jsonl.gz", [row("mine", "m", example=i, score=value) for i, value in enumerate(odd)])
    assert [each["score"] for each in read_file(tmp_path / "b.jsonl.gz")] == [None, None, None, True, 3, [0.5, None]]


def test_two_files_one_after_the_other_are_both(tmp_path):
    parts = [encode(of_eval("a", "x/a", "1")), encode(of_eval("b", "x/b", "2"))]
    (tmp_path / "both.jsonl.gz").write_bytes(b"".join(parts))
    assert read_rows(tmp_path / "both.jsonl.gz").sides == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no rows"),
        (b"{}", "is no file of rows"),
        (gzip.compress(b"{"), "is no file of rows"),
        (gzip.compress(b"[1]"), "holds no rows"),
        (gzip.compress(json.dumps({"a": 1}).encode()), "holds no rows"),
        (gzip.compress(b'{"experiment": "needle", "side": "m"}\n')[:-9], "is no file of rows"),
    ],
    ids=["empty", "text", "no JSON", "a list", "no experiment", "cut"],
)
def test_a_file_that_holds_no_rows_is_refused(tmp_path, content, words):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_rows(tmp_path / "a.jsonl.gz")


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        read_rows(tmp_path / "none.jsonl.gz")
    with pytest.raises(UserError, match="holds no results"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "sides"),
    [
        (("tiny", "acme/tiny", "1"), ("tiny", "other/tiny", "2"), ["acme/tiny", "other/tiny"]),
        (
            ("checkpoint-500", "exp1/checkpoint-500", "1"),
            ("checkpoint-500", "exp2/checkpoint-500", "2"),
            ["exp1/checkpoint-500", "exp2/checkpoint-500"],
        ),
        (("llama-seed0", "a/llama-seed0", "1"), ("llama-seed1", "a/llama-seed1", "2"), ["llama-seed0", "llama-seed1"]),
    ],
)
def test_models_of_one_name_are_told_apart(tmp_path, first, second, sides):
    for place, about in enumerate((first, second)):
        write_rows(tmp_path / f"{place}.jsonl.gz", of_eval(*about))
    assert read_rows(tmp_path).sides == sides
    assert [record.side for record in load_records(tmp_path)] == sides


def test_one_model_on_three_draws_of_examples_is_one_training_seed(tmp_path):
    """The same from files and from folders."""
    for seed in range(3):
        rows = of_eval("m", "x/m", "1", score=seed / 2, data_seed=seed)
        write_rows(tmp_path / "files" / f"{seed}.jsonl.gz", rows)
        write_rows(tmp_path / "folders" / str(seed) / "needle" / "m.jsonl.gz", rows)
    for source in ("files", "folders"):
        (record,) = load_records(tmp_path / source)
        assert record.seed == 0
        assert record.metrics == {"needle_n1_r1": 0.5}


def test_the_same_measurement_counts_once_and_another_setting_is_named(tmp_path):
    write_rows(tmp_path / "a.jsonl.gz", of_eval("m", "x/m", "1", samples=20))
    write_rows(tmp_path / "b.jsonl.gz", of_eval("m", "x/m", "1", samples=20))
    assert len(read_rows(tmp_path)["needle"]) == 1
    of_part = row("allocation_heads", "m", answer=1.0)
    for samples, name in ((20, "a"), (20, "b"), (40, "c"), (40, "d"), (60, "e")):
        about = row("about", "m", example="samples", of="allocation", key="samples", value=samples)
        write_rows(tmp_path / f"{name}.jsonl.gz", [*of_eval("m", "x/m", "1", samples=samples), of_part, about])
    rows = read_rows(tmp_path)
    for name in ("needle", "allocation_heads"):
        assert [*rows[name]["side"]] == ["m", "m (samples 40)", "m (samples 60)"]


def test_another_draw_of_examples_with_other_settings_is_named(tmp_path):
    for data_seed, samples in ((0, 20), (1, 40), (1, 20), (1, 40)):
        rows = of_eval("m", "x/m", "1", data_seed=data_seed, samples=samples, counts=[1, 5 + data_seed])
        about = [each | {"data_seed": data_seed} for each in rows]
        write_rows(tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl.gz", about)
    assert [*read_rows(tmp_path)["needle"]["side"]] == ["m", "m (samples 40)", "m"]


def test_parts_of_an_unfinished_run_are_not_counted_twice(tmp_path):
    write_rows(tmp_path / "diff-seed0" / FILE, model("diff"))
    (tmp_path / "diff-seed0" / REQUEST).write_text("{}")
    write_rows(tmp_path / "diff-seed0" / "parts" / "needle.jsonl.gz", model("diff"))
    write_rows(tmp_path / "softmax-seed0" / "parts" / "needle.jsonl.gz", model("softmax"))
    assert len(read_rows(tmp_path)["model"]) == 2
    for side in ("rows", "other"):  # a model called "rows" hides no other
        write_rows(tmp_path / "needle" / f"{side}.jsonl.gz", of_eval(side, f"x/{side}", side))
    assert read_rows(tmp_path / "needle").sides == ["other", "rows"]


def test_names_that_no_page_can_hold_are_cleaned():
    rows = Rows([row("needle", "evil\x1b[31m\ud800", n=1, r=1, score=1.0)])
    assert rows.sides == ["evil\ufffd[31m\ufffd"]


def test_records_have_what_their_rows_say():
    rows = Rows(comparison(seeds=(0, 1)))
    assert rows.sides == ["diff", "softmax", "softmax_norm"]
    assert (rows["nothing"].empty, rows.about("needle")) == (True, {"length": 128})
    from diff_transformer.lab.record import records_of

    first, *_ = found = records_of(rows)
    assert [(record.side, record.seed) for record in found][:3] == [("diff", 0), ("diff", 1), ("softmax", 0)]
    assert first.config["optim"]["lr"] == 5e-4
    assert first.diverged is None
    assert first.metrics["parameters"] == 640_000
    assert first.metrics["validation_loss"] == pytest.approx(3.7)


def test_a_model_trained_on_in_place_is_another_one(tmp_path):
    write_rows(tmp_path / "a.jsonl.gz", of_eval("m", "x/m", "11111111", score=1.0))
    write_rows(tmp_path / "b.jsonl.gz", of_eval("m", "x/m", "22222222", score=0.0))
    assert read_rows(tmp_path).sides == ["m (11111111)", "m (22222222)"]


def test_what_lies_beside_a_comparison_is_read_too(tmp_path):
    write_rows(tmp_path / "demo" / "members" / "diff-seed0" / FILE, model("diff"))
    (tmp_path / "demo" / "compare.json").write_text("{}")
    write_rows(tmp_path / "gpt2" / "needle" / "gpt2.jsonl.gz", of_eval("gpt2", "x/gpt2", "1"))
    assert read_results(tmp_path).sides == ["diff", "gpt2"]
    write_rows(tmp_path / "demo" / "more" / "gpt3.jsonl.gz", of_eval("gpt3", "x/gpt3", "3"))
    assert read_results(tmp_path / "demo", tmp_path / "demo" / "more").sides == ["diff", "gpt3"]


def test_a_model_of_a_comparison_measured_again_with_other_settings_is_named(tmp_path):
    """The runs of a comparison are measured in memory, without a path."""
    for name, path, samples in (("demo/members/m-seed0", "", 20), ("again", "x/m", 20), ("more", "x/m", 40)):
        write_rows(tmp_path / name / FILE, of_eval("m", path, "1", samples=samples))
    (tmp_path / "demo" / "compare.json").write_text("{}")
    for sources in ([tmp_path], [tmp_path / "demo", tmp_path / "again", tmp_path / "more"]):
        assert [*read_results(*sources)["needle"]["side"]] == ["m", "m (samples 40)"]


def test_comparisons_are_settings_called_by_their_folders(tmp_path):
    for place in ("x/demo", "y/demo"):
        for side in ("diff", "softmax"):
            write_rows(tmp_path / place / "members" / f"{side}-seed0" / FILE, model(side))
        (tmp_path / place / "compare.json").write_text("{}")
    assert read_results(tmp_path / "x" / "demo", tmp_path / "y" / "demo").settings == ["x demo", "y demo"]
    assert {record.setting for record in load_records(tmp_path)} == {"x demo", "y demo"}
    once = tmp_path / "x" / "demo", tmp_path / "y" / ".." / "x" / "demo", tmp_path / "x" / "demo" / "members"
    assert len(read_results(*once)["model"]) == 2


def test_columns_of_a_user_s_experiment_do_not_replace_the_keys():
    (each,) = rows_of("mine", [{"side": "left", "seed": 7, "score": 1.0}], {}, "m")
    assert (each["side"], each["seed"], each["side_"], each["seed_"]) == ("m", 0, "left", 7)
