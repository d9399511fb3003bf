"""The training loop: one for both models of a pair, every recipe, and any number of processes.

``train`` checks the configuration and opens the run's folder. ``Run._train_steps`` is the loop. What one step does is
in ``step.py``; how the model is spread over processes is in ``parallelize.py``, and nothing here depends on it.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy

from diff_transformer.durable import remove
from diff_transformer.errors import UserError
from diff_transformer.train.checkpoint import Saver, latest_checkpoint, load_checkpoint
from diff_transformer.train.config import RunConfig
from diff_transformer.train.context_parallel import make_context
from diff_transformer.train.heartbeat import Heartbeat, lost_peers_explained
from diff_transformer.train.initial_model import build_model, check_backend_on, check_model, start_model
from diff_transformer.train.loss import Objective
from diff_transformer.train.metrics import DIGEST, MetricsLog, read_metrics
from diff_transformer.train.parallelize import compile_layers, make_fabric
from diff_transformer.train.ranks import on_first_rank
from diff_transformer.train.recompute import recompute, what_to_recompute
from diff_transformer.train.run_folder import check_run_folder, damaged_model, open_run_folder, save_model
from diff_transformer.train.signals import Interrupted, StopRequest, stop_requests
from diff_transformer.train.state import TrainingState, is_sharded, whole_model
from diff_transformer.train.step import (
    Outcome,
    Stepper,
    learning_rate,
    make_optimizer,
    schedule_warning,
)
from diff_transformer.train.telemetry import by_source, telemetry, utilisation
from diff_transformer.train.training_data import (
    Rows,
    TrainingData,
    load_training_data,
    make_rows,
    prefetched,
    source_names,
)
from diff_transformer.train.weights import choose_weights

__all__ = ["Interrupted", "Trained", "train"]

logger = logging.getLogger("diff_transformer")

Progress = Callable[[int, dict], None]  # called with the number of finished steps and the newest metrics


_RANKS_APART = 1_000_003  # of the seeds of processes with other rows


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    model: torch.nn.Module | None  # unwrapped, in eval mode; of a sharded model None on every rank but the first
    tokenizer: object
    config: RunConfig


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

    A resumed run continues bit by bit on the CPU: the data order is a function of the step, and the checkpoint holds
    model, optimizer and random state. A run may resume with another number of processes or another strategy: the
    batches are the same, and losses differ by rounding.

    Args:
        progress: called on rank 0 after every step.
        data: the result of ``load_training_data(config)``, if the caller has it already.
        announce: called on rank 0 before the first step, with the formula of MFU.

    Raises:
        FileExistsError, ValueError: as ``open_run_folder`` and ``make_fabric``, or for a configuration that is not
            consistent.
        FloatingPointError: if the loss or the gradient norm is not finite. The last checkpoint stays.
        Interrupted: after Ctrl-C or SIGTERM to any process, once the state is saved.
        PeerLost: if another process of the run has ended.
    """
    folder = Path(folder)
    config.validate()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    check_run_folder(folder, resume=resume)
    check_model(config)
    fabric = make_fabric(config)
    check_backend_on(config, fabric.device)
    warning = schedule_warning(config.train.steps, config.optim)
    if warning and fabric.is_global_zero:
        logger.warning(warning)
    data = data or load_training_data(config)
    run = Run(fabric, config, folder, data)  # before anything is written, so that errors leave no folder behind
    deterministic = deterministic_algorithms(config.train.deterministic)
    with lost_peers_explained(folder), ExitStack() as held, deterministic:
        on_first_rank(fabric, lambda: held.enter_context(open_run_folder(folder, config, resume=resume)) and None)
        return run.train(resume, progress, announce)


