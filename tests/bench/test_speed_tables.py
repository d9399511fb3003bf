"""Tables from records of known content."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = {"threads": 2, "cpu": "A CPU, 2 cores", "torch": "2.13.0", "machine": {}}
GPU = {
    "torch": "2.11.0",
    "machine": {"gpu": "A GPU", "nvidia_smi": {"driver_version": "580.1"}, "cudnn": 91900, "triton": "3.6.0"},
    "ceilings": {"matmul_tflops": {"bfloat16": 780.4}, "copy_gb_per_s": 4300.2},
}


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speed_tables

    return speed_tables


@pytest.fixture
def saved(tmp_path):
    def save(rows, provenance):
        path = tmp_path / "record.json"
        path.write_text(json.dumps({"rows": rows, "provenance": provenance}))
        return path

    return save


def attention_row(backend, role="backend", ms=1.0, **more):
    row = {"backend": backend, "role": role, "dtype": "bfloat16", "batch": 4, "heads": 12, "length": 4096, "width": 128}
    row |= {"causal": True, "gate": "passed"}
    for kind in ("forward", "backward", "both"):
        row |= {f"{kind}_ms": ms, f"{kind}_ratio": ms, f"{kind}_tflops": 500.4, f"{kind}_share": 0.626}
    ratios = {"softmax[cudnn]": dict.fromkeys(("forward", "backward", "both"), 2 * ms)}
    return row | {"ratios": ratios, **more}


def test_gpu_table_has_ours_the_fastest_rival_and_both_baselines(tables, saved):
    rows = [
        attention_row("softmax", "baseline", sdpa="flash"),
        attention_row("softmax[cudnn]", "baseline", ms=0.5, sdpa="cudnn"),
        attention_row("softmax[math]", "baseline", ms=9, sdpa="math"),
        attention_row("triton", ms=0.8),
        attention_row("triton[plain]", ms=1.2),
        attention_row("one call[flash]", "rival", ms=0.7, sdpa="flash"),
        attention_row("triton", length=2048),
        attention_row("triton", causal=False),
        attention_row("sdpa", ms=3.0),
        attention_row("FlashDiffAttn_1", "rival", ms=2.5, sdpa="efficient"),
        attention_row("FlashDiffAttn_2[cudnn]", "rival", ms=1.5, sdpa="cudnn"),
        {"backend": "sdpa", "role": "backend", "gate": "skipped: refused"},
    ]
    lines = tables.attention_gpu_table(saved(rows, GPU))
    assert [line.split(" | ")[1] for line in lines[2:-2]] == [
        "triton", "FlashDiffAttn_2[cudnn]", "softmax (flash)", "softmax[cudnn]",
    ]  # fmt: skip
    assert lines[2] == (
        "| 4, 12, 4096, 128, bf16 | triton | 1.60 / 0.80 | 1.60 / 0.80 | 1.60 / 0.80 | 500, 500 | 63 %, 63 % |"
    )
    versions, rates = "driver 580.1, cuDNN 91900, Triton 3.6.0", "bf16 matrix product 780 TFLOP/s, copy 4300 GB/s"
    assert lines[-1].endswith(f"A GPU, PyTorch 2.11.0, {versions}, {rates}.")


def test_gpu_table_of_a_shape_at_which_triton_failed(tables, saved):
    rows = [
        attention_row("softmax", "baseline", sdpa="flash"),
        {**attention_row("triton"), "gate": "failed: out"},
    ]
    for kind in ("forward", "backward", "both"):
        rows[1].pop(f"{kind}_ms")
    lines = tables.attention_gpu_table(saved(rows, GPU))
    assert [line.split(" | ")[1] for line in lines[2:-2]] == ["softmax (flash)"]


def test_decode_table(tables, saved):
    operator = {"kind": "operator", "dtype": "bfloat16", "batch": 64, "heads": 16, "kv_heads": 4, "cache": 4096}
    operator |= {"width": 64, "us": 30.0, "ratio": 0.9, "ratios": {"softmax[cudnn]": 1.1}}
    operator |= {"gb_per_s": 3000.0, "copy_share": 0.7}
    pair = {"kind": "model", "model": "3B", "batch": 1, "cache": 2048, "dtype": "bfloat16"}
    pair |= {"layers": 4, "layers_of_preset": 28, "fields": {"num_hidden_layers": 4}}
    rows = [
        {**operator, "backend": "softmax", "role": "baseline"},
        {**operator, "backend": "triton", "role": "backend"},
        {**operator, "backend": "triton", "role": "backend", "batch": 8, "ratio": 1.2},  # stands in the record
        {"kind": "operator", "backend": "sdpa", "role": "backend", "gate": "skipped: no"},
        {**pair, "side": "softmax", "tokens_per_second": 1000.0, "ratio": 1.0},
        {**pair, "side": "diff", "tokens_per_second": 1010.4, "ratio": 1.0104},
    ]
    lines = tables.decode_table(saved(rows, GPU))
    assert lines[2] == "| triton | 64, 16 / 4, 4096, 64, bf16 | 0.90 | 3000 | 70 % |"
    assert lines[3] == "| `triton`, all 2 |  | 0.90 to 1.20 |  |  |"
    assert lines[7] == "| 3B, 4 of 28 layers, bf16 | 1, 2048 | 1,000 | 1,010 | 1.01 |"
    assert lines[-1].startswith("A GPU, PyTorch 2.11.0")


def test_decode_table_of_a_cpu_shows_one_sequence_by_our_kernel(tables, saved):
    row = {"kind": "operator", "role": "backend", "dtype": "float32", "heads": 4, "kv_heads": 2, "cache": 512}
    row |= {"width": 64, "us": 30.0, "ratio": 1.25, "ratios": {}, "gb_per_s": 9.0, "copy_share": 0.37}
    rows = [{**row, "backend": backend, "batch": batch} for backend in ("blockwise", "sdpa") for batch in (1, 4)]
    lines = tables.decode_table(saved(rows, CPU))
    assert lines[2:4] == ["| blockwise | 1, 4 / 2, 512, 64, fp32 | 1.25 | 9 | 37 % |", ""]
    assert lines[-1] == "A CPU, 2 cores, 2 threads, PyTorch 2.13.0."


def test_throughput_table(tables, saved):
    row = {"model": "3B", "batch": 2, "length": 4096, "dtype": "bfloat16", "layers": 28, "layers_of_preset": 28}
    row |= {"fields": {}}
    for kind in ("forward_backward", "prefill"):
        row |= {f"{kind}_tokens_per_second": 20000.0, f"{kind}_ratio": 1.0, f"{kind}_mfu": 0.5}
    diff = {"forward_backward_tokens_per_second": 19000.0, "forward_backward_ratio": 0.95, "forward_backward_mfu": 0.48}
    diff |= {"forward_backward_paper_ratio": 0.8968}
    lines = tables.throughput_table(saved([{**row, "side": "softmax"}, {**row, "side": "diff", **diff}], CPU))
    assert lines[2] == "| 3B, bf16 | 2 x 4096 | forward + backward | 20,000 | 19,000 | 0.950 | 0.90 | 50 % / 48 % |"
    assert lines[3] == "| 3B, bf16 | 2 x 4096 | prefill | 20,000 | 20,000 | 1.000 |  | 50 % / 50 % |"


def test_tables_appear_with_their_json(tables, saved, monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- decode_gpu -->\nold\n<!-- /decode_gpu -->\n")
    monkeypatch.setattr(tables, "TABLES", {"decode_gpu": (tables.decode_table, tmp_path / "missing.json")})
    assert tables.parts(page) == {}
    path = saved([], CPU)
    monkeypatch.setattr(tables, "TABLES", {"decode_gpu": (tables.decode_table, path)})
    assert tables.parts(page) == {"decode_gpu": "\nA CPU, 2 cores, 2 threads, PyTorch 2.13.0."}
