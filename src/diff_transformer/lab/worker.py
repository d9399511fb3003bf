"""The process of one run: train the model, measure it, write its record.

``python -m diff_transformer.lab.worker FOLDER`` executes ``FOLDER/request.json``. The run goes to ``FOLDER/run``,
progress to ``FOLDER/status.json``, rows of each experiment to ``FOLDER/parts`` until all are in
``FOLDER/rows.jsonl.gz``. A restarted worker keeps finished parts and continues. With ``--ends-with-input`` it exits
when its input closes.
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diff_transformer.errors import UserError
from diff_transformer.evals.provenance import provenance
from diff_transformer.lab.evaluate import experiment, label_of_experiment, run_eval, settings_of
from diff_transformer.lab.processes import ENDS_WITH_INPUT, INTERRUPTED, TERMINATED, write_status
from diff_transformer.lab.rows import ENDING, EXPLORER, FILE, RECALL, read_file, row, write_rows
from diff_transformer.lab.sides import SOURCE
from diff_transformer.lab.spec import PAIR_EVALS, RunSpec
from diff_transformer.memory import keep_freed_memory
from diff_transformer.train.config import RunConfig
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.signals import sigterm_interrupts

PARTS = "parts"
_STEPS = 5  # between two reports of progress


def run(folder: Path) -> None:
    """Train and measure the run of ``folder/request.json``, or continue it, and save its record.

    Raises:
        Diverged: if training diverges, unless the spec's ``may_diverge`` is set.
        Interrupted: after Ctrl-C or SIGTERM during training, once the state is saved.
    """
    import torch

    from diff_transformer.train.loop import Diverged, Trained, train
    from diff_transformer.train.training_data import load_training_data

    spec, started = RunSpec.load(folder), time.perf_counter()
    config, place = spec.config, folder / "run"
    if config.train.threads:
        torch.set_num_threads(config.train.threads)  # also to measure

    def report(step: int, values: dict) -> None:
        if values or step % _STEPS == 0:
            write_status(folder, "training", step, values.get("loss"))

    diverged: str | None = None
    size: dict[str, Any] = {}
    try:
        write_status(folder, "reading the corpus")
        data = load_training_data(config)
        resume = (place / "config.json").exists()
        if spec.side == SOURCE:  # measured as it is
            trained = Trained(place, _start(config, data), data.tokenizer)
        else:
            trained = train(config, place, resume=resume, progress=report, data=data)
        assert trained.model is not None  # false on every rank but the first; a worker is one process
        size = costs(trained.model, config.data.length)
        if spec.measure is None:
            write_status(folder, "trained", config.train.steps)
            return
        measure(spec, folder, trained, data)
    except Diverged as error:
        if not spec.may_diverge:
            raise
        diverged = str(error).split(",")[0]
    seconds = round(time.perf_counter() - started, 1)
    measured = [row for path in sorted((folder / PARTS).glob(f"*{ENDING}")) for row in read_file(path)]
    write_rows(folder / FILE, [*_rows_of_training(spec, folder, size, diverged, seconds), *measured])
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    write_status(folder, "done", config.train.steps)


def costs(model: Any, length: int) -> dict[str, Any]:
    """Parameters of a model, and of one of this package FLOPs and bytes of the cache a token, computed."""
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.cost import model_cost

    counted = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if not isinstance(model.config, DiffTransformerConfig):
        return counted
    cost = model_cost(model.config, length=length)
    return counted | {
        "flops_per_token": cost.flops_per_token, "kv_bytes_per_token": cost.kv_bytes_per_token,
        "intermediate_size": model.config.intermediate_size,
    }  # fmt: skip


def _start(config: RunConfig, data: Any) -> Any:
    import torch

    from diff_transformer.train.initial_model import build_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return build_model(config, data.tokenizer, data.first_rows).eval().to(device)


def measure(spec: RunSpec, folder: Path, trained, data) -> None:
    """Run every experiment of ``spec`` that has no result in ``folder`` yet."""
    from diff_transformer.data.filler import Filler
    from diff_transformer.evals.explorer import explorer_entries
    from diff_transformer.evals.lm import CausalLM

    config = spec.config
    lm = CausalLM(trained.model, trained.tokenizer, spec.name)
    own = CausalLM(trained.model, trained.tokenizer, spec.name, data=data)
    settings = {**settings_of_run(config), **more_experiments(config)}
    for name in spec.measure or ():
        path = folder / PARTS / f"{label_of_experiment(name)}{ENDING}"
        if path.exists():
            continue
        write_status(folder, f"measuring {name}", config.train.steps)
        if name == EXPLORER:
            filler = None if data.text is None else Filler(data.corpus.validation)
            entries = explorer_entries(lm, filler, config)
            maps = [row(EXPLORER, *spec.identity, example=i, entry=each) for i, each in enumerate(entries)]
            if maps:  # a file of rows is never empty
                write_rows(path, maps)
        else:
            model = own if name in PAIR_EVALS else lm
            run_eval(name, model, settings[name], path, identity=spec.identity)


def more_experiments(config: RunConfig) -> dict[str, Any]:
    """The settings of each experiment of ``evaluation.more``.

    Raises:
        ValueError: for an unknown experiment or setting, and for an experiment that is part of every comparison.
    """
    general = {"corpus": config.data.corpus, "length": config.data.length, "seed": config.evaluation.seed}
    if config.train.initial_model is not None:  # also for a class of another library, which was trained on the rest
        general["split"] = "held-out"
    settings = {}
    for name, own in config.evaluation.more.items():
        if name in PAIR_EVALS:
            raise UserError(f"evaluation.more.{name}: {name} is always measured; leave it out")
        if not getattr(experiment(name), "NEEDS_MODEL", True):
            raise UserError(f"evaluation.more.{name}: {name} measures no model; leave it out")
        assignments = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        settings[name] = settings_of(name, general, assignments, quick=True, lenient=True)
    return settings


def settings_of_run(config: RunConfig) -> dict[str, Any]:
    """The settings of ``PAIR_EVALS`` and ``RECALL`` for the model of a run."""
    of, length, corpus = config.evaluation, config.data.length, config.data.corpus
    needles = {"corpus": corpus, "digits": config.data.needles.digits, "seed": of.seed}
    return {
        "needle": settings_of("needle", {
            **needles, "cells": of.needles, "lengths": of.needle_lengths or (length,), "samples": of.samples,
        }),
        "allocation": settings_of("allocation", {
            **needles, "length": length - 4, "samples": of.allocation_samples,
        }),
        "outliers": settings_of("outliers", {"corpus": corpus, "length": length, "samples": of.outlier_rows}),
        "associative_recall": settings_of("associative_recall", {
            "corpus": corpus, "length": length, "samples": of.loss_rows,
        }),
        RECALL: settings_of(RECALL, {"length": length, "seed": of.seed, **dataclasses.asdict(config.data.recall)}),
    }  # fmt: skip


# ---- rows of the training


def _rows_of_training(
    spec: RunSpec, folder: Path, size: dict[str, Any], diverged: str | None, seconds: float
) -> Iterator[dict]:
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    yield from rows_of_curves(lines, *spec.identity)
    norms: dict[str, Any] = gradient_metrics([line["grad_norm"] for line in lines if "loss" in line])
    yield row("gradients", *spec.identity, **norms)
    if size:
        yield row("model", *spec.identity, **size)
    facts = {"config": spec.config.to_dict()} | ({"diverged": diverged} if diverged else {})
    for of, values in (("run", facts), ("training", provenance(seconds=seconds))):
        for key, value in values.items():
            yield row("about", *spec.identity, example=key, of=of, key=key, value=value)


def rows_of_curves(lines: list[dict], side: str, seed: int = 0, setting: str = "") -> Iterator[dict]:
    """The rows of a run's curves, from the lines of its ``metrics.jsonl``."""

    def of(table: str, step: int, **columns: Any) -> dict:
        return row(table, side, seed, setting, example=step, step=step, **columns)

    logged = [line for line in lines if "loss" in line]
    checked = [line for line in lines if "validation_loss" in line]
    for line in logged:
        yield of("training", line["step"], **{name: line[name] for name in ("loss", "grad_norm", "tokens_per_second")})
    for line in checked:
        yield of("validation", line["step"], loss=line["validation_loss"])
    for name in ("recall", "needles"):
        for line in lines:
            if f"{name}_accuracy" in line:
                yield of(f"{name}_curve", line["step"], accuracy=line[f"{name}_accuracy"])
    for source, losses in losses_by_source(logged, [line["step"] for line in checked]).items():
        for step, loss in losses.items():
            yield of("sources", step, source=source, loss=loss)
    for line in logged:
        for layer, value in enumerate(line.get("lambda") or ()):
            yield of("lambda", line["step"], layer=layer, value=value)