class Run:
    """One run on this process: the model and what surrounds it, and the loop over the steps."""

    def __init__(self, fabric: Fabric, config: RunConfig, folder: Path, data: TrainingData):
        self.fabric, self.config, self.folder, self.data = fabric, config, folder, data
        settings = config.train
        fabric.seed_everything(settings.seed, verbose=False)
        start = start_model(config, data.tokenizer) if isinstance(fabric.strategy, ModelParallelStrategy) else None
        self.unwrapped_model = build_model(config, data.tokenizer) if start is None else start.model
        choose_weights(self.unwrapped_model, settings)
        context = make_context(fabric, settings.parallel)
        context.apply(self.unwrapped_model)
        recompute(self.unwrapped_model, what_to_recompute(config, self.unwrapped_model.config, fabric))
        objective = Objective(self.unwrapped_model, settings.loss_chunk, start)
        if settings.compile and not hasattr(fabric.strategy, "device_mesh"):
            compile_layers(self.unwrapped_model)
            objective.compile_loss()
        model: Any = fabric.setup_module(objective, move_to_device=start is None)
        inner = make_optimizer(self.unwrapped_model, config.optim)
        optimizer: Any = fabric.setup_optimizers(inner)
        self.state = TrainingState(self.unwrapped_model, inner, sharded_files=settings.parallel.sharded_checkpoints)
        eos_id = data.tokenizer.eos_token_id
        self.stepper = Stepper(fabric, model, optimizer, self.unwrapped_model, config, eos_id, context)
        if self.stepper.batch_part.rank:  # other rows, other masks of dropout
            torch.manual_seed(settings.seed + _RANKS_APART * self.stepper.batch_part.rank)
        self.stop: StopRequest | None = None
        self.sources = source_names(config.data)
        self.utilisation = utilisation(
            self.unwrapped_model.config, config.data.length, fabric.device, settings.precision,
            given=settings.peak_flops, devices=fabric.world_size,
        )  # fmt: skip
        self.saver = Saver(
            fabric,
            folder,
            keep=settings.checkpoint_keep,
            keep_best=settings.checkpoint_best,
            background=settings.checkpoint_async,
        )

    def train(self, resume: bool, progress: Progress | None, announce: Callable[[str], None] | None) -> Trained:
        """Load the last checkpoint if ``resume``, take the remaining steps, save the model."""
        fabric = self.fabric
        loaded = self.state.to_load()
        notes = load_checkpoint(fabric, self.folder, loaded) if resume else []
        resume_step = self.state.take(loaded, self.config.train.seed)
        if 0 < resume_step < self.config.train.steps:
            on_first_rank(fabric, lambda: refuse_other_rows(self.folder, self.data))
        if announce is not None and fabric.is_global_zero:
            announce(self.utilisation.formula())
        log = MetricsLog(
            self.folder, resume_step, active=fabric.is_global_zero, wandb=self.config.train.wandb,
            settings=self.config.to_dict(),
        )  # fmt: skip
        try:
            for note in notes:
                log.note(resume_step, note)
            self._train_steps(resume_step, log, progress if fabric.is_global_zero else None)
        finally:
            self.saver.close()
            log.close()
        model = whole_model(self.unwrapped_model, fabric.is_global_zero)
        finished_before = resume_step >= self.config.train.steps
        on_first_rank(fabric, lambda: self._save_model(model, finished_before))
        if self.stop is not None and self.stop():  # in the last step, or after it
            raise Interrupted(
                f"{self.folder} is finished, and was then asked to stop", self.stop.number or signal.SIGINT
            )
        return Trained(self.folder, model, self.data.tokenizer, self.config)

    def _save_model(self, model, finished_before: bool) -> None:
        """Save the model, unless a run that was finished before has it: it is the user's by now."""
        place = self.folder / "model"
        wrong = damaged_model(place, model) if finished_before and place.exists() else None
        if finished_before and place.exists() and wrong is None:
            return
        if wrong is not None:
            logger.warning("the saved model is damaged: %s. It is written again from the last checkpoint", wrong)
            aside = place.with_name("model.damaged")
            remove(aside)
            place.rename(aside)
        save_model(model, self.data.tokenizer, place, self.config)

    def _train_steps(self, resume_step: int, log: MetricsLog, progress: Progress | None) -> None:
        settings, stepper = self.config.train, self.stepper
        if resume_step == 0:
            start = {**self._validation(), **telemetry(self.unwrapped_model, self.fabric.device)}
            log.write(0, start | ({DIGEST: self.data.digest()} if self.fabric.is_global_zero else {}))
        speed = _Speed()
        with stop_requests() as stop, self._heartbeat() as at, self._batches(resume_step) as batches:
            self.stop = stop
            for step in range(resume_step, settings.steps):
                done = step + 1
                at(step, "waiting for data")
                rows = next(batches)
                at(step, "forward and backward")
                rate, logs = learning_rate(step, settings.steps, self.config.optim), self._due(done, settings.log_every)
                outcome = stepper.step(rows, rate, stop, by_part=logs)
                speed.tokens += settings.batch_size * self.config.data.length
                if not outcome.finite:
                    raise self._not_finite(done, outcome)
                values = self._values(outcome, rate, speed.tokens_per_second()) if logs else {}
                if self._due(done, settings.validate_every):
                    at(step, "validation")
                    values |= self._validation()
                if values:
                    log.write(done, values | speed.checkpoints())
                    speed = _Speed()
                if progress is not None:
                    progress(done, values)
                stopping = done < settings.steps and (outcome.stop or (stop() and self.fabric.world_size == 1))
                if stopping or self._due(done, settings.checkpoint_every):
                    at(step, "checkpoint")
                    with speed.standing_still():
                        log.flush()
                        self.saver.save(done, self.state.to_save(done), values.get("validation_loss"))
                if stopping:
                    raise self._interrupted(done, stop)
            at(settings.steps - 1, "checkpoint")
            self.saver.wait()

    def _validation(self) -> dict[str, float]:
        """The loss on held-out rows, and the accuracy on held-out questions if the mixture has any."""
        data, stepper = self.data, self.stepper
        values = {"validation_loss": stepper.validation_loss(data.validation, data.validation_labels)}
        if self.fabric.world_size == 1 and not is_sharded(self.unwrapped_model):
            values |= {f"{name}_accuracy": stepper.answer_accuracy(*rows) for name, rows in data.questions.items()}
        return values

    def _due(self, done: int, every: int) -> bool:
        """True if an action is due after step ``done``: after each ``every`` steps and after the last step."""
        return done % every == 0 or done == self.config.train.steps

    def _batches(self, resume_step: int):
        """Context of an iterator over this process's rows of each step from ``resume_step``."""
        part, settings = self.stepper.batch_part, self.config.train
        gpu = self.fabric.device.index if self.fabric.device.type == "cuda" else -1

        def prepare(step: int) -> Rows:
            with torch.cuda.device(gpu):  # a new thread starts on the first GPU; rows are pinned for the current one
                return make_rows(self.data, self.config, part, step)

        return prefetched(prepare, resume_step, settings.steps, ahead=settings.prefetch)

    def _heartbeat(self):
        """Context that ends the run if a process stalls; it does nothing for a process alone."""
        fabric = self.fabric
        seconds = self.config.train.parallel.stall_seconds if fabric.world_size > 1 else 0
        return Heartbeat(fabric.global_rank, fabric.world_size, seconds, fabric.broadcast)

    def _values(self, outcome: Outcome, rate: float, speed: float) -> dict:
        """The values of a log line. ``speed``: tokens a second."""
        values: dict = {"loss": outcome.loss, "lr": rate, "grad_norm": outcome.norm, "grad_norm_by_part": outcome.norms}
        values |= {**telemetry(self.unwrapped_model, self.fabric.device), "tokens_per_second": speed}
        mfu = self.utilisation.of(speed)
        if mfu is not None:
            values["mfu"] = mfu
        if len(self.sources) > 1:
            nats, tokens = torch.tensor(outcome.nats), torch.tensor(outcome.tokens)
            values["loss_by_source"] = by_source(nats, tokens, self.sources)
        return values

    def _interrupted(self, done: int, stop: StopRequest) -> Interrupted:
        self.saver.wait()
        message = f"stopped after step {done}, state saved in {self.folder}; continue with --resume"
        return Interrupted(message) if stop.number is None else Interrupted(message, stop.number)

    def _not_finite(self, done: int, outcome: Outcome) -> FloatingPointError:
        """The error of a step whose loss or gradient is not finite, with the sources of the bad rows."""
        self.saver.wait()
        present = [name for name, count in zip(self.sources, outcome.tokens, strict=True) if count]
        bad = [name for name, total in zip(self.sources, outcome.nats, strict=True) if not math.isfinite(total)]
        where = f"not finite on rows of {', '.join(bad)}" if bad else f"on rows of {', '.join(present)}"
        saved = latest_checkpoint(self.folder)
        return FloatingPointError(
            f"step {done}: loss {outcome.loss} {where}, gradient norm {outcome.norm}; nothing of this step is saved, "
            f"the last checkpoint ({saved or 'none yet'}) is intact. Lower optim.lr, or raise optim.warmup_steps"
        )


