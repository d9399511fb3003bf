"""Tokens per second of two models, forward + backward + update and forward alone, timed in turns (Table 7)."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from diff_transformer.checks import require_positive
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result


def measure_throughput(
    models: dict[str, nn.Module], ids: Tensor, *, precision: str = "32-true", repeats: int = 7, steps: int = 3,
    warmup: int = 2,
) -> list[Result]:  # fmt: skip
    """One ``Result`` a model: the median of ``repeats`` measurements of ``steps`` steps on ``ids [B, T]``.

    The models take turns within each repeat, and every other repeat in the opposite order, so that a slow moment of the
    machine hits both. The training step is forward, backward, clipping and a fused AdamW update at learning rate 0,
    which leaves the weights as they are. ``precision``: as a run is trained; with "bf16-mixed" both kinds are autocast.
    """
    require_positive(repeats=repeats, steps=steps)
    kinds = {
        name: {"train": _training_step(model, ids, precision), "forward": _forward(model, ids, precision)}
        for name, model in models.items()
    }
    for name in kinds:
        for run in kinds[name].values():
            for _ in range(warmup):
                run()
    tokens = ids.numel() * steps
    seen: dict[str, list[dict]] = {name: [] for name in models}
    for repeat in range(repeats):
        order = list(models) if repeat % 2 == 0 else list(models)[::-1]
        for kind in ("train", "forward"):
            for name in order:
                if len(seen[name]) <= repeat:
                    seen[name].append({"repeat": repeat})
                seen[name][repeat][f"{kind}_tokens_per_second"] = tokens / _time(kinds[name][kind], steps, ids.device)
    settings = {"batch": ids.shape[0], "length": ids.shape[1], "repeats": repeats, "steps": steps}
    settings["precision"] = precision
    return [Result("throughput", name, _medians(rows), rows, provenance(**settings)) for name, rows in seen.items()]


def _autocast(ids: Tensor, precision: str) -> AbstractContextManager:
    return torch.autocast(ids.device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


def _training_step(model: nn.Module, ids: Tensor, precision: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def step():
        model.train()
        with _autocast(ids, precision):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _forward(model: nn.Module, ids: Tensor, precision: str) -> Callable[[], None]:
    def forward():
        model.eval()
        with torch.inference_mode(), _autocast(ids, precision):
            model(input_ids=ids, use_cache=False)

    return forward


def _time(run: Callable[[], None], steps: int, device: torch.device) -> float:
    """Seconds of ``steps`` runs, none of them of what was queued before."""
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(steps):
        run()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _medians(rows: list[dict]) -> dict[str, float]:
    names = [name for name in rows[0] if name != "repeat"]
    return {name: float(torch.tensor([row[name] for row in rows], dtype=torch.float64).median()) for name in names}