def losses_by_source(logged: list[dict], steps: list[int]) -> dict[str, dict[int, float]]:
    """The training loss of each source of the mixture at each of ``steps``: its mean since the step before.

    A step is left out if no batch had the source. Each batch has new needle and recall documents, and new text within
    the first epoch, so the loss is on rows not seen before.
    """
    curves: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(name for line in logged for name in line.get("loss_by_source", {})):
        curves[name] = {}
        for after, until in zip([-1, *steps], steps, strict=False):
            values = [line["loss_by_source"].get(name) for line in logged if after < line["step"] <= until]
            known = [value for value in values if value is not None]
            if known:
                curves[name][until] = round(sum(known) / len(known), 5)
    return curves


def gradient_metrics(norms: list[float]) -> dict[str, float | None]:
    """The median and the largest gradient norm after the first tenth of training, and the number of spikes.

    A spike is a norm of more than three times the median of the (up to) 20 logged before it.
    """
    spikes = 0
    for i in range(5, len(norms)):
        before = sorted(norms[max(0, i - 20) : i])
        spikes += norms[i] > 3 * before[len(before) // 2]
    late = sorted(norms[len(norms) // 10 :])
    if not late:  # diverged before anything was logged
        return {"median": None, "largest": None, "spikes": 0}
    return {"median": late[len(late) // 2], "largest": late[-1], "spikes": spikes}


# ---- the process


def main() -> int:
    """Execute the request in the folder named on the command line. Exit code 130 after Ctrl-C, 143 after SIGTERM."""
    from transformers.utils import logging

    if ENDS_WITH_INPUT in sys.argv:
        threading.Thread(target=_end_with_input, daemon=True).start()
    logging.disable_progress_bar()
    keep_freed_memory()
    try:
        with sigterm_interrupts():
            run(Path(sys.argv[1]))
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "stopped", file=sys.stderr)
        return TERMINATED if getattr(stopped, "number", signal.SIGINT) == signal.SIGTERM else INTERRUPTED
    return 0


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
