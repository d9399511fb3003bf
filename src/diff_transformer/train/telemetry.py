"""What is read from a model while it trains: gradient norms by part, lambda and head-norm gain by layer, memory.

Every function gives the same numbers on every rank, whatever is sharded over them, and must be called by all of them.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diff_transformer.train.state import present_lambdas

PARTS = (
    ("lambda", r"lambda|\blam\b"),
    ("head_norm", r"head_norm"),
    ("query", r"\bq_proj\b"),
    ("key", r"\bk_proj\b"),
    ("value", r"\bv_proj\b"),
    ("output", r"\bo_proj\b"),
    ("feed_forward", r"\bmlp\b"),
    ("embedding", r"\bembed_tokens\b"),
    ("head", r"\blm_head\b"),
    ("norms", r"norm"),
)


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, by its dotted name; "other" for what no part claims."""
    return next((part for part, pattern in PARTS if re.search(pattern, name)), "other")


def gradient_norms(model: nn.Module, total: Tensor | None = None) -> dict[str, float]:
    """The L2 norm of the gradient of each part of the model; their squares add up to the square of the total.

    Args:
        model: after the backward pass, before gradients are set to None.
        total: the norm before clipping, where gradients have been clipped since; the parts are scaled back to it.
    """
    by_part: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            by_part.setdefault(part_of(name), []).append(parameter.grad)
    if not by_part:
        return {}
    squares = torch.stack([_sum_of_squares(grads) for grads in by_part.values()])  # [parts]
    if total is not None:
        whole = squares.sum()
        squares = squares * torch.where(whole > 0, full(total).to(squares) ** 2 / whole, 1.0)
    return dict(zip(by_part, squares.sqrt().tolist(), strict=True))


def head_norm_gains(model: nn.Module) -> list[float]:
    """The mean magnitude of the head norm's weight in each layer that has one: what multiplies heads of RMS 1."""
    weights = [full(p) for name, p in model.named_parameters() if name.endswith("head_norm.weight")]
    return torch.stack([weight.detach().float().abs().mean() for weight in weights]).tolist() if weights else []


def layer_lambdas(model: nn.Module) -> list[float]:
    """Lambda of each layer, as ``model.lambdas()`` gives it; [] for a model without."""
    if torch.distributed.is_initialized():
        return present_lambdas(model)
    return model.lambdas().tolist() if hasattr(model, "lambdas") else []  # ty: ignore[not-callable]


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Bytes: on CUDA the most that was allocated since the last call; otherwise what the process holds, and the most
    that it ever held. Recent Linux counts what a process holds core by core and adds up now and then, so that on a
    machine of many cores the number may lack some 2 MB a core."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"memory_bytes": torch.cuda.memory_allocated(device), "peak_memory_bytes": peak}
    return _process_memory()


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over ranks (a DTensor)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def telemetry(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """What is logged of the model's weights and the machine at a log step: lambda, head-norm gain, memory."""
    values: dict[str, Any] = {}
    for name, layers in (("lambda", layer_lambdas(model)), ("head_norm_gain", head_norm_gains(model))):
        if layers:
            values[name] = layers
    return values | memory_bytes(device)


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    """In fp32, with one exchange between ranks for all gradients that are sharded alike."""
    alike: dict[Any, list[Tensor]] = {}
    for grad in grads:
        sharding = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        alike.setdefault(sharding, []).append(grad)
    norms = [full(torch.nn.utils.get_total_norm(group)) for group in alike.values()]
    return sum(((norm.float() ** 2).reshape(()) for norm in norms), start=torch.zeros((), device=norms[0].device))


def _process_memory() -> dict[str, int]:
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        with open("/proc/self/statm") as file:
            return {"memory_bytes": int(file.read().split()[1]) * resource.getpagesize(), "peak_memory_bytes": peak}
    except OSError:
        return {"peak_memory_bytes": peak}


def by_source(sums: Tensor, counts: Tensor, names: Iterable[str]) -> dict[str, float]:
    """Mean loss of each source of the mixture, nats a token, from sums and counts ``[sources]``; sources without a
    token in the batch are left out."""
    pairs = zip(names, full(sums).tolist(), full(counts).tolist(), strict=True)
    return {name: total / count for name, total, count in pairs if count}