@contextmanager
def deterministic_algorithms(wanted: bool) -> Generator[None]:
    """Context manager in which PyTorch's operators repeat bit for bit, if ``wanted``; it warns where one cannot.

    PyTorch's attention does without cuDNN and a GPU's flash kernel, whose backward does not repeat (with warn_only).
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    cuda, filling = torch.backends.cuda, memory.fill_uninitialized_memory
    cudnn, flash = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix product starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    cuda.enable_cudnn_sdp(False)
    cuda.enable_flash_sdp(flash and not torch.cuda.is_available())  # the CPU's repeats
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filling
        cuda.enable_cudnn_sdp(cudnn)
        cuda.enable_flash_sdp(flash)


def refuse_other_rows(folder: Path, data: TrainingData) -> None:
    """Raise ValueError if a run has trained on other rows than ``data`` has: its text or tokenizer has changed."""
    known = next((line[DIGEST] for line in read_metrics(folder / "metrics.jsonl") if DIGEST in line), None)
    if known is not None and known != data.digest():
        raise UserError(
            f"{folder} was trained on other rows than these settings give now: the text, its tokenizer or a package "
            "that makes rows has changed; restore it, or begin a new run in another folder"
        )


class _Speed:
    """Training speed since this object was made, and the time for which checkpoints stopped training."""

    def __init__(self):
        self.tokens, self._start, self._stood = 0, time.perf_counter(), 0.0

    def tokens_per_second(self) -> float:
        return self.tokens / (time.perf_counter() - self._start)

    @contextmanager
    def standing_still(self) -> Generator[None]:
        start = time.perf_counter()
        yield
        self._stood += time.perf_counter() - start

    def checkpoints(self) -> dict[str, float]:
        """A value of the log; none if there was no checkpoint."""
        return {"checkpoint_seconds": self._stood} if self._stood else {}
