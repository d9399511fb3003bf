"""Timing in turns on the device's own clock, and the measured peak rates of a device."""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

AT_LEAST = 3  # turns per function, even beyond the time limit
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


def ratio(times: Mapping[Any, Times], name: str, baseline: str, kind: str) -> float | None:
    """Time over the baseline's, the median over the turns; None if the baseline was not timed."""
    if (baseline, kind) not in times:
        return None
    return round(times[name, kind].over(times[baseline, kind]), 4)


def summary(seconds: list[float]) -> Times:
    """Median and quartiles; of a single value, that value."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return Times(statistics.median(seconds), low, high, tuple(seconds))


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
    """Median and quartiles of every function in ``runs``, in turns. Every other turn runs in the opposite order.

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
    return {key: summary(values) for key, values in seen.items()}


def ceilings(device: str, dtypes: tuple[torch.dtype, ...], *, repeats: int = 10) -> dict:
    """Measured peak rates of a device: a large matrix product and a large copy, both of random data.

    {"matmul_tflops": {dtype: TFLOP/s}, "copy_gb_per_s": GB read and written per second, and both sizes}; medians of
    ``repeats``.
    """
    kind, rates = torch.device(device).type, {}
    size, copied = MATRIX.get(kind, 1024), COPY_BYTES.get(kind, 2**27)
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        product = {"matmul": lambda a=a, b=b, out=out: torch.mm(a, b, out=out)}
        seconds = interleaved_times(product, repeats, device, kernels=True)["matmul"].median
        rates[str(dtype).removeprefix("torch.")] = round(2 * size**3 / seconds / 1e12, 6)
    source = torch.randint(-128, 127, (copied,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = interleaved_times({"copy": lambda: target.copy_(source)}, repeats, device, kernels=True)["copy"]
    rate = round(2 * copied / copy.median / 1e9, 2)
    return {"matmul_tflops": rates, "matmul_size": size, "copy_gb_per_s": rate, "copy_bytes": copied}
