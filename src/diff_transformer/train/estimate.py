"""About how long a command takes, from the arithmetic of its models and the speed of this machine."""

import os
import time
from functools import cache

import torch

from diff_transformer.train.config import RunConfig

SHARE = 0.4  # of a device's peak that training and evaluation reach, roughly
_UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60}
_REPEATS = 4


def about(flops: float, *, devices: int = 1) -> str:
    """The time of ``flops`` operations on ``devices`` like this machine's, in words, such as "about 20 minutes"."""
    seconds = flops / (SHARE * peak_here() * devices)
    unit = next((unit for unit, size in _UNITS.items() if seconds >= 2 * size), None)
    return "less than two minutes" if unit is None else f"about {seconds / _UNITS[unit]:,.0f} {unit}"


def training_flops(config: RunConfig, flops_per_token: float) -> float:
    """FLOPs of a run whose training takes ``flops_per_token``, with its validations: forward passes, a third of it."""
    settings, sources = config.train, 1 + len(config.data.shares.keys() - {"text"})
    validations = 1 + settings.steps // settings.validate_every
    rows = settings.steps * settings.batch_size + validations * settings.validation_rows * sources / 3
    return flops_per_token * rows * config.data.length


@cache
def peak_here() -> float:
    """FLOP/s of this machine's first GPU in bf16, or of all cores of its CPU in fp32, by a timed product."""
    on_cpu, threads = not torch.cuda.is_available(), torch.get_num_threads()
    clock = time.thread_time if on_cpu else time.perf_counter  # other processes do not count
    side, cores = (1024, os.cpu_count() or 1) if on_cpu else (8192, 1)
    torch.set_num_threads(1)
    matrix, best = torch.ones(side, side), float("inf")
    if not on_cpu:
        matrix = matrix.to("cuda", torch.bfloat16)
    for _ in range(_REPEATS):
        start = clock()
        (matrix @ matrix)[0, 0].item()
        best = min(best, clock() - start)
    torch.set_num_threads(threads)
    return 2 * side**3 / best * cores
