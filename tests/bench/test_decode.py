"""The decoding benchmark: both kinds of attention read one cache, and only what is right is timed."""

import pytest
import torch

from diff_transformer.bench import decode as bench
from diff_transformer.bench.contenders import sdpa_on
from diff_transformer.bench.decode import Caches, DecodeShape, how_many
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
    run = bench.as_graph(caches, lambda cache: seen.append(cache.k.data_ptr()))
    run()
    assert len(set(seen)) == len(caches.all) == 2


def test_rate_of_one_call():
    caches = Caches(GROUPED, torch.float32, "cpu")
    calls = len(caches.all)
    fields = bench.timed_fields(caches, Times((calls * 1e-6, calls * 2e-6, calls * 3e-6)), copy_gb_per_s=100.0)
    assert fields["us"] == pytest.approx(2.0)
    assert fields["us_quartiles"] == pytest.approx([1.5, 2.5])
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
    assert rows[1]["gate"].startswith("failed: AssertionError: out over a cache of 50")
    assert "us" not in rows[1]
