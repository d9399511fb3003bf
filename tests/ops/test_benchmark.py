"""The benchmark of the operator: no speed without a passed gate, no record overwritten."""

import json

import pytest
import torch

from diff_transformer.bench import attention as bench
from diff_transformer.ops import blockwise

SMALL = [bench.Shape(1, 2, 65, 8)]


def test_rows_have_ratios_and_memory():
    record = bench.run_attention_benchmark(SMALL, backends=["reference", "blockwise", "sdpa"], repeats=2)
    assert [(r["backend"], r["dtype"]) for r in record["rows"]] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("softmax", "reference", "blockwise", "sdpa")
    ]
    for row in record["rows"]:
        assert row["forward_ms"] > 0
        assert row["both_ms"] > row["forward_ms"]
        assert row["peak_bytes"] > 0
    assert {r["gate"] for r in record["rows"] if r["backend"] != "softmax"} == {"passed"}
    assert {r["both_ratio"] for r in record["rows"] if r["backend"] == "softmax"} == {1.0}
    assert {"torch", "cpu", "threads", "date", "commit", "baseline", "repeats"} <= record["provenance"].keys()


@pytest.mark.parametrize("spoiled", ["forward", "backward"])
def test_a_wrong_backend_gets_no_time(monkeypatch, spoiled):
    attend = blockwise.attend

    def wrong(*args):
        out = attend(*args)
        return out * 1.01 if spoiled == "forward" else out + 0.01 * (out - out.detach())

    monkeypatch.setattr(blockwise, "attend", wrong)
    (_, row) = bench.run_attention_benchmark(SMALL, (torch.float32,), backends=["blockwise"], repeats=1)["rows"]
    assert row["gate"].startswith("failed: out" if spoiled == "forward" else "failed: gradient of q1")
    assert not {"forward_ms", "both_ms", "forward_ratio", "peak_bytes"} & row.keys()


def test_gate_looks_at_the_length_that_is_timed(monkeypatch):
    attend = blockwise.attend
    monkeypatch.setattr(blockwise, "attend", lambda *args: attend(*args) * (1.01 if args[0].shape[2] > 555 else 1))
    with pytest.raises(AssertionError, match="out at length 600"):
        bench.gate("blockwise", bench.Shape(1, 1, 600, 8), torch.float32, "cpu", backward=True)


def test_medians_are_of_functions_that_take_turns():
    calls = []
    medians = bench.interleaved_medians({k: lambda k=k: calls.append(k) for k in "ab"}, repeats=2, device="cpu")
    assert "".join(calls) == "abab" + "ab" + "ba"
    assert medians.keys() == {"a", "b"}


def test_main_writes_json_and_never_overwrites(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SHORT_GRID", SMALL)
    out = tmp_path / "results" / "attention.json"
    record = bench.main(out=out, backends=["blockwise"], repeats=1)
    assert json.loads(out.read_text()) == record
    assert "blockwise" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="exists; give another path, or overwrite=True"):
        bench.main(out=out, backends=["blockwise"], repeats=1)
    bench.main(out=out, backends=["blockwise"], repeats=1, overwrite=True)
