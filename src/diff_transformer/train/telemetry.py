"""Measurements during training: gradient norms by part, lambda and head-norm gain by layer, memory.

Functions of the model return the same numbers on every rank, also for a sharded model, and every rank must call them.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diff_transformer.model.lambdas import LAMBDAS, LearnedLambda, present_lambda
from diff_transformer.train.estimate import about, training_flops

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


def telemetry(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """The values logged about the weights and the machine: lambda, head-norm gain, memory."""
    values: dict[str, Any] = {}
    for name, layers in (("lambda", layer_lambdas(model)), ("head_norm_gain", head_norm_gains(model))):
        if layers:
            values[name] = layers
    return values | memory_bytes(device)


def gradient_norms(model: nn.Module, total: Tensor | None = None) -> dict[str, float]:
    """The L2 norm of the gradient of each part of the model. Their squares add up to the square of the total.

    Args:
        model: after the backward pass, before gradients are set to None.
        total: the norm before clipping, if gradients were clipped; the parts are scaled back to it.
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
        squares = squares * torch.where(whole > 0, full_tensor(total).to(squares) ** 2 / whole, 1.0)
    return dict(zip(by_part, squares.sqrt().tolist(), strict=True))


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, by its dotted name; "other" if no pattern matches."""
    return next((part for part, pattern in PARTS if re.search(pattern, name)), "other")


def head_norm_gains(model: nn.Module) -> list[float]:
    """The mean magnitude of the head norm's weight in each layer that has one; it scales heads of RMS 1."""
    weights = [full_tensor(p) for name, p in model.named_parameters() if name.endswith("head_norm.weight")]
    return torch.stack([weight.detach().float().abs().mean() for weight in weights]).tolist() if weights else []


def layer_lambdas(model: nn.Module) -> list[float]:
    """Lambda of each layer, as ``DiffTransformerModel.lambdas`` returns it; [] for a model without lambda.

    A lambda that depends on the token is the mean over the tokens that the processes saw last, if it keeps one.
    """
    values = []
    for module in model.modules():
        if not isinstance(module, LAMBDAS) or getattr(module, "mean", 0) is None:
            continue
        mean = getattr(module, "mean", None)
        if isinstance(module, LearnedLambda):
            module = _whole(module)
        value = present_lambda(module)
        if mean is not None and dist.is_initialized():
            summed = mean.clone()
            dist.all_reduce(summed)
            value = summed.item() / dist.get_world_size()
        values.append(value)
    return values


@torch.no_grad()
def _whole(lam: Any) -> Any:
    """A copy of a layer's learned lambda with whole vectors, which may be sharded."""
    parameters = {name: full_tensor(parameter) for name, parameter in lam.named_parameters()}
    with torch.device("meta"):
        copy = type(lam)(len(parameters["lambda_q1"]), lam.initial, lam.std)
    copy.load_state_dict(parameters, assign=True)
    return copy


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Peak bytes of PyTorch's tensors on a GPU since the last call; nothing for the CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"peak_memory_bytes": peak}


def describe(plan: Any) -> str:
    """The announcement of a run of ``plan``: its model, data, amount and about its time, some lines."""
    from diff_transformer.model.convert.from_softmax import nearest
    from diff_transformer.model.cost import model_cost

    config, settings = plan.config, plan.config.train
    tokens = settings.steps * settings.batch_size * config.data.length
    near = nearest(plan.model)
    cost, rough = model_cost(near, length=config.data.length), "about " * (near is not plan.model)
    time = about(training_flops(config, cost.training_flops_per_token), devices=plan.world)
    kind = getattr(plan.model, "attention", plan.model.model_type)
    start = plan.source or f"seed {settings.seed}"
    lines = [
        f"{config.name}: {kind}, {rough}{cost.total_parameters:,} parameters from {start}",
        f"{settings.steps:,} steps of {settings.batch_size:,} rows of {config.data.length:,} tokens, "
        f"{tokens:,} in all, of {config.data.corpus}",
        f"{plan.world} process{'es' * (plan.world > 1)} ({plan.strategy}), {settings.precision}; a checkpoint every "
        f"{settings.checkpoint_every:,} steps",
        time,
    ]
    return "\n".join(lines)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor of one that may be sharded over ranks (a DTensor)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    """In fp32, with one exchange between ranks for all gradients of equal sharding."""
    alike: dict[Any, list[Tensor]] = {}
    for grad in grads:
        sharding = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        alike.setdefault(sharding, []).append(grad)
    norms = [full_tensor(torch.nn.utils.get_total_norm(group)) for group in alike.values()]
    return sum(((norm.float() ** 2).reshape(()) for norm in norms), start=torch.zeros((), device=norms[0].device))
