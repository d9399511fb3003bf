"""The training loop: one for both models of a pair and for every recipe.

The loop knows one device. Fabric decides what that device is; sharding is applied to the model from outside.
"""

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor

from diff_transformer.train.checkpoint import latest_checkpoint, open_run_folder, save_checkpoint
from diff_transformer.train.config import RunConfig
from diff_transformer.train.materials import (
    Materials,
    build_model,
    load_materials,
    loss_weights,
    mixture_shares,
    model_inputs,
    without_first_tokens,
)
from diff_transformer.train.metrics import MetricsLog
from diff_transformer.train.optim import learning_rate, make_optimizer


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C or SIGTERM) and has saved its state."""


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, the model (unwrapped, in eval mode) and its tokenizer."""

    folder: Path
    model: torch.nn.Module
    tokenizer: object
    config: RunConfig


Progress = Callable[[int, dict], None]  # called with the number of finished steps and the newest metrics


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    materials: Materials | None = None,
) -> Trained:
    """Train the model of ``config`` in ``folder``; save metrics, checkpoints and, at the end, ``folder/model``.

    ``materials`` are what ``load_materials(config)`` gives, where the caller has them already.

    A resumed run continues bit-identically on CPU: the data order is a function of the step, and the checkpoint
    holds model, optimizer and random state.

    Raises:
        FileExistsError, ValueError: as ``open_run_folder``, or for a configuration that does not fit together.
        FloatingPointError: if the loss or the gradient norm is not finite; the last checkpoint stays.
        Interrupted: after Ctrl-C or SIGTERM, once the state is saved.
    """
    folder = Path(folder)
    config.validate()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    materials = materials or load_materials(config)
    open_run_folder(folder, config, resume=resume)
    fabric = Fabric(accelerator="auto", devices=1, precision=config.train.precision)  # ty: ignore[invalid-argument-type]
    fabric.seed_everything(config.train.seed, verbose=False)
    model = build_model(config, materials.tokenizer)
    if config.train.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain = model
    optimizer = make_optimizer(model, config.optim)
    model, optimizer = fabric.setup(torch.compile(model) if config.train.compile else model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0, "random": torch.get_rng_state()}
    saved = latest_checkpoint(folder) if resume else None
    if saved is not None:
        fabric.load(saved, state)
        torch.set_rng_state(state["random"].cpu())
    log = MetricsLog(folder, state["step"])
    try:
        _run(fabric, model, optimizer, state, config, materials, folder, log, progress)
    finally:
        log.close()
    plain.eval()
    plain.config.use_cache = True
    plain.save_pretrained(folder / "model")
    materials.tokenizer.save_pretrained(folder / "model")
    return Trained(folder, plain, materials.tokenizer, config)


def _run(fabric, model, optimizer, state, config, materials: Materials, folder, log, progress):
    settings, last_saved = config.train, state["step"]
    lambdas = model.module.lambdas if hasattr(model.module, "lambdas") else model.module._orig_mod.lambdas

    def save(step: int):
        nonlocal last_saved
        if step != last_saved:
            state.update(step=step, random=torch.get_rng_state())
            save_checkpoint(fabric, folder, step, state)
            last_saved = step

    if state["step"] == 0:
        start = validation_loss(fabric, model, materials, config.data.documents)
        log.write(0, {"validation_loss": start, **_lambda_entry(lambdas())})
    clock, tokens = time.perf_counter(), 0
    with _stop_requests() as stop_requested:
        for step in range(state["step"], settings.steps):
            rate = learning_rate(step, settings.steps, config.optim)
            loss, norm = _step(fabric, model, optimizer, materials, step, rate, config)
            if not (torch.isfinite(loss) and torch.isfinite(norm)):
                raise FloatingPointError(
                    f"step {step + 1}: loss {loss.item()}, gradient norm {norm.item()}; the last checkpoint "
                    f"({latest_checkpoint(folder) or 'none yet'}) is intact. Lower optim.lr, or raise warm-up"
                )
            done, tokens = step + 1, tokens + settings.batch_size * config.data.length
            values: dict = {}
            if done % settings.log_every == 0 or done == settings.steps:
                elapsed = time.perf_counter() - clock
                values = {"loss": loss.item(), "lr": rate, "grad_norm": norm.item(), **_lambda_entry(lambdas())}
                values["tokens_per_second"] = tokens / elapsed
            if done % settings.validate_every == 0 or done == settings.steps:
                values["validation_loss"] = validation_loss(fabric, model, materials, config.data.documents)
            if values:
                log.write(done, values)
            if "loss" in values or "validation_loss" in values:
                clock, tokens = time.perf_counter(), 0
            if progress is not None:
                progress(done, values)
            if done % settings.checkpoint_every == 0 or done == settings.steps or stop_requested():
                save(done)
            if stop_requested() and done < settings.steps:
                raise Interrupted(f"stopped after step {done}, state saved in {folder}; continue with --resume")


def _step(fabric, model, optimizer, materials, step: int, rate: float, config: RunConfig) -> tuple[Tensor, Tensor]:
    model.train()
    batch, documents, end = materials.mixture.batch(step), config.data.documents, materials.tokenizer.eos_token_id
    if documents == "separate":
        batch["labels"] = without_first_tokens(batch["labels"], batch["input_ids"], end)
    for group in optimizer.param_groups:
        group["lr"] = rate
    pieces = config.train.accumulate
    weights = loss_weights(batch, mixture_shares(config), config.data.loss)
    parts = [torch.from_numpy(array).chunk(pieces) for array in (batch["input_ids"], batch["labels"], weights)]
    total = torch.zeros((), device=fabric.device)
    for i, part in enumerate(zip(*parts, strict=True)):
        with fabric.no_backward_sync(model, enabled=i < pieces - 1):
            x, y, weight = fabric.to_device(part)
            logits = model(**model_inputs(x, documents, end), use_cache=False).logits[:, :-1].float()
            losses = F.cross_entropy(logits.flatten(0, 1), y[:, 1:].flatten(), reduction="none")
            loss = (losses * weight.flatten()).sum()
            fabric.backward(loss)
            total += loss.detach()
    limit = config.optim.grad_clip or float("inf")
    norm = fabric.clip_gradients(model, optimizer, max_norm=limit, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


@torch.no_grad()
def validation_loss(fabric, model, materials: Materials, documents: str = "joined") -> float:
    """Mean negative log-likelihood, nats a token, on the held-out rows of the corpus."""
    model.eval()
    total, count, end = 0.0, 0, materials.tokenizer.eos_token_id
    for rows in materials.validation.split(16):
        rows = fabric.to_device(rows)
        labels = rows
        if documents == "separate":
            labels = fabric.to_device(
                torch.from_numpy(without_first_tokens(rows.cpu().numpy(), rows.cpu().numpy(), end))
            )
        loss = model(**model_inputs(rows, documents, end), labels=labels, use_cache=False).loss
        weight = int((labels[:, 1:] != -100).sum())
        total, count = total + loss.item() * weight, count + weight
    return total / count


def _lambda_entry(lambdas: Tensor) -> dict:
    return {"lambda": lambdas.tolist()} if lambdas.numel() else {}


@contextmanager
def _stop_requests() -> Generator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question that the loop asks between steps; a second Ctrl-C stops at once."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def request(number, frame):
        if requested.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested.set()

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
