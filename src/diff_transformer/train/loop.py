"""The training loop: one for both models of a pair, every recipe, and any number of processes.

``plan = resolve(config, world)`` makes every check, ``run = build(plan, ...)`` the model and what surrounds it, and
``_train_steps`` is the loop. What one step does is in ``step.py``; how the model is spread over processes is in
``parallelize.py``, and nothing here depends on it.
"""

import signal
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric

from diff_transformer.errors import UserError
from diff_transformer.model.dex import set_progress
from diff_transformer.train.checkpoint import Checkpoints, latest_checkpoint
from diff_transformer.train.config import RunConfig
from diff_transformer.train.context_parallel import make_context
from diff_transformer.train.heartbeat import Heartbeat
from diff_transformer.train.initial_model import draw_weights, unfilled_model
from diff_transformer.train.loss import Objective
from diff_transformer.train.metrics import DIGEST, MetricsLog, read_metrics
from diff_transformer.train.parallelize import compile_layers, is_sharded, make_fabric, whole_model
from diff_transformer.train.plan import Plan, check_backend, resolve, world_size
from diff_transformer.train.ranks import on_first_rank
from diff_transformer.train.recompute import recompute
from diff_transformer.train.run_folder import check_run_folder, run_folder, save_model
from diff_transformer.train.signals import Interrupted, StopRequest, stop_requests
from diff_transformer.train.step import Outcome, Stepper, learning_rate, make_optimizer
from diff_transformer.train.telemetry import describe, telemetry
from diff_transformer.train.training_data import TrainingData, load_training_data, make_rows, prefetched
from diff_transformer.train.weights import choose_weights

__all__ = ["Diverged", "Interrupted", "Trained", "train"]

Progress = Callable[[int, dict], None]  # called with the number of finished steps and the newest metrics


class Diverged(UserError):
    """The loss or the gradient norm of a step is not finite."""


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    model: torch.nn.Module | None  # unwrapped, in eval mode; of a sharded model None on every rank but the first
    tokenizer: object


@dataclass(frozen=True)
class Run:
    """A run on this process: its plan, and what it trains with."""

    plan: Plan
    fabric: Fabric
    data: TrainingData
    model: Any  # without its wrappers
    optimizer: torch.optim.Optimizer
    stepper: Stepper


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    data: TrainingData | None = None,
    announce: Callable[[str], None] | None = None,
) -> Trained:
    """Train the model of ``config`` in ``folder``; save metrics, checkpoints and, at the end, ``folder/model``.

    Under torchrun, every process calls this function; rank 0 writes the files.

    A resumed run continues bit by bit on the CPU: rows and random draws are functions of the step, and the checkpoint
    holds model and optimizer. A run may resume with another number of processes or another strategy: the batches are
    the same, and losses differ by rounding.

    Args:
        progress: called on rank 0 after every step.
        data: the result of ``load_training_data(config)``, if the caller has it already.
        announce: called on rank 0 before the first step, with what the run will do and the step that it resumes at.

    Raises:
        UserError: as ``resolve`` and ``run_folder``, before anything is written; as ``Checkpoints``.
        Diverged: if the loss or the gradient norm is not finite. The last checkpoint stays.
        Interrupted: after Ctrl-C or SIGTERM to any process, once the state is saved.
    """
    folder = Path(folder)
    plan = resolve(config, world_size())
    check_run_folder(folder, config, resume=resume)
    with ExitStack() as held:
        if config.train.threads:
            held.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.train.threads)
        fabric = make_fabric(plan)
        run = build(plan, fabric, data or load_training_data(plan.config))
        say = announce if announce is not None and fabric.is_global_zero else lambda text: None
        on_first_rank(fabric, lambda: held.enter_context(run_folder(folder, plan.config, resume=resume)))
        return _train(run, folder, resume, progress if fabric.is_global_zero else None, say)


