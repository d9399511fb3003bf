"""Tables from records of known content."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("forward", "backward", "both")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speed_tables

    yield speed_tables
    del sys.modules["speed_tables"]


def save(folder, name, rows):
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))


def attention_row(backend, role="backend", ms=1.0, **more):
    row = {"backend": backend, "role": role, "dtype": "bfloat16", "length": 4096, "width": 128, "causal": True}
    row |= {"gate": "is the baseline" if role == "baseline" else "passed", "ratios": {}}
    for kind in KINDS:
        row |= {f"{kind}_ms": ms, f"{kind}_ratio": ms, f"{kind}_tflops": 500.4}
    return row | more


def test_cpu_table_is_the_range_over_the_shapes_that_passed(tables, tmp_path):
    rows = [attention_row("blockwise", ms=ms) for ms in (0.25, 0.5)] + [attention_row("sdpa", ms=3.0)]
    rows.append(attention_row("blockwise", ms=9.0) | {"gate": "failed: out"})
    save(tmp_path, "attention_amx", rows)
    assert tables.operator_cpu(tmp_path)[2:] == [
        "| Intel with AMX |  |  | 0.25 to 0.50 | 0.25 to 0.50 |",
        "| `sdpa`, all of them |  |  | 3.00 | 3.00 |",
    ]


@pytest.mark.parametrize("default", ["cudnn", "flash"])
def test_gpu_table_is_over_both_kernels_whichever_sdpa_chooses(tables, tmp_path, default):
    other = "flash" if default == "cudnn" else "cudnn"
    rows = [
        attention_row("softmax", "baseline", sdpa=default),
        attention_row("triton", ms=0.8, ratios={f"softmax[{other}]": dict.fromkeys(KINDS, 1.6)}),
        attention_row("triton", length=2048),
        attention_row("triton", causal=False),
        attention_row("FlashDiffAttn_1", "rival", ms=2.5),
        attention_row("FlashDiffAttn_2[cudnn]", "rival", ms=1.6),
        attention_row("one call[flash]", "rival", ms=0.7),
    ]
    save(tmp_path, "attention_gpu", rows)
    cudnn, flash = (0.8, 1.6) if default == "cudnn" else (1.6, 0.8)
    expected = f"| 128 | {cudnn:.2f} | {cudnn:.2f} | {cudnn:.2f} | {flash:.2f} | 2.00 | 500, 500 |"
    assert tables.operator_gpu(tmp_path)[2:] == [expected]


def test_models_in_training_prefill_and_decoding(tables, tmp_path):
    row = {"model": "3B", "dtype": "bfloat16", "fields": {}, "forward_backward_ratio": 1.0, "prefill_ratio": 1.0}
    diff = {**row, "side": "diff", "forward_backward_ratio": 0.95, "forward_backward_paper_ratio": 0.8968}
    softmax = {**row, "side": "softmax"}
    save(tmp_path, "throughput_gpu", [softmax, diff, softmax, diff | {"forward_backward_ratio": 0.9}])
    row |= {"kind": "model", "compiled": True}
    save(tmp_path, "decode_gpu", [{**row, "side": side, "ratio": 1.004} for side in ("softmax", "diff")])
    assert tables.models(tmp_path)[2:] == [
        "| 3B, bf16 | NVIDIA H200 | 0.90 to 0.95 | 0.90 | 1.00 |  |  |",
        "| 3B, bf16, compiled | NVIDIA H200 |  |  |  |  | 1.00 |",
    ]


def test_the_page_has_every_table_and_is_up_to_date(tables):
    page = (ROOT / "docs" / "performance.md").read_text()
    assert sorted(tables.TABLE.findall(page)) == sorted(tables.TABLES)
    assert tables.filled(page) == page
