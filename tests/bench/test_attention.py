"""The benchmark of the operator: no speed without a passed gate, everything beside the baseline of the same turns."""

import json

import pytest
import torch

from diff_transformer.bench import attention as bench
from diff_transformer.bench import contenders, gate, record
from diff_transformer.bench.shapes import Shape
from diff_transformer.ops import cpu, sdpa

SMALL = [Shape(1, 2, 65, 8)]
FP32 = (torch.float32,)


def by_name(record):
    return {row["backend"]: row for row in record["rows"]}


def test_rows_have_times_ratios_rates_and_memory():
    record = bench.run_attention_benchmark(SMALL, backends=["reference", "blockwise", "sdpa"], repeats=2)
    assert [(r["backend"], r["dtype"]) for r in record["rows"]] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("softmax", "reference", "blockwise", "sdpa")
    ]
    for row in record["rows"]:
        for kind in ("forward", "backward", "both"):
            low, high = row[f"{kind}_quartiles_ms"]
            assert 0 < low <= row[f"{kind}_ms"] <= high
            assert row[f"{kind}_turns"] == 2
            units = (bench.SOFTMAX_UNITS if row["role"] == "baseline" else bench.DIFF_UNITS)[kind]
            useful = 2 * units * (2 * (65 * 66 / 2) * 8)  # h, pairs below the diagonal, d
            assert row[f"{kind}_tflops"] == pytest.approx(useful / row[f"{kind}_ms"] / 1e9, rel=0.02)
        assert row["peak_bytes"] > 0
        assert row["causal"] is True
    assert {r["gate"] for r in record["rows"] if r["role"] == "backend"} == {"passed"}
    assert {r[f"{k}_ratio"] for r in record["rows"] if r["backend"] == "softmax" for k in bench.KINDS} == {1.0}
    expected = {"torch", "cpu", "threads", "date", "commit", "baseline", "repeats", "machine", "units"}
    assert expected <= record["provenance"].keys()


def test_every_kernel_and_both_forms_of_flash_diff_attention_by_name():
    kernels = ["flash", "cudnn", "efficient", "math"]
    rows = by_name(
        bench.run_attention_benchmark(SMALL, FP32, backends=[], kernels=kernels, with_rivals=True, repeats=1)
    )
    timed = {name: row["sdpa"] for name, row in rows.items() if "both_ms" in row}
    assert timed == {
        "softmax": "flash",
        "softmax[math]": "math",
        "FlashDiffAttn_1": "math",
        "FlashDiffAttn_2": "flash",
    }
    assert rows["softmax[cudnn]"]["gate"].startswith("skipped: ")
    assert rows["FlashDiffAttn_1[flash]"]["gate"].startswith("skipped: ")
    for name in timed:
        ratios = rows[name]["ratios"]
        assert ratios.keys() == {"softmax[math]"}
        expected = rows[name]["both_ms"] / rows["softmax[math]"]["both_ms"]
        assert ratios["softmax[math]"]["both"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("spoiled", ["forward", "backward"])
def test_a_wrong_backend_gets_no_time(monkeypatch, spoiled):
    attend = cpu.attend

    def wrong(*args):
        out = attend(*args)
        return out * 1.01 if spoiled == "forward" else out + 0.01 * (out - out.detach())

    monkeypatch.setattr(cpu, "attend", wrong)
    (_, row) = bench.run_attention_benchmark(SMALL, FP32, backends=["blockwise"], repeats=1)["rows"]
    assert row["gate"].startswith(f"failed: AssertionError: {'out' if spoiled == 'forward' else 'gradient of q1'}")
    assert not {"forward_ms", "both_ms", "forward_ratio", "peak_bytes"} & row.keys()


def test_a_rival_that_misses_the_budget_keeps_its_time_and_says_so(monkeypatch):
    monkeypatch.setattr(contenders, "flash_diff_attention", lambda form, kernel: lambda *x, is_causal: x[4] * x[5])
    rows = by_name(bench.run_attention_benchmark(SMALL, FP32, backends=[], with_rivals=True, repeats=1))
    assert rows["FlashDiffAttn_1"]["gate"].startswith("skipped")  # q1 takes no part: its gradient is missing
    kept = {"forward_ms", "forward_ratio"}
    uses_all = lambda form, kernel: lambda *x, is_causal: x[4] * x[5] + 0 * (x[0] + x[1] + x[2] + x[3]).sum()  # noqa: E731
    monkeypatch.setattr(contenders, "flash_diff_attention", uses_all)
    rows = by_name(bench.run_attention_benchmark(SMALL, FP32, backends=[], with_rivals=True, repeats=1))
    assert rows["FlashDiffAttn_1"]["gate"].startswith("failed: AssertionError: out")
    assert kept <= rows["FlashDiffAttn_1"].keys()


def test_a_backend_that_refuses_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr(sdpa, "unsupported_reason", lambda call: "it rains")
    (_, row) = bench.run_attention_benchmark(SMALL, FP32, backends=["sdpa"], repeats=1)["rows"]
    assert row["gate"].startswith("skipped: UserError: backend='sdpa' is not available: it rains")
    assert "forward_ms" not in row


def test_nothing_is_timed_after_a_fault_of_the_device(monkeypatch):
    def faults(call):
        raise gate.FAULT("oh no")

    monkeypatch.setattr(sdpa, "attend", faults)
    with pytest.raises(gate.FAULT, match="oh no"):
        bench.run_attention_benchmark(SMALL, FP32, backends=["sdpa", "blockwise"], repeats=1)


def test_gate_looks_at_the_length_that_is_timed(monkeypatch):
    attend = cpu.attend
    monkeypatch.setattr(cpu, "attend", lambda call: attend(call) * (1.01 if call.q1.shape[2] > 555 else 1))
    checked = gate.Gate(Shape(1, 1, 600, 8), torch.float32, "cpu")
    with pytest.raises(AssertionError, match="out at length 600"):
        checked.check(contenders.backend_contender("blockwise", checked.full, True).function)


def test_time_runs_out_between_shapes(monkeypatch):
    monkeypatch.setattr(record.time, "monotonic", lambda: 10.0 * len(seen))
    seen = []
    shapes = [*SMALL, Shape(1, 2, 33, 8), Shape(1, 2, 17, 8, False)]
    made = bench.run_attention_benchmark(shapes, FP32, backends=["blockwise"], repeats=1, seconds=5, on_row=seen.append)
    assert made["rows"] == seen
    assert {row["length"] for row in seen} == {65}
    assert made["unfinished"] == "out of time before 1x2x33x8 in torch.float32, 1x2x17x8n in torch.float32"


def test_the_file_holds_the_rows_that_are_there(tmp_path):
    out, lengths = tmp_path / "results" / "attention.json", []
    record = bench.run_attention_benchmark(
        SMALL,
        FP32,
        backends=["blockwise"],
        repeats=1,
        out=out,
        on_row=lambda row: lengths.append(len(json.loads(out.read_text())["rows"])),
    )
    assert lengths == [1, 2]
    assert json.loads(out.read_text()) == record
    assert [path.name for path in out.parent.iterdir()] == ["attention.json"]
