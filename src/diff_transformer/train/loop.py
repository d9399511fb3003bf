"""The training loop: one for both models of a pair, for every recipe, and for any number of processes.

The model knows one device; ``parallelize.py`` says how it is spread over more, and nothing here depends on that.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from diff_transformer.train.checkpoint import Saver, latest_checkpoint, load_checkpoint, on_first_rank
from diff_transformer.train.config import RunConfig
from diff_transformer.train.heartbeat import Heartbeat
from diff_transformer.train.materials import Materials, build_model, check_model, load_materials, mixture_shares
from diff_transformer.train.metrics import MetricsLog
from diff_transformer.train.mfu import utilisation
from diff_transformer.train.objective import Objective
from diff_transformer.train.optim import learning_rate, make_optimizer, schedule_warning
from diff_transformer.train.parallelize import compile_layers, make_fabric, share_of
from diff_transformer.train.prefetch import prefetched
from diff_transformer.train.run_folder import check_run_folder, open_run_folder, save_model
from diff_transformer.train.signals import Interrupted, StopRequest, stop_requests
from diff_transformer.train.state import TrainingState, whole_model
from diff_transformer.train.step import Outcome, Rows, Stepper, make_rows
from diff_transformer.train.telemetry import by_source, telemetry

__all__ = ["Interrupted", "Trained", "train"]

logger = logging.getLogger("diff_transformer")


@dataclass(frozen=True)
class Trained:
    """A finished run: its folder, the model (unwrapped, in eval mode; None on ranks but the first where it was sharded)
    and its tokenizer."""

    folder: Path
    model: torch.nn.Module | None
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
    announce: Callable[[str], None] | None = None,
) -> Trained:
    """Train the model of ``config`` in ``folder``; save metrics, checkpoints and, at the end, ``folder/model``.

    Started by torchrun, every process calls it; ``progress`` and ``announce`` (what is said once, at the start) are
    called, and files written, by rank 0 alone. ``materials`` are what ``load_materials(config)`` gives, where the
    caller has them already.

    A resumed run continues bit-identically on CPU: the data order is a function of the step, and the checkpoint holds
    model, optimizer and random state. It may go on with another number of processes or another strategy: the batches
    are the same, and losses differ by rounding.

    Raises:
        FileExistsError, ValueError: as ``open_run_folder`` and ``make_fabric``, or for a configuration that does not
            fit together.
        FloatingPointError: if the loss or the gradient norm is not finite; the last checkpoint stays.
        Interrupted: after Ctrl-C or SIGTERM to any process, once the state is saved.
    """
    folder = Path(folder)
    config.validate()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    check_run_folder(folder, resume=resume)
    check_model(config)
    fabric = make_fabric(config)
    short = schedule_warning(config.train.steps, config.optim)
    if short and fabric.is_global_zero:
        logger.warning(short)
    materials = materials or load_materials(config)
    run = Run(fabric, config, folder, materials)  # what does not fit together shows before anything is written
    with ExitStack() as held:
        on_first_rank(fabric, lambda: held.enter_context(open_run_folder(folder, config, resume=resume)) and None)
        return run.train(resume, progress, announce)


class Run:
    """One run on this process: what ``train`` sets up before the first step, and the loop over the steps."""

    def __init__(self, fabric: Fabric, config: RunConfig, folder: Path, materials: Materials):
        self.fabric, self.config, self.folder, self.materials = fabric, config, folder, materials
        settings = config.train
        fabric.seed_everything(settings.seed, verbose=False)
        self.plain = build_model(config, materials.tokenizer)
        if settings.activation_checkpointing:
            self.plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        objective = Objective(self.plain, settings.loss_chunk)
        if settings.compile and fabric.world_size == 1 and settings.parallel.strategy != "fsdp":
            objective.compile()
        elif settings.compile and not hasattr(fabric.strategy, "device_mesh"):
            compile_layers(self.plain)
        model: Any = fabric.setup_module(objective)
        inner = make_optimizer(self.plain, config.optim)
        optimizer: Any = fabric.setup_optimizers(inner)
        self.state = TrainingState(self.plain, inner, sharded_files=settings.parallel.sharded_checkpoints)
        self.stepper = Stepper(fabric, model, optimizer, self.plain, config, materials.tokenizer.eos_token_id)
        self.sources = list(mixture_shares(config))
        self.use = utilisation(
            self.plain.config, config.data.length, fabric.device, settings.precision,
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
        first = self.state.take(loaded, self.config.train.seed)
        if announce is not None and fabric.is_global_zero:
            announce(self.use.formula())
        log = MetricsLog(self.folder, first, active=fabric.is_global_zero)
        try:
            for note in notes:
                log.note(first, note)
            self._steps(first, log, progress if fabric.is_global_zero else None)
        finally:
            self.saver.close()
            log.close()
        model = whole_model(self.plain, fabric.is_global_zero)
        on_first_rank(fabric, lambda: save_model(model, self.materials.tokenizer, self.folder / "model"))
        return Trained(self.folder, model, self.materials.tokenizer, self.config)

    def _steps(self, first: int, log: MetricsLog, progress: Progress | None):
        config, settings, stepper = self.config, self.config.train, self.stepper
        share, materials = share_of(self.fabric), self.materials
        if first == 0:
            start = stepper.validation_loss(materials.validation)
            log.write(0, {"validation_loss": start, **telemetry(self.plain, self.fabric.device)})
        last_saved, clock, tokens = first, time.perf_counter(), 0

        gpu = self.fabric.device.index if self.fabric.device.type == "cuda" else -1

        def prepare(step: int) -> Rows:
            with torch.cuda.device(gpu):  # a new thread begins with the first, and rows are pinned for the current one
                return make_rows(materials, config, share, step)

        batches = prefetched(prepare, first, settings.steps, ahead=settings.prefetch)
        with stop_requests() as stop, self._watched() as at, batches as ready:
            for step in range(first, settings.steps):
                done, last = step + 1, step + 1 == settings.steps
                rate, values = learning_rate(step, settings.steps, config.optim), {}
                at(step, "waiting for data")
                rows = next(ready)
                at(step, "forward and backward")
                logs = done % settings.log_every == 0 or last
                made = stepper.step(rows, rate, stop, by_part=logs)
                tokens += settings.batch_size * config.data.length
                if not made.finite:
                    self.saver.wait()
                    raise FloatingPointError(_not_finite(done, made, self.sources, latest_checkpoint(self.folder)))
                if logs:
                    values = self._logged(made, rate, tokens / (time.perf_counter() - clock))
                if done % settings.validate_every == 0 or last:
                    at(step, "validation")
                    values["validation_loss"] = stepper.validation_loss(materials.validation)
                if values:
                    log.write(done, values)
                    clock, tokens = time.perf_counter(), 0
                if progress is not None:
                    progress(done, values)
                stopping = (made.stop or (stop() and self.fabric.world_size == 1)) and not last
                if done % settings.checkpoint_every == 0 or last or stopping:
                    at(step, "checkpoint")
                    if done != last_saved:
                        log.flush()
                        self.saver.save(done, self.state.to_save(done), values.get("validation_loss"))
                        last_saved = done
                if stopping:
                    self.saver.wait()
                    raise _interrupted(done, self.folder, stop)
            at(settings.steps - 1, "checkpoint")
            self.saver.wait()

    def _logged(self, made: Outcome, rate: float, speed: float) -> dict:
        values: dict = {"loss": made.loss, "lr": rate, "grad_norm": made.norm, "grad_norm_by_part": made.norms}
        values |= {**telemetry(self.plain, self.fabric.device), "tokens_per_second": speed}
        share = self.use.of(speed)
        if share is not None:
            values["mfu"] = share
        if len(self.sources) > 1:
            values["loss_by_source"] = by_source(torch.tensor(made.nats), torch.tensor(made.tokens), self.sources)
        return values

    def _watched(self):
        """What is told where this process is: the other processes, where there are any."""
        fabric, seconds = self.fabric, self.config.train.parallel.stall_seconds
        watched = seconds if fabric.world_size > 1 else 0
        return Heartbeat(fabric.global_rank, fabric.world_size, watched, fabric.broadcast)


def _interrupted(done: int, folder: Path, stop: StopRequest) -> Interrupted:
    said = f"stopped after step {done}, state saved in {folder}; continue with --resume"
    return Interrupted(said) if stop.number is None else Interrupted(said, stop.number)


def _not_finite(done: int, made: Outcome, sources: list[str], saved: Path | None) -> str:
    rows = [name for name, count in zip(sources, made.tokens, strict=True) if count]
    bad = [name for name, total in zip(sources, made.nats, strict=True) if not math.isfinite(total)]
    where = f"not finite on rows of {', '.join(bad)}" if bad else f"on rows of {', '.join(rows)}"
    return (
        f"step {done}: loss {made.loss} {where}, gradient norm {made.norm}; nothing of this step is saved, the last "
        f"checkpoint ({saved or 'none yet'}) is intact. Lower optim.lr, or raise warm-up"
    )
