"""The folder of a comparison: its page is made from the records of the models, and its control is in every figure."""

import json

import pytest

from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.record import Record, load_all, save_all
from diff_transformer.lab.spec import side_model
from diff_transformer.report import write_report
from diff_transformer.report.comparison import export, load_comparison
from diff_transformer.report.figures import loss_slices, losses, needles, recall, throughput, variants

LOSSES = {"diff": 3.9, "softmax": 4.0, "dint": 3.95, "softmax_norm": 3.85}


@pytest.fixture
def folder(tmp_path):
    """One run of each model, as ``compare`` leaves it."""
    config, speeds = recipe("debug"), []
    for side, loss in LOSSES.items():
        rows = [
            {"loss": loss + i / 100, "ar_hit_sum": loss, "ar_hit_count": 1, "others_sum": 2 * loss, "others_count": 2}
            for i in range(-2, 3)
        ]
        found = [{"needles": 1, "queries": 1, "score": float(i < 5)} for i in range(8)]
        line = {"step": [0, 10, 20], "loss": [5.0, 4.5, loss]}
        record = Record(
            "debug", side, 0, {**config.to_dict(), "model": side_model(config, side)},
            {"associative_recall": {"validation": loss, "ar_hit": loss, "others": loss}, "needle": {"n1_r1": 5 / 8}},
            {"associative_recall": rows, "needle": found},
            {"training": {**line, "grad_norm": [1.0] * 3, "tokens_per_second": [9.0] * 3}, "validation": line,
             "lambda": {"step": [0], "layers": [[0.3, 0.4]], "init": [0.2, 0.36]}},
        )  # fmt: skip
        record.save(tmp_path / "members" / f"{side}-seed0" / "record.json")
        curve = {"step": [0, 10], "accuracy": [0.1, 0.6]}
        small = Record("recall", side, 0, metrics={"recall": {"accuracy": 0.6}}, curves={"recall": curve})
        small.save(tmp_path / "recall" / f"{side}-seed0" / "record.json")
        timed = [{"train_tokens_per_second": 100.0 + i} for i in range(3)]
        speeds.append(Record("debug", side, 0, {}, {"throughput": timed[1]}, {"throughput": timed}))
    save_all(speeds, tmp_path / "throughput.json")
    facts = {"command": "compare", "created": "2026-11-26", "seconds": 9.0, "provenance": {"device": "cpu"}}
    (tmp_path / "compare.json").write_text(json.dumps({"seeds": 1, "config": config.to_dict(), **facts}))
    (tmp_path / "variants.json").write_text('["dint", "softmax_norm"]')
    (tmp_path / "results.json").write_text("{}")  # nothing reads it
    return tmp_path


def test_every_figure_has_every_model(folder):
    shown = load_comparison(folder)
    assert [record.side for record in shown.records] == ["diff", "softmax", "dint", "softmax_norm"]
    assert shown.styles() == {"diff": "diff", "softmax": "softmax", "dint": "s2", "softmax_norm": "s1"}
    for module in (losses, variants, recall, needles, loss_slices, throughput):
        figure = module.build(shown)
        for name in ("DIFF", "Transformer", "DINT", "Transformer + head norm"):
            assert f"</i>{name}</span>" in figure.body, (module.__name__, name)
        assert "Transformer + head norm" in figure.data


def test_a_difference_is_the_same_in_the_claim_and_in_the_figure(folder):
    shown = load_comparison(folder)
    (claim,) = (claim for claim in shown.about["claims"] if claim["id"] == "loss")
    assert claim["difference"]["mean"] == pytest.approx(-0.1)
    assert claim["control"]["difference"]["mean"] == pytest.approx(0.05)
    said = loss_slices.build(shown).findings[0].text
    assert "difference −0.100, " in said
    assert "against the Transformer + head norm, 3.850: difference +0.050, " in said


def test_rows_are_in_the_records_alone(folder):
    written = export(load_comparison(folder))
    assert json.loads(json.dumps(written)) == written
    assert not any(entry["rows"] for entry in written["evals"])
    assert "explorer" not in written
    assert load_all(folder)[0].rows["needle"][0]["score"] == 1.0
    page = write_report(folder, folder / "page.html").read_text()
    assert page == write_report(folder / "results.json", folder / "same.html").read_text()
    (folder / "results.json").write_text(json.dumps(written))
    (folder / "compare.json").unlink()  # as from another machine: what the export has
    assert load_comparison(folder).about["claims"] == written["claims"]