def build(plan: Plan, fabric: Fabric, data: TrainingData) -> Run:
    """The model of ``plan`` with its initial weights, spread over the processes of ``fabric``, and its optimizer."""
    config, settings = plan.config, plan.config.train
    model = unfilled_model(plan, data.tokenizer, data.first_rows)
    check_backend(model.config, fabric.device, settings.precision)
    choose_weights(model, settings)
    context = make_context(fabric, settings.parallel)
    context.apply(model)
    recompute(model, settings.activation_checkpointing)
    objective = Objective(model, settings.loss_chunk)
    if settings.compile and plan.strategy != "fsdp":
        compile_layers(model)
        objective.compile_loss()
    wrapped: Any = fabric.setup_module(objective)
    if plan.source is None:
        draw_weights(model, settings.seed)
    optimizer = make_optimizer(model, config.optim)
    stepper = Stepper(
        fabric, wrapped, fabric.setup_optimizers(optimizer), model, config, data.tokenizer.eos_token_id, context
    )
    return Run(plan, fabric, data, model, optimizer, stepper)


def _train(run: Run, folder: Path, resume: bool, progress: Progress | None, say: Callable[[str], None]) -> Trained:
    """Load the last checkpoint if ``resume``, take the remaining steps, save the model."""
    fabric, settings, config = run.fabric, run.plan.config.train, run.plan.config
    checkpoints = Checkpoints(folder, fabric, keep=settings.checkpoint_keep, background=settings.checkpoint_async)
    step = checkpoints.load(run.model, run.optimizer) if resume else 0
    if resume and not step:
        on_first_rank(fabric, lambda: refuse_finished(folder))
    say(describe(run.plan))
    if step:
        say(f"continues after step {step:,} of {settings.steps:,}")
    if 0 < step < settings.steps:
        on_first_rank(fabric, lambda: refuse_other_rows(folder, run.data))
    log = None
    if fabric.is_global_zero:
        log = MetricsLog(folder, step, wandb=settings.wandb, settings=config.to_dict())
    with stop_requests() as stop:
        try:
            _train_steps(run, folder, step, checkpoints, log, progress, stop)
            checkpoints.wait()
        finally:
            if log is not None:
                log.close()
        model = whole_model(run.model, fabric.is_global_zero)
        if not (step == settings.steps and (folder / "model").exists()):  # users may have edited it
            on_first_rank(fabric, lambda: save_model(model, run.data.tokenizer, folder / "model"))
    if stop.number is not None:
        raise Interrupted(f"{folder} is finished, and was then asked to stop", stop.number)
    return Trained(folder, model, run.data.tokenizer)


def _train_steps(
    run: Run,
    folder: Path,
    first: int,
    checkpoints: Checkpoints,
    log: MetricsLog | None,
    progress: Progress | None,
    stop: StopRequest,
) -> None:
    config, settings, stepper, last = run.plan.config, run.plan.config.train, run.stepper, run.plan.config.train.steps

    def due(done: int, every: int) -> bool:
        return done % every == 0 or done == last

    if first == 0:
        values = _validation(run) | telemetry(run.model, run.fabric.device)
        if log is not None:
            log.write(0, values | {DIGEST: run.data.digest()})
    if first == last:  # a process that waits for nobody may end before the others watch it
        return
    tokens, since = 0, time.perf_counter()
    with _watched(run) as at, _batches(run, first) as batches:
        for step in range(first, last):
            done = step + 1
            set_progress(run.model, done / last)
            at(step, "data")
            rows = next(batches)
            at(step, "step")
            rate = learning_rate(step, last, config.optim)
            outcome = stepper.step(rows, step, rate, stop, by_part=due(done, settings.log_every))
            tokens += settings.batch_size * config.data.length
            if not outcome.finite:
                checkpoints.wait()
                raise _diverged(folder, done, outcome)
            values = {}
            if due(done, settings.log_every):
                now = time.perf_counter()
                values = _values(run, outcome, rate) | {"tokens_per_second": tokens / (now - since)}
                tokens, since = 0, now
            if due(done, settings.validate_every):
                at(step, "validation")
                values |= _validation(run)
            if values and log is not None:
                log.write(done, values)
            if progress is not None:
                progress(done, values)
            stopping = done < last and (outcome.stop or (stop() and run.plan.world == 1))
            if stopping or due(done, settings.checkpoint_every):
                at(step, "checkpoint")
                checkpoints.save(done, run.model, run.optimizer)
            if stopping:
                checkpoints.wait()
                text = f"stopped after step {done}, state saved in {folder}; continue with --resume"
                raise Interrupted(text, stop.number or signal.SIGTERM)  # which another process may have got


