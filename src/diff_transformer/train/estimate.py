"""About how long a command takes, from the arithmetic of its models and the speed of this machine."""

import os
import re
import time
from functools import cache

import torch

from diff_transformer.model.cost import BF16_PEAK_FLOPS

SHARE = 0.4  # of a device's peak that training and evaluation reach, roughly
_UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60}
_SIDE, _REPEATS = 1024, 4  # of the product that is timed


def about(flops: float, *, peak: float = 0.0, devices: int = 1) -> str:
    """The time of ``flops`` operations in words, such as "about 20 minutes".

    Args:
        peak: FLOP/s of a device; 0 for the first GPU, or else the CPU, of this machine.
    """
    seconds = flops / (SHARE * (peak or peak_here()) * devices)
    unit = next((unit for unit, size in _UNITS.items() if seconds >= 2 * size), None)
    return "less than two minutes" if unit is None else f"about {seconds / _UNITS[unit]:,.0f} {unit}"


def known_peak(device: torch.device) -> float | None:
    """Peak FLOP/s of a GPU in bf16, dense, by its data sheet; None for another device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = (peak for part, peak in BF16_PEAK_FLOPS.items() if re.search(rf"\b{re.escape(part)}\b", name))
    return next(known, None)


@cache
def peak_here() -> float:
    """FLOP/s of this machine's first GPU, or of all cores of its CPU: of the data sheet, else of a timed product."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (peak := known_peak(device)) is not None:
        return peak
    on_cpu, threads = device.type == "cpu", torch.get_num_threads()
    clock = time.thread_time if on_cpu else time.perf_counter  # other processes do not count
    torch.set_num_threads(1 if on_cpu else threads)
    matrix, best = torch.ones(_SIDE, _SIDE, device=device), float("inf")
    for _ in range(_REPEATS):
        start = clock()
        (matrix @ matrix)[0, 0].item()
        best = min(best, clock() - start)
    torch.set_num_threads(threads)
    return 2 * _SIDE**3 / best * ((os.cpu_count() or 1) if on_cpu else 1)
