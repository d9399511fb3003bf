"""Throughput of trained models, side by side: training steps and forward passes (Table 7)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from diff_transformer.bench.timing import interleaved_times
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result
from diff_transformer.train.loss import Objective


def measure_throughput(
    models: dict[str, nn.Module], ids: Tensor, *, precision: str = "32-true", pass_rows: int = 0, loss_chunk: int = 0,
    repeats: int = 7,
) -> dict[str, Result]:  # fmt: skip
    """A ``Result`` for each model: ``repeats`` measurements of a step on ``ids [B, T]``.

    Models take turns within each repeat, and every other repeat runs in the opposite order, so that a slow moment of
    the machine affects both. The training step is forward, backward, clipping and a fused AdamW update at learning rate
    0, which leaves the weights unchanged.

    Args:
        models: what has ``requires_grad`` is updated.
        precision: that of the training run; "bf16-mixed" autocasts both kinds.
        pass_rows, loss_chunk: rows of a pass of the step, and tokens whose logits it holds at a time; 0 for all.
    """
    kinds = {"train": partial(training_step, rows=pass_rows, chunk=loss_chunk), "forward": _forward}
    runs = {(kind, name): make(model, ids, precision) for kind, make in kinds.items() for name, model in models.items()}
    times = interleaved_times(runs, repeats, str(ids.device))
    facts = {"batch": ids.shape[0], "length": ids.shape[1], "repeats": repeats, "precision": precision}
    results = {}
    for name in models:
        rates = {f"{kind}_tokens_per_second": [ids.numel() / s for s in times[kind, name].seconds] for kind in kinds}
        rows = [{"repeat": i, **{key: rate[i] for key, rate in rates.items()}} for i in range(repeats)]
        results[name] = Result("throughput", rows, provenance(**facts))
    return results


def _autocast(ids: Tensor, precision: str) -> AbstractContextManager:
    return torch.autocast(ids.device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


def training_step(
    model: nn.Module, ids: Tensor, precision: str, *, rows: int = 0, chunk: int = 0
) -> Callable[[], None]:
    """A step on ``ids [B, T]``: forward, backward, clipping and a fused AdamW update at learning rate 0.

    ``rows`` of a pass, and ``chunk`` tokens whose logits it holds at a time; 0 for all.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, objective = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, fused=True), Objective(model, chunk)
    weights = torch.full_like(ids[:, 1:], 1 / ids[:, 1:].numel(), dtype=torch.float32)
    size = rows or len(ids)

    def step():
        model.train()
        for part, weights_of_part in zip(ids.split(size), weights.split(size), strict=True):
            with _autocast(ids, precision):
                loss, _ = objective({"input_ids": part}, part[:, 1:], weights_of_part, True)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _forward(model: nn.Module, ids: Tensor, precision: str) -> Callable[[], None]:
    def forward():
        model.eval()
        with torch.inference_mode(), _autocast(ids, precision):
            model(input_ids=ids, use_cache=False)

    return forward
