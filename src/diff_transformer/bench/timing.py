"""Timing in turns on the device's own clock."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

AT_LEAST = 3  # turns per function, even beyond the time limit
COPY_BYTES = {"cuda": 2**32, "cpu": 2**27}


@dataclass(frozen=True)
class Times:
    """Seconds of one function in each of its turns."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; of a single turn, its time."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def over(self, other: "Times") -> float:
        """The median ratio of the turns that both took. A machine that changes its speed changes it little."""
        return statistics.median(own / its for own, its in zip(self.seconds, other.seconds, strict=False))


def ratio(times: Mapping[Any, Times], name: str, baseline: str, kind: str) -> float | None:
    """Time over the baseline's, the median over the turns; None if the baseline was not timed."""
    if (baseline, kind) not in times:
        return None
    return round(times[name, kind].over(times[baseline, kind]), 4)


def on_device(device: str | torch.device) -> AbstractContextManager:
    """Context manager that makes a GPU the current one, on whose stream events, waits and graphs are."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()


def seconds_of(run: Callable[[], object], device: str | torch.device, *, kernels: bool = False) -> float:
    """Seconds of one call, after at least one that does not count.

    Args:
        kernels: on a GPU, the time of the kernels alone, after a flush of its L2 cache, by ``triton.testing.do_bench``;
            otherwise wall-clock time until the device has finished, by ``torch.utils.benchmark``.
    """
    with on_device(device):
        if kernels and torch.device(device).type == "cuda":
            from triton.testing import do_bench

            return do_bench(run, warmup=1, rep=1, return_mode="median") / 1e3
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=1e-3).median


def interleaved_times(
    runs: Mapping[Any, Callable[[], object]],
    repeats: int,
    device: str,
    *,
    seconds: float | None = None,
    kernels: bool = False,
) -> dict[Any, Times]:
    """The times of every function in ``runs``, in turns. Every other turn runs in the opposite order.

    ``seconds`` limits the time of each function: beyond it, and after 3 turns, the function takes no further turn.
    ``kernels``: as in ``seconds_of``.
    """
    seen: dict[Any, list[float]] = {key: [] for key in runs}
    spent = dict.fromkeys(runs, 0.0)
    for repeat in range(repeats):
        playing = [key for key in runs if seconds is None or len(seen[key]) < AT_LEAST or spent[key] < seconds]
        for key in playing if repeat % 2 == 0 else reversed(playing):
            began = time.perf_counter()
            seen[key].append(seconds_of(runs[key], device, kernels=kernels))
            spent[key] += time.perf_counter() - began
    return {key: Times(tuple(values)) for key, values in seen.items()}


def copy_rate(device: str) -> float:
    """GB read and written per second by a large copy of random data, the median of 10."""
    copied = COPY_BYTES[torch.device(device).type]
    source = torch.randint(-128, 127, (copied,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = interleaved_times({"copy": lambda: target.copy_(source)}, 10, device, kernels=True)["copy"]
    return round(2 * copied / times.median / 1e9, 2)