def _validation(run: Run) -> dict[str, float]:
    """The loss on held-out rows, and the accuracy on held-out questions if the mixture has any."""
    data, stepper = run.data, run.stepper
    values = {"validation_loss": stepper.validation_loss(data.validation, data.validation_labels)}
    if run.plan.world == 1 and not is_sharded(run.model):
        values |= {f"{name}_accuracy": stepper.answer_accuracy(*rows) for name, rows in data.questions.items()}
    return values


def _batches(run: Run, first: int):
    """Context of an iterator over this process's rows of each step from ``first``."""
    config, fabric = run.plan.config, run.fabric
    gpu = fabric.device.index if fabric.device.type == "cuda" else -1

    def prepare(step: int):
        with torch.cuda.device(gpu):  # a new thread starts on the first GPU; rows are pinned for the current one
            return make_rows(run.data, config, run.stepper.batch_part, step)

    return prefetched(prepare, first, config.train.steps)


@contextmanager
def _watched(run: Run) -> Generator[Callable[[int, str], None]]:
    """Context that ends the run if a process stalls; it does nothing for a process alone."""
    fabric, seconds = run.fabric, run.plan.config.train.parallel.stall_seconds
    if fabric.world_size == 1 or not seconds:
        yield lambda step, phase: None
        return
    heartbeat = Heartbeat(fabric.global_rank, fabric.world_size, seconds, dist.distributed_c10d._get_default_store())
    heartbeat.start()
    try:
        yield heartbeat.at
    finally:
        heartbeat.over.set()


def _values(run: Run, outcome: Outcome, rate: float) -> dict:
    """The values of a log line."""
    values: dict = {"loss": outcome.loss, "lr": rate, "grad_norm": outcome.norm, "grad_norm_by_part": outcome.norms}
    values |= telemetry(run.model, run.fabric.device)
    sources = [*run.plan.config.data.shares]
    if len(sources) > 1:
        sums = zip(sources, outcome.nats, outcome.tokens, strict=True)
        values["loss_by_source"] = {name: nats / tokens for name, nats, tokens in sums if tokens}
    return values


def _diverged(folder: Path, done: int, outcome: Outcome) -> Diverged:
    return Diverged(
        f"step {done}: loss {outcome.loss}, gradient norm {outcome.norm}; nothing of this step is saved (last "
        f"checkpoint: {latest_checkpoint(folder) or 'none yet'}). Train in another folder with a lower optim.lr or "
        "more optim.warmup_steps"
    )


def refuse_finished(folder: Path) -> None:
    """Raise UserError for a finished run without its checkpoints, which would be trained again from its first step."""
    if (folder / "model").is_dir():
        raise UserError(
            f"{folder} is finished, and its checkpoints are gone; use {folder / 'model'}, or train in another folder"
        )


def refuse_other_rows(folder: Path, data: TrainingData) -> None:
    """Raise UserError if a run has trained on other rows than ``data`` has: its text or tokenizer has changed."""
    known = next((line[DIGEST] for line in read_metrics(folder / "metrics.jsonl") if DIGEST in line), None)
    if known is not None and known != data.digest():
        raise UserError(
            f"{folder} was trained on other rows than these settings give now: the text, its tokenizer or a package "
            "that makes rows has changed; restore it, or begin a new run in another folder"
        )
