"""Records: saved and loaded, grouped and merged, and read from every form that earlier versions wrote."""

import json
from pathlib import Path

import pytest

from diff_transformer.evals.types import Result
from diff_transformer.lab.record import (
    Record,
    RecordError,
    averaged,
    grouped,
    load_all,
    load_records,
    merged,
    of_result,
    records_of,
    run_of,
    save_all,
)
from diff_transformer.report.load import load_evals
from diff_transformer.report.models import Results, models_in

FIGURES = Path(__file__).parents[2] / "figures"


def test_a_record_survives_its_file(tmp_path):
    record = Record(
        "novels", "diff", 3, {"model": {"attention": "diff"}}, {"needle": {"n1_r1": 0.5}}, {"needle": [{"score": 1.0}]},
        {"validation": {"step": [0, 10], "loss": [5.0, 4.0]}}, {"training": {"seconds": 3.0}},
    )  # fmt: skip
    record.save(tmp_path / "deep" / "record.json")
    assert load_all(tmp_path / "deep" / "record.json") == [record]
    assert load_all(tmp_path) == [record]
    assert (record.final_loss, record.attention) == (4.0, "diff")
    save_all([record], tmp_path / "one.json")
    assert load_all(tmp_path / "one.json") == [record]


def test_what_records_have_alike_stands_once_in_their_file(tmp_path):
    """At any depth, lists as a whole; what one of them lacks, or has empty, comes back as it was."""
    records = [
        Record("a", "diff", 0, {"model": {"attention": "diff", "width": 64}, "steps": 9}, {"x": {"y": 1.0}}),
        Record("a", "diff", 1, {"model": {"attention": "diff", "width": 64, "norm": [1, 2]}, "steps": 9}, {"x": {}}),
        Record("a", "softmax", 1, {"model": {"attention": "softmax", "width": 64, "norm": [1, 3]}, "steps": 9}),
    ]
    save_all(records, tmp_path / "all.json")
    assert load_all(tmp_path / "all.json") == records
    kept = json.loads((tmp_path / "all.json").read_text())
    assert kept["common"]["config"] == {"model": {"width": 64}, "steps": 9}
    assert kept["records"][0]["config"] == {"model": {"attention": "diff"}}
    save_all([], tmp_path / "none.json")
    assert load_all(tmp_path / "none.json") == []


def test_records_are_grouped_by_their_fields():
    records = [Record("a-seed9", side, seed) for side in ("diff", "softmax-seed1") for seed in (0, 1)]
    assert grouped(records) == {"a-seed9": {"diff": {0: records[0], 1: records[1]},
                                            "softmax-seed1": {0: records[2], 1: records[3]}}}  # fmt: skip


def test_evaluate_of_one_model_are_one_record_and_a_repeated_one_is_another():
    results = [Result(name, "diff-seed1", {"x": value}) for name, value in (("a", 1.0), ("b", 2.0), ("a", 3.0))]
    first, second = merged(map(of_result, results))
    assert first.metrics == {"a": {"x": 1.0}, "b": {"x": 2.0}}
    assert second.metrics == {"a": {"x": 3.0}}
    assert (first.side, first.seed) == ("diff-seed1", 0)  # no name is taken apart
    named = of_result(Result("a", "Qwen3-0.6B", {}))
    assert (named.side, named.seed) == ("Qwen3-0.6B", 0)


def measured(model, seed, value, **more):
    return Result("needle", model, {"n1_r1": value}, [{"score": value}], {"seed": seed, "length": 64, **more})


def test_the_seed_of_a_measurement_is_not_that_of_training():
    run = {"setting": "demo", "side": "diff", "seed": 3}
    records = [of_result(measured("diff-seed3", 7, 0.5, run=run)), of_result(measured("Qwen3-0.6B", 7, 0.5))]
    assert [record.identity for record in records] == [("demo", "diff", 3), ("", "Qwen3-0.6B", 0)]
    assert [(record.seed, record.data_seed("needle")) for record in records] == [(3, 7), (0, 7)]
    assert records[0].data_seed("outliers") is None


def test_repeated_measurements_of_one_model_are_averaged_and_said_to_be_that(tmp_path):
    for seed, value in enumerate((0.5, 0.6, 1.0)):
        measured("tiny", seed, value, date=f"2026-01-0{seed + 1}").save(tmp_path / f"{seed}.json")
    Result("outliers", "tiny", {"logits_top1": 3.0}, [], {"seed": 1}).save(tmp_path / "outliers.json")
    (record,) = load_all(tmp_path)
    assert record.metrics["needle"]["n1_r1"] == pytest.approx(0.7)
    assert record.metrics["outliers"] == {"logits_top1": 3.0}
    assert record.rows["needle"] == [{"score": 0.5}, {"score": 0.6}, {"score": 1.0}]
    assert (record.seed, record.provenance["needle"]["data_seeds"]) == (0, [0, 1, 2])
    assert record.provenance["needle"]["repeated"] == (
        "3 measurements of one model, with data seeds 0, 1, 2, are averaged; they are one training seed"
    )


