import json

import pytest
import torch

from diff_transformer.bench import decode, pair, run
from diff_transformer.bench.decode import DecodeShape
from diff_transformer.bench.shapes import Shape
from diff_transformer.errors import UserError


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(run, "default_grid", lambda device, full: [Shape(1, 2, 65, 8)])
    monkeypatch.setattr(decode, "CPU_GRID", [DecodeShape(1, 2, 1, 40, 8)])
    monkeypatch.setitem(pair.MODELS, "cpu", [pair.PairSetting("debug", 1, 16, dtype=torch.float32, tokens=2)])
    setting = pair.PairSetting("debug", 1, 16, {"num_hidden_layers": 1}, torch.float32)
    monkeypatch.setitem(pair.SETTINGS, "cpu", [setting])


@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_a_record_and_its_rows(tiny, tmp_path, capsys, name):
    out = tmp_path / "results" / f"{name}.json"
    record = run.run_bench(name, out, repeats=1)
    assert json.loads(out.read_text()) == record
    assert record["benchmark"] == name
    printed = capsys.readouterr().out
    assert {"attention": "blockwise", "decode": "debug diff"}.get(name, "debug softmax") in printed
    assert f"record: {out}" in printed


def test_nothing_is_overwritten_unasked(tiny, tmp_path):
    out = tmp_path / "attention.json"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"exists; choose another --out, or leave it out"):
        run.run_bench("attention", out, repeats=1, backends=["blockwise"])
    assert out.read_text() == "mine"


def test_a_grid_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = run.run_bench("attention", grid="1x1x20x8n", repeats=1, backends=["blockwise"])
    assert {(row["length"], row["causal"]) for row in record["rows"]} == {(20, False)}
    (written,) = (tmp_path / "runs" / "bench").iterdir()
    assert written.name.startswith("attention-cpu-")


def test_failed_and_skipped_are_printed_whole(tiny, tmp_path, capsys, monkeypatch):
    from diff_transformer.ops import cpu

    attend = cpu.attend
    monkeypatch.setattr(cpu, "attend", lambda *args: attend(*args) * 1.01)
    run.run_bench("attention", tmp_path / "a.json", repeats=1, backends=["blockwise"], kernels=["cudnn"])
    printed = capsys.readouterr().out
    assert "blockwise float32: batch 1 heads 2 length 65 width 8; failed: AssertionError: out" in printed
    assert "softmax[cudnn] bfloat16: batch 1 heads 2 length 65 width 8; skipped: RuntimeError: No " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("toaster",), "no benchmark 'toaster'; there are: attention, decode, throughput"),
        (("decode", None, False, "cpu", "1x1x8x8"), "grid choose shapes of the benchmark 'attention'"),
        (("throughput", None, True), "full and grid choose shapes of .*; 'throughput' has its own"),
        (("attention", None, False, "cpu", "1x1"), "'1x1' is not a shape"),
        (("attention", None, False, "cuda"), "device is 'cuda', which is missing"),
    ],
)
def test_refusals(arguments, message, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        run.run_bench(*arguments)
    assert not list(tmp_path.iterdir())
