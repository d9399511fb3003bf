"""Model FLOPs utilisation: what share of a device's peak the model's own arithmetic takes."""

import time
from dataclasses import dataclass

import torch

from diff_transformer.model.training_cost import BF16_PEAK_FLOPS

_SIZE, _REPEATS = 1024, 5


@dataclass(frozen=True)
class Utilisation:
    """``flops_per_token``: of a training step (forward and backward); ``peak``: FLOP/s of one device, None where not
    known; ``source``: where that number is from."""

    flops_per_token: int
    length: int
    peak: float | None
    source: str
    devices: int = 1

    def of(self, tokens_per_second: float) -> float | None:
        """The utilisation at a speed of all devices together; None where the peak is not known."""
        if self.peak is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.peak * self.devices)

    def formula(self) -> str:
        """What ``of`` computes, with its numbers."""
        flops = (
            f"{self.flops_per_token:,} training FLOPs a token (3 x the forward pass at length {self.length}; "
            f"recomputation not counted)"
        )
        if self.peak is None:
            return f"MFU is not reported: {self.source}; set train.peak_flops. {flops}"
        return f"MFU = tokens/s x {flops} / ({self.devices} x {self.peak:.4g} FLOP/s: {self.source})"


def utilisation(config, length: int, device: torch.device, precision: str, *, given: float = 0.0, devices: int = 1):
    """``Utilisation`` of a model's configuration on a device.

    Args:
        given: peak FLOP/s of a device (``train.peak_flops``); 0 for the data sheet's of a known GPU, and a measured
            matrix product on the CPU.
    """
    from diff_transformer.model.cost import model_cost

    flops = model_cost(config, length=length).training_flops_per_token
    if given:
        return Utilisation(flops, length, given, "train.peak_flops", devices)
    if device.type == "cpu":
        dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
        name = str(dtype).removeprefix("torch.")
        source = f"a measured {name} product of {_SIZE} x {_SIZE} matrices on {torch.get_num_threads()} CPU thread(s)"
        return Utilisation(flops, length, matmul_speed(dtype), source, devices)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    for known, peak in BF16_PEAK_FLOPS.items():
        if known in name:
            return Utilisation(flops, length, peak, f"{name}, dense bf16", devices)
    return Utilisation(flops, length, None, f"the peak of {name!r} is not known", devices)


_measured: dict[tuple[torch.dtype, int], float] = {}


def matmul_speed(dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product on the CPU, the best of a few; measured once a process and thread count."""
    key = dtype, torch.get_num_threads()
    if key not in _measured:
        a, b = (torch.full((_SIZE, _SIZE), value, dtype=dtype) for value in (0.5, 0.25))
        times = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        _measured[key] = 2 * _SIZE**3 / min(times[1:])
    return _measured[key]