@pytest.mark.parametrize(
    "other",
    [
        measured("tiny", 0, 0.9),  # the same examples: a contradiction
        measured("tiny", 1, 0.9, length=128),  # another length
        measured("tiny-seed1", 1, 0.9),  # another model
        measured("other", 1, 0.9),
        Result("needle", "tiny", {"n1_r1": 0.9, "n2_r1": 0.1}, [], {"seed": 1, "length": 64}),  # other cells
        Result("needle", "tiny", {"n1_r1": 0.9}, [], {"length": 64}),  # who knows
    ],
)
def test_what_is_not_a_repetition_is_not_averaged(other):
    records = [of_result(measured("tiny", 0, 0.5)), of_result(other)]
    assert averaged(records) == records


def test_models_are_told_apart_by_path_and_weights_and_not_by_name(tmp_path):
    models = {"runA": ("/runA/tiny", "0123"), "runB": ("/runB/tiny", "4567"), "again": ("/runA/tiny", "89ab")}
    for name, (path, weights) in models.items():
        measured("tiny", len(name), 0.5, path=path, weights=weights).save(tmp_path / f"{name}.json")
    more = Result("outliers", "tiny", {"x": 1.0}, [], {"seed": 1, "path": "/runB/tiny", "weights": "4567"})
    more.save(tmp_path / "outliers.json")
    records = load_all(tmp_path)
    assert {record.model: sorted(record.metrics) for record in records} == {
        models["runA"]: ["needle"], models["runB"]: ["needle", "outliers"], models["again"]: ["needle"],
    }  # fmt: skip
    labels = [one.label for one in models_in(Results(records))]
    assert sorted(labels) == ["tiny", "tiny (2)", "tiny (3)"]  # two of them have one path
    assert sorted(one.label for one in models_in(Results(records[1:]))) == ["runA/tiny", "runB/tiny"]


def test_the_training_run_of_a_model_says_its_side_and_seed(tmp_path):
    model = tmp_path / "members" / "llama-seed7" / "run" / "model"
    model.mkdir(parents=True)
    assert run_of(str(model)) is None
    request = {"setting": "demo", "side": "diff", "seed": 1, "config": {}}
    (model.parents[1] / "request.json").write_text(json.dumps(request))
    assert run_of(str(model)) == run_of(str(model.parent)) == request
    assert run_of("") is None


def test_what_an_experiment_trained_is_not_among_the_models_of_eval(tmp_path):
    (tmp_path / "request.json").write_text(json.dumps({"names": ["needle", "ablation"], "models": ["tiny"]}))
    measured("tiny", 0, 0.5).save(tmp_path / "needle" / "tiny.json")
    Record("ablation", "diff", 0, metrics={"x": {"y": 1.0}}).save(
        tmp_path / "ablation" / "runs-runs" / "diff-seed0" / "record.json"
    )
    assert [record.side for record in load_all(tmp_path)] == ["tiny"]
    assert [record.side for record in load_evals(tmp_path)] == ["tiny"]


def test_a_result_is_kept_as_a_record_and_that_of_an_earlier_version_is_read(tmp_path):
    result = Result("needle", "tiny-seed3", {"n1_r1": 0.5}, [{"got": "7"}], {"seed": 1, "length": 64})
    result.save(tmp_path / "now.json")
    (tmp_path / "earlier.json").write_text(json.dumps(result.to_dict()))
    for name in ("now.json", "earlier.json"):
        assert load_all(tmp_path / name) == [of_result(result)]
        assert Result.load(tmp_path / name) == result
    record = json.loads((tmp_path / "now.json").read_text())
    assert (record["schema"], record["side"], record["seed"]) == (2, "tiny-seed3", 0)
    record["metrics"]["outliers"] = {"logits_top1": 3.0}
    (tmp_path / "two.json").write_text(json.dumps(record))
    with pytest.raises(RecordError, match=r"two\.json holds 2 results; give the file of one experiment on one model"):
        Result.load(tmp_path / "two.json")


