"""Records of several calls as one, and where they go."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROVENANCE = {"torch": "2.11.0", "date": "monday", "machine": {"gpu": "A GPU", "triton": "3.6.0"}}


@pytest.fixture
def records(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_records

    return gpu_records


def save(path, rows, **provenance):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "provenance": {**PROVENANCE, **provenance}}))


def test_installed_under_the_names_that_tables_are_made_from(records, tmp_path, monkeypatch):
    save(tmp_path / "one" / "attention.json", [{"backend": "softmax"}])
    save(tmp_path / "two" / "attention.json", [{"backend": "triton", "length": 512}])
    save(tmp_path / "one" / "decode.json", [{"kind": "operator"}])
    save(tmp_path / "two" / "decode_compiled.json", [{"kind": "model"}])
    results = tmp_path / "results"
    results.mkdir()
    assert records.install([tmp_path / "one", tmp_path / "two"], results) == ["attention_gpu.json", "decode_gpu.json"]
    rows = json.loads((results / "attention_gpu.json").read_text())["rows"]
    assert [(r["backend"], r["length"]) for r in rows] == [("triton", 512)]
    rows = json.loads((results / "decode_gpu.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["operator", "model"]


def test_without_a_record_nothing_is_installed(records, tmp_path, capsys):
    assert records.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "no record there\n"
