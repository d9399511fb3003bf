"""Records of several calls as one, where they go, and the goals that they hold."""

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


@pytest.fixture
def goals(records):
    import gpu_goals

    return gpu_goals


def attention_row(backend, length=4096, width=128, role="backend", ms=1.0, **more):
    row = {"backend": backend, "role": role, "dtype": "bfloat16", "batch": 4, "heads": 12, "length": length}
    row |= {"width": width, "causal": True, "gate": "passed"}
    row |= {f"{kind}_ms": ms for kind in ("forward", "backward", "both")}
    return row | {f"{kind}_ratio": ms for kind in ("forward", "backward", "both")} | {"ratios": {}} | more


def save(path, rows, **provenance):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "provenance": {**PROVENANCE, **provenance}}))


def test_installed_under_the_names_that_tables_are_made_from(records, tmp_path, monkeypatch):
    save(tmp_path / "one" / "attention.json", [attention_row("softmax", ms=1.0)])
    save(tmp_path / "two" / "attention.json", [attention_row("triton", length=512)])
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


def verdicts(goals, folder):
    return {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:] for line in goals.goals_table(folder)[2:]}


def test_goals_without_records_are_not_measured(goals, tmp_path):
    assert {tuple(cells) for cells in verdicts(goals, tmp_path).values()} == {("", "not measured |")}


def test_goals_are_held_or_not(goals, tmp_path):
    cudnn = {"softmax[cudnn]": {"forward": 1.59, "backward": 1.51, "both": 1.5}}
    rows = [
        attention_row("softmax", role="baseline", sdpa="flash"),
        attention_row("triton", ms=1.1, ratios=cudnn),
        attention_row("triton", length=2048, ms=0.1),
        attention_row("triton", causal=False, ms=0.1),
        attention_row("FlashDiffAttn_1", role="rival", ms=1.4),
        attention_row("FlashDiffAttn_2", role="rival", ms=1.3),
        attention_row("softmax", width=64, role="baseline", sdpa="cudnn"),
        attention_row("triton", width=64, ms=1.2),
    ]
    save(tmp_path / "attention_gpu.json", rows)
    pair = {"model": "3B", "side": "diff", "length": 4096, "forward_backward_ratio": 0.985, "prefill_ratio": 0.96}
    save(tmp_path / "throughput.json", [pair, {**pair, "length": 2048, "compiled": True}, {**pair, "side": "softmax"}])
    decoding = {"kind": "model", "model": "3B", "side": "diff"}
    save(tmp_path / "decode.json", [{**decoding, "ratio": 1.1}, {**decoding, "ratio": 0.999}])
    found = verdicts(goals, tmp_path)
    assert found["operator, d 128: forward + backward over SDPA's default"] == ["1.100", "✓ held |"]
    assert found["operator, d 64: forward + backward over SDPA's default"] == ["1.200", "✗ not held |"]
    assert found["operator, d 128: forward over cuDNN"] == ["1.590", "✓ held |"]
    assert found["operator, d 128: backward over cuDNN"] == ["1.510", "✗ not held |"]
    assert found["operator, d 64: forward over cuDNN"] == ["1.200", "✓ held |"]
    assert found["operator, d 128: times as fast as the fastest FlashDiffAttn"] == ["1.182", "✗ not held |"]
    assert found["operator, d 64: times as fast as the fastest FlashDiffAttn"] == ["", "not measured |"]
    assert found["3B at 4096: forward + backward, DIFF / Transformer"] == ["0.985", "✓ held |"]
    assert found["3B at 4096: prefill, DIFF / Transformer"] == ["0.960", "✗ not held |"]
    assert found["3B at 2048: prefill, DIFF / Transformer"] == ["", "not measured |"]
    assert found["3B: decoding, DIFF / Transformer"] == ["0.999", "✗ not held |"]