def test_the_demo_s_record_is_read():
    records = {record.side: record for record in load_all(FIGURES / "demo")}
    assert records.keys() == {"diff", "softmax", "softmax_norm"}
    diff, softmax = records["diff"], records["softmax"]
    assert (diff.setting, diff.side, softmax.side, diff.seed) == ("demo", "diff", "softmax", 0)
    assert (diff.attention, softmax.attention) == ("diff", "softmax")
    kept = json.loads((FIGURES / "demo" / "results.json").read_text())
    for entry in kept["evals"]:
        record = {"diff": diff, "softmax": softmax}[entry["attention"]]
        assert record.metrics[entry["eval"]] == entry["metrics"]
        assert record.provenance[entry["eval"]] == entry["provenance"]
    assert diff.curves["validation"]["loss"] == kept["curves"][0]["validation_loss"]
    assert len(diff.curves["lambda"]["layers"]) == len(diff.curves["training"]["step"])
    assert diff.tokens_per_step == 16 * 128


def test_recorded_experiments_are_read():
    results = json.loads((FIGURES / "table2_needle" / "measured.json").read_text())["results"]
    records = load_all(FIGURES / "table2_needle" / "measured.json")
    assert [r.metrics["needle"] for r in records] == [old["metrics"] for old in results]


def test_variants_of_an_earlier_comparison_are_read():
    row = {"variant": "dint", "config": {"attention": "dint"}, "loss": {"0": 3.0, "1": 3.1},
           "needles": {"n1_r1": {"0": 0.5}}, "train_tokens_per_second": 7.0}  # fmt: skip
    value = {"schema": 1, "recipe": "demo", "train": {"config": {"model": {}}}, "evals": [], "variants": [row]}
    first, second = records_of(value)
    assert first.metrics["needle"] == {"n1_r1": 0.5}
    assert first.metrics["throughput"] == {"train_tokens_per_second": 7.0}
    assert (second.side, second.seed, second.attention) == ("dint", 1, "dint")
    assert second.metrics["associative_recall"] == {"validation": 3.1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "has a list, which is not a record"),
        ('{"a": 1}', r"has keys \['a'\], which is not a record"),
        ('{"schema": 2, "records": [{"setting": "x"}]}', "is not a record: TypeError"),
    ],
)
def test_what_is_no_record_is_said(tmp_path, text, message):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        load_all(tmp_path / "file.json")
    with pytest.raises(RecordError, match="holds no record; write some with `diff-transformer compare`"):
        load_all(tmp_path)
    with pytest.raises(RecordError, match="there is no file"):
        load_all(tmp_path / "nowhere.json")


def test_speeds_of_a_pair_that_was_timed_twice_are_those_of_its_claim():
    """An earlier comparison timed the pair again beside its variants, when the machine may have been busy."""
    timed = [
        {"eval": "throughput", "model": "m", "attention": side, "metrics": {"train_tokens_per_second": speed}}
        for side, speed in (("diff", 24_394.0), ("softmax", 22_877.0))
    ]
    again = [
        {"variant": side, "loss": {"0": 4.0}, "train_tokens_per_second": 21_626.0}
        for side in ("diff", "softmax", "softmax_norm")
    ]
    records = {one.side: one for one in records_of({"schema": 1, "evals": timed, "variants": again})}
    assert records["diff"].metrics["throughput"] == {"train_tokens_per_second": 24_394.0}
    assert records["softmax"].metrics["throughput"] == {"train_tokens_per_second": 22_877.0}
    assert "throughput" not in records["softmax_norm"].metrics


def test_records_of_several_sources_are_one_for_each_model(tmp_path):
    """As scripts read them: what two files say of one model is in one record."""
    for name in ("needle", "outliers"):
        Record("a", "diff", 0, metrics={name: {"x": 1.0}}).save(tmp_path / f"{name}.json")
    Record("a", "softmax", 0, metrics={"needle": {"x": 0.5}}).save(tmp_path / "more" / "other.json")
    found = load_records(tmp_path / "needle.json", str(tmp_path / "outliers.json"), tmp_path / "more")
    assert [(record.side, sorted(record.metrics)) for record in found] == [
        ("diff", ["needle", "outliers"]), ("softmax", ["needle"]),
    ]  # fmt: skip
    assert load_records() == []


def test_data_seeds_in_files_and_in_folders_give_one_answer(tmp_path):
    for name, seed, value in (("a/0", 0, 0.5), ("a/1", 1, 0.6), ("b/2", 2, 1.0)):
        measured("tiny", seed, value).save(tmp_path / f"{name}.json")
    files = [tmp_path / f"{name}.json" for name in ("a/0", "a/1", "b/2")]
    (one,), (two,), (three,) = load_records(*files), load_records(tmp_path / "a", tmp_path / "b"), load_all(tmp_path)
    assert one == two == three
    assert one.metrics["needle"]["n1_r1"] == pytest.approx(0.7)


def test_a_source_without_a_record_is_refused(tmp_path):
    Record("a", "diff", 0, metrics={"needle": {"x": 1.0}}).save(tmp_path / "needle.json")
    with pytest.raises(RecordError):
        load_records(tmp_path / "needle.json", tmp_path / "nothing.json")
