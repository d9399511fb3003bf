"""The decoding benchmark: both kinds of attention read one cache, and only what is right is timed."""

from contextlib import contextmanager

import pytest
import torch

from diff_transformer.bench import decode as bench
from diff_transformer.bench import record
from diff_transformer.bench.contenders import sdpa_on
from diff_transformer.bench.decode import Caches, DecodeShape, fits, how_many
from diff_transformer.bench.gate import FAULT
from diff_transformer.bench.timing import Times
from diff_transformer.ops import cpu
from diff_transformer.testing import eager_diff_attention

GROUPED = DecodeShape(batch=3, heads=4, kv_heads=2, cache=50, width=8)


def test_bytes_are_those_of_the_cache_read_once():
    caches = Caches(GROUPED, torch.float32, "cpu")
    cache = caches.all[0]
    out = caches.diff(cache, "reference")
    assert GROUPED.bytes(4) == 4 * (cache.k.numel() + cache.v.numel() + caches.q.numel() + out.numel())
    assert out.shape == (3, 4, 1, 16)


def test_softmax_attention_reads_the_same_memory():
    caches = Caches(GROUPED, torch.float32, "cpu")
    cache = caches.all[0]
    q, k, v = caches.q, cache.k, cache.v.reshape(3, 4, 50, 8)
    expected = eager_diff_attention(q, q, k, k, v, 0.0)
    assert torch.allclose(caches.softmax(cache, sdpa_on(None)), expected, atol=1e-6)


def test_caches_rotate(monkeypatch):
    monkeypatch.setattr(bench, "ROTATED_BYTES", 10 * GROUPED.bytes(2))
    assert how_many(GROUPED, torch.bfloat16, "cpu") == 10
    assert how_many(GROUPED, torch.float32, "cpu") == 5
    monkeypatch.setattr(bench, "ROTATED_BYTES", 1)
    assert how_many(GROUPED, torch.bfloat16, "cpu") == 2
    caches, seen = Caches(GROUPED, torch.float32, "cpu"), []
    run, graph = bench.as_graph(caches, lambda cache: seen.append(cache.k.data_ptr()))
    run()
    assert not graph
    assert len(set(seen)) == len(caches.all) == 2


def test_nothing_is_timed_after_a_fault_of_the_device(monkeypatch):
    def faults(*args):
        raise FAULT("oh no")

    monkeypatch.setattr(cpu, "attend", faults)
    rows = bench.measure(
        Caches(GROUPED, torch.float32, "cpu"), ["blockwise", "sdpa"], [], {}, record.Options(repeats=1)
    )
    with pytest.raises(FAULT, match="oh no"):
        next(rows)


@pytest.mark.parametrize("captures", [True, False])
def test_on_a_gpu_a_round_is_one_graph_where_it_can_be_captured(monkeypatch, captures):
    log = []

    class Graph:
        def replay(self):
            log.append("replay")

    @contextmanager
    def capture(graph):
        log.append("capture")
        yield
        if not captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    caches = Caches(GROUPED, torch.float32, "cpu")
    caches.all = caches.all[:2]
    caches.device = "cuda"
    run, graph = bench.as_graph(caches, lambda cache: log.append("call"))
    assert graph is captures
    run()
    assert log == ["capture", "call", "call", *(["replay"] if captures else ["call", "call"])]


def test_a_shape_that_does_not_fit_is_left_out(monkeypatch):
    size = GROUPED.bytes(2)
    for free, expected in ((4 * size, True), (4 * size - 2, False)):
        monkeypatch.setattr(bench, "free_memory", lambda device, free=free: free)
        assert fits(GROUPED, torch.bfloat16, "cuda") is expected
    assert fits(GROUPED, torch.bfloat16, "cpu")


def test_rate_of_one_call():
    caches = Caches(GROUPED, torch.float32, "cpu")
    calls = len(caches.all)
    fields = bench.timed_fields(
        caches, Times(calls * 2e-6, calls * 1e-6, calls * 3e-6, (calls * 2e-6,) * 9), copy_gb_per_s=100.0
    )
    assert fields["us"] == pytest.approx(2.0)
    assert fields["us_quartiles"] == pytest.approx([1.0, 3.0])
    assert fields["gb_per_s"] == pytest.approx(GROUPED.bytes(4) / 2e-6 / 1e9, rel=0.01)
    assert fields["copy_share"] == pytest.approx(fields["gb_per_s"] / 100, abs=1e-3)


def test_rows(kept_times):
    times = kept_times()
    record = bench.run_decode_benchmark([GROUPED], dtypes=(torch.float32,), kernels=["math", "cudnn"], repeats=2)
    rows = {row["backend"]: row for row in record["rows"]}
    assert rows.keys() == {"softmax", "softmax[math]", "softmax[cudnn]", "blockwise", "sdpa"}
    assert rows["softmax"]["ratio"] == 1.0
    assert rows["softmax[cudnn]"]["gate"].startswith("skipped: ")
    for name in ("blockwise", "sdpa"):
        assert rows[name]["gate"] == "passed"
        assert rows[name]["ratio"] == round(times[name, "decode"].over(times["softmax", "decode"]), 4)
        assert rows[name]["ratios"].keys() == {"softmax[math]"}
    assert {"ceilings", "machine", "baseline"} <= record["provenance"].keys()


def test_a_wrong_backend_gets_no_time(monkeypatch):
    attend = cpu.attend
    monkeypatch.setattr(cpu, "attend", lambda *args: attend(*args) * 1.01)
    rows = bench.run_decode_benchmark([GROUPED], dtypes=(torch.float32,), backends=["blockwise"], repeats=1)["rows"]
    assert rows[1]["gate"].startswith("failed: out over a cache of 50")
    assert "us" not in rows[1]


def test_time_runs_out_between_shapes(monkeypatch):
    seen = []
    monkeypatch.setattr(record.time, "monotonic", lambda: 10.0 * len(seen))
    other = DecodeShape(1, 2, 2, 20, 8)
    made = bench.run_decode_benchmark([GROUPED, other], backends=[], repeats=1, seconds=5, on_row=seen.append)
    assert len(made["rows"]) == 1
    assert made["unfinished"] == "out of time before 1x2/2x20x8 in torch.bfloat16"
