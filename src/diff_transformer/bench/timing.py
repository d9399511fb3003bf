"""Time of functions that take turns, on the device's own clock."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

AT_LEAST = 3  # turns, whatever the time
HEAD_START = 2_000_000  # cycles, about a millisecond: the host queues a launch-heavy run meanwhile


class Times(NamedTuple):
    """Seconds of one function over its turns."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    turns: int


def summary(seconds: list[float]) -> Times:
    """Median and quartiles (of one value: three times that value)."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Times(statistics.median(seconds), low, high, len(seconds))


class WallClock:
    """For devices that have finished when the call returns."""

    def start(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def read(self, measured: float) -> float:
        return measured


class EventClock:
    """CUDA events around a run. Before it the L2 cache is overwritten, and the device waits until the run is queued."""

    def __init__(self, device: str | torch.device = "cuda"):
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.cold = torch.empty(4 * cache, dtype=torch.uint8, device=device)

    def start(self, run: Callable[[], object]):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
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
    """Median and quartiles of every function of ``runs``: all in turns, every other turn in the opposite order.

    ``seconds`` bounds the time of one function: beyond it, and after three turns, it sits out the rest.
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
