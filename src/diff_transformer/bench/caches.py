"""What is decoded over: shapes, and for each several caches of random keys and values with the correctness gate."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.bench.machine import free_memory
from diff_transformer.model.heads import pair_heads
from diff_transformer.ops import diff_attention, diff_attention_decode
from diff_transformer.testing import assert_within_budget, eager_diff_attention

LAM = 0.3
GATED_SEQUENCES = 2  # of the batch are compared with the reference
MOST_CACHES = 64
ROTATED_BYTES: int = 2**27  # on the CPU; on a GPU four times its L2


@dataclass(frozen=True)
class DecodeShape:
    """``heads`` differential heads over ``kv_heads`` of their caches; softmax attention has twice as many of both."""

    batch: int
    heads: int
    kv_heads: int
    cache: int
    width: int

    def bytes(self, itemsize: int) -> int:
        """What one call must move: keys and values once, queries and output."""
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
HEADS = ((12, 12, 128), (16, 4, 128), (16, 16, 64), (16, 4, 64))  # h, g, d: 3B, and one to four heads of a cache
# Batches and caches of a GPU, the most telling first: one long sequence, then many, then the rest by size.
TELLING = ((1, 4096), (16, 4096), (1, 16384), (64, 1024), (1, 65536), (64, 4096), (4, 16384), (16, 16384))
GPU_GRID = sorted(
    (
        DecodeShape(batch, h, g, cache, d)
        for h, g, d in HEADS
        for batch in (1, 4, 16, 64)
        for cache in (1024, 4096, 16384, 65536)
    ),
    key=lambda shape: (*TELLING, (shape.batch, shape.cache)).index((shape.batch, shape.cache)),
)
GPU_SHORT_GRID = [shape for shape in GPU_GRID if (shape.batch, shape.cache) in TELLING]


class KeysValues(NamedTuple):
    """One cache. ``v`` is read as [B, g, S, 2d] or, the same memory, as [B, 2g, S, d]."""

    k: Tensor  # [B, 2g, S, d]
    v: Tensor  # [B, g, S, 2d]


class Caches:
    """Queries and several caches of one shape."""

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
        return diff_attention_decode(*pair_heads(self.q, cache.k), cache.v, self.lam, backend=backend)

    def softmax(self, cache: KeysValues, attention: Callable[..., Tensor]) -> Tensor:
        """Softmax attention with twice the heads, [B, 2h, 1, d]."""
        grouped = self.shape.heads != self.shape.kv_heads
        return attention(self.q, cache.k, cache.v.view_as(cache.k), enable_gqa=grouped)

    def gate(self, backend: str) -> None:
        """Raise AssertionError unless the backend is within the numerics budget in the first cache."""
        actual = self.diff(self.all[0], backend)[:GATED_SEQUENCES]
        assert_within_budget(actual, *self._expected, what=f"out over a cache of {self.shape.cache}")

    @cached_property
    def _expected(self) -> tuple[Tensor, Tensor | None]:
        cache = self.all[0]
        q, k, v = (x[:GATED_SEQUENCES] for x in (self.q, cache.k, cache.v))
        q1, q2, k1, k2 = pair_heads(q, k)
        doubles = (x.double() for x in (q1, q2, k1, k2, v))
        exact = diff_attention(*doubles, self.lam, backend="reference")
        return exact, None if self.dtype == torch.float32 else eager_diff_attention(q1, q2, k1, k2, v, self.lam)


def how_many(shape: DecodeShape, dtype: torch.dtype, device: str) -> int:
    """Caches to rotate among."""
    rotated = ROTATED_BYTES
    if torch.device(device).type == "cuda":
        rotated = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(MOST_CACHES, -(-rotated // shape.bytes(dtype.itemsize))))


def fits(shape: DecodeShape, dtype: torch.dtype, device: str) -> bool:
    """Whether two caches take at most half of the free memory of a GPU."""
    if torch.device(device).type != "cuda":
        return True
    return 2 * shape.bytes(dtype.itemsize) <= free_memory(device) // 2
