"""Decoding: one query per sequence over a long cache, and cached generation by the models.

Differential and softmax attention read the same cache: keys [B, 2g, S, d] and as many values, which differential
attention reads as g heads of 2d. Both therefore move the same bytes, and the rate is bytes over time as a share of the
measured copy rate. Calls rotate among caches that together exceed the last-level cache several times. On a GPU one
round is one replayed CUDA graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.bench.contenders import BASELINE, KERNELS, default_kernel, named, sdpa_on
from diff_transformer.bench.gate import is_timed, verdict
from diff_transformer.bench.pair import PairSetting, generation_rows
from diff_transformer.bench.record import Options
from diff_transformer.bench.timing import Times, copy_rate, ratio
from diff_transformer.ops import available_backends, diff_attention, diff_attention_decode
from diff_transformer.testing import assert_within_budget, eager_diff_attention

LAM = 0.3
GATED_SEQUENCES = 2  # sequences of the batch that are compared with the reference
MOST_CACHES = 64
ROTATED_BYTES: int = 2**27  # on the CPU; on a GPU four times its L2 cache


@dataclass(frozen=True)
class DecodeShape:
    """``heads`` differential heads over ``kv_heads`` key/value heads; softmax attention has twice as many of both."""

    batch: int
    heads: int
    kv_heads: int
    cache: int
    width: int

    def bytes(self, itemsize: int) -> int:
        """Bytes that one call must move: keys and values once, queries and output."""
        values = 4 * self.kv_heads * self.cache * self.width + 4 * self.heads * self.width
        return self.batch * values * itemsize

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}/{self.kv_heads}x{self.cache}x{self.width}"


CPU_GRID = [
    DecodeShape(batch, 4, kv_heads, cache, 64)
    for kv_heads in (4, 2)
    for batch in (1, 4)
    for cache in (512, 1024, 2048, 4096)
]
HEADS = ((12, 12, 128), (16, 4, 128), (16, 16, 64), (16, 4, 64))  # h, g, d: that of 3B, then one or four queries a key
GPU_GRID = [  # the most informative first
    DecodeShape(batch, h, g, cache, d)
    for batch, cache in ((1, 4096), (16, 4096), (1, 16384), (64, 1024), (1, 65536), (64, 4096), (4, 16384), (16, 16384))
    for h, g, d in HEADS
]


class KeysValues(NamedTuple):
    """One cache. Softmax attention reads the same memory of ``v`` as [B, 2g, S, d]."""

    k: Tensor  # [B, 2g, S, d]
    v: Tensor  # [B, g, S, 2d]


class Caches:
    """Queries, several caches of one shape, and their correctness gate."""

    def __init__(self, shape: DecodeShape, dtype: torch.dtype, device: str):
        self.shape, self.dtype, self.device = shape, dtype, device
        B, h, g, S, d = shape.batch, shape.heads, shape.kv_heads, shape.cache, shape.width
        self.q = torch.randn(B, 2 * h, 1, d, device=device).to(dtype)
        self.lam = torch.full((), LAM, device=device)
        self.all = [
            KeysValues(
                torch.randn(B, 2 * g, S, d, device=device, dtype=dtype),
                torch.randn(B, g, S, 2 * d, device=device, dtype=dtype),
            )
            for _ in range(how_many(shape, dtype, device))
        ]

    def diff(self, cache: KeysValues, backend: str) -> Tensor:
        """Differential attention, [B, h, 1, 2d]."""
        return diff_attention_decode(*maps_of(self.q, cache.k), cache.v, self.lam, backend=backend)

    def softmax(self, cache: KeysValues, attention: Callable[..., Tensor]) -> Tensor:
        """Softmax attention with twice the heads, [B, 2h, 1, d]."""
        grouped = self.shape.heads != self.shape.kv_heads
        return attention(self.q, cache.k, cache.v.view_as(cache.k), enable_gqa=grouped)

    def gate(self, backend: str) -> None:
        """Raise AssertionError unless the backend is within the numerics budget on the first cache."""
        actual = self.diff(self.all[0], backend)[:GATED_SEQUENCES]
        assert_within_budget(actual, *self._expected, what=f"out over a cache of {self.shape.cache}")

    @cached_property
    def _expected(self) -> tuple[Tensor, Tensor | None]:
        cache = self.all[0]
        q, k, v = (x[:GATED_SEQUENCES] for x in (self.q, cache.k, cache.v))
        q1, q2, k1, k2 = maps_of(q, k)
        doubles = (x.double() for x in (q1, q2, k1, k2, v))
        exact = diff_attention(*doubles, self.lam, backend="reference")
        return exact, None if self.dtype == torch.float32 else eager_diff_attention(q1, q2, k1, k2, v, self.lam)


def maps_of(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the queries and keys of both maps, ``(q1, q2, k1, k2)``: heads 2i and 2i + 1."""
    return q[:, 0::2], q[:, 1::2], k[:, 0::2], k[:, 1::2]


