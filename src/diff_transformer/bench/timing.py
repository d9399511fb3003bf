"""Interleaved timing on the device's own clock, and the measured peak rates of a device."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

AT_LEAST = 3  # turns per function, even beyond the time limit
HEAD_START = 2_000_000  # cycles, about 1 ms, in which the host queues a run of many launches
MATRIX = {"cuda": 8192, "cpu": 1024}  # rows and columns of the matrix product
COPY_BYTES = {"cuda": 2**32, "cpu": 2**27}


class Times(NamedTuple):
    """Seconds of one function over its turns."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    seconds: tuple[float, ...]  # of each turn

    @property
    def turns(self) -> int:
        return len(self.seconds)

    def over(self, other: "Times") -> float:
        """The median ratio of the turns that both took. A machine that changes its speed changes it little."""
        return statistics.median(own / its for own, its in zip(self.seconds, other.seconds, strict=False))


def summary(seconds: list[float]) -> Times:
    """Median and quartiles; of a single value, that value."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Times(statistics.median(seconds), low, high, tuple(seconds))


class WallClock:
    """Wall-clock time, for devices that have finished when the call returns."""

    def start(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def read(self, measured: float) -> float:
        return measured


def on_device(device: str | torch.device) -> AbstractContextManager:
    """Context manager that makes a GPU the current one, on whose stream events, waits and graphs are."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


class EventClock:
    """CUDA events around a run. First it overwrites the L2 cache and lets the device wait until the run is queued."""

    def __init__(self, device: str | torch.device = "cuda"):
        self.device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.cold = torch.empty(4 * cache, dtype=torch.uint8, device=device)

    def start(self, run: Callable[[], object]):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with on_device(self.device):
            self.cold.zero_()
            torch.cuda._sleep(HEAD_START)
            begin.record()
            run()
            end.record()
        return begin, end

    def read(self, measured) -> float:
        begin, end = measured
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def clock_of(device: str | torch.device):
    return EventClock(device) if torch.device(device).type == "cuda" else WallClock()


def interleaved_times(
    runs: Mapping[Any, Callable[[], object]],
    repeats: int,
    device: str,
    *,
    seconds: float | None = None,
    warmup: int = 2,
) -> dict[Any, Times]:
    """Median and quartiles of every function in ``runs``, in turns. Every other turn runs in the opposite order.

    ``seconds`` limits the time of each function: beyond it, and after 3 turns, the function takes no further turn.
    """
    for run in [*runs.values()] * warmup:
        run()
    clock = clock_of(device)
    seen: dict[Any, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats):
        playing = [k for k in runs if seconds is None or len(seen[k]) < AT_LEAST or sum(seen[k]) < seconds]
        if not playing:
            break
        started = [(key, clock.start(runs[key])) for key in (playing if repeat % 2 == 0 else reversed(playing))]
        for key, measured in started:
            seen[key].append(clock.read(measured))
    return {key: summary(values) for key, values in seen.items()}


def ceilings(
    device: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    repeats: int = 10,
    size: int | None = None,
    copied: int | None = None,
) -> dict:
    """Measured peak rates of a device: a large matrix product and a large copy, both of random data.

    {"matmul_tflops": {dtype: TFLOP/s}, "copy_gb_per_s": GB read and written per second, and both sizes}; medians of
    ``repeats``. ``size``: rows and columns of the matrices. ``copied``: bytes to copy.
    """
    kind = torch.device(device).type
    size, copied = size or MATRIX.get(kind, 1024), copied or COPY_BYTES.get(kind, 2**27)
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        times = interleaved_times({"matmul": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}, repeats, device)
        rates[str(dtype).removeprefix("torch.")] = round(2 * size**3 / times["matmul"].median / 1e12, 6)
    source = torch.randint(-128, 127, (copied,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = interleaved_times({"copy": lambda: target.copy_(source)}, repeats, device)["copy"]
    return {
        "matmul_tflops": rates,
        "matmul_size": size,
        "copy_gb_per_s": round(2 * copied / copy.median / 1e9, 2),
        "copy_bytes": copied,
    }