def how_many(shape: DecodeShape, dtype: torch.dtype, device: str) -> int:
    """Number of caches to rotate among."""
    rotated = ROTATED_BYTES
    if torch.device(device).type == "cuda":
        rotated = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_CACHES, -(-rotated // shape.bytes(dtype.itemsize))))


def run_decode_benchmark(
    shapes: list[DecodeShape],
    models: list[PairSetting] | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    *,
    backends: list[str] | None = None,
    kernels: list[str] | None = None,
    repeats: int = 15,
    **options,
) -> dict:
    """Benchmark decoding and return the record.

    A row of kind "operator" has backend, role, dtype, batch, heads, kv_heads, cache, width, gate, us (microseconds a
    call), us_quartiles, ratio (over softmax attention on SDPA's own choice, the median over the turns), ratios over its
    other kernels, gb_per_s and copy_share (of the bytes a call must move), and caches (rotated). Rows of kind
    "model" are those of ``generation_rows``. Parameters as in ``run_attention_benchmark``.
    """
    run = Options(repeats=repeats, **options)
    kernels = ([name for name in KERNELS if name != "math"] if run.cuda else []) if kernels is None else kernels
    rate = copy_rate(run.device)

    def rows(shape: DecodeShape, dtype: torch.dtype) -> Iterator[dict]:
        names = available_backends(run.device, dtype) if backends is None else backends
        names = [name for name in names if name != "reference" or backends is not None]
        yield from measure(Caches(shape, dtype, run.device), names, kernels, rate, run)

    work: list[tuple[str, Callable[[], Iterator[dict]]]] = [
        (f"{shape} in {dtype}", partial(rows, shape, dtype)) for dtype in dtypes for shape in shapes
    ]
    work += [(f"the models at {setting}", partial(generation_rows, setting, run)) for setting in models or []]
    baseline = f"{BASELINE}: scaled_dot_product_attention, 2 * heads, the kernel that PyTorch chooses"
    return run.collect("decode", work, ceilings={"copy_gb_per_s": rate}, baseline=baseline)


@torch.inference_mode()
def measure(caches: Caches, backends: list[str], kernels: list[str], rate: float, options: Options) -> Iterator[dict]:
    """A row for each kernel of the baseline and each backend."""
    shape, first = caches.shape, caches.all[0]
    calls: dict[str, Callable[[KeysValues], Tensor]] = {}
    facts: dict[str, dict] = {}
    values = first.v.view_as(first.k)
    chosen = default_kernel(caches.q, first.k, values, False, enable_gqa=shape.heads != shape.kv_heads)
    for kernel in (None, *(k for k in kernels if k != chosen)):
        name, attention = named(BASELINE, kernel), sdpa_on(kernel)
        calls[name] = partial(caches.softmax, attention=attention)
        facts[name] = {"role": "baseline", "sdpa": kernel or chosen}
    for name in backends:
        calls[name] = partial(caches.diff, backend=name)
        facts[name] = {"role": "backend"}
    runs = {}
    for name, call in calls.items():
        role = facts[name]["role"]
        facts[name]["gate"] = verdict(partial(call, first), None if role == "baseline" else partial(caches.gate, name))
        if is_timed(facts[name]["gate"], role):
            runs[name, "decode"] = as_graph(caches, call)
    times = options.times(runs, kernels=True)
    others = [n for n, _ in runs if facts[n]["role"] == "baseline" and n != BASELINE]
    dtype = str(caches.dtype).removeprefix("torch.")
    for name in calls:
        row = {"kind": "operator", "backend": name, "dtype": dtype, **asdict(shape)} | facts[name]
        if (name, "decode") in runs:
            row |= timed_fields(caches, times[name, "decode"], rate)
            row["ratio"] = ratio(times, name, BASELINE, "decode")
            row["ratios"] = {b: ratio(times, name, b, "decode") for b in others}
        yield row


def as_graph(caches: Caches, call: Callable[[KeysValues], Tensor]) -> Callable[[], object]:
    """A function that runs ``call`` once per cache; on a GPU it replays a CUDA graph."""

    def one_round() -> None:
        for cache in caches.all:
            call(cache)

    if torch.device(caches.device).type != "cuda":
        return one_round
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_round()
    return graph.replay


def timed_fields(caches: Caches, times: Times, copy_gb_per_s: float) -> dict:
    """Time of one call, and the rate at which it moves the bytes it must."""
    count, size = len(caches.all), caches.shape.bytes(caches.q.element_size())
    rate = size * count / times.median / 1e9
    return {
        "us": round(times.median / count * 1e6, 3),
        "us_quartiles": [round(each / count * 1e6, 3) for each in times.quartiles],
        "turns": len(times.seconds),
        "bytes": size,
        "caches": count,
        "gb_per_s": round(rate, 2),
        "copy_share": round(rate / copy_gb_per_s, 4),
    }
