"""One cell of a study in a process of its own: train, measure, keep the numbers."""

import json
import sys
import time
from pathlib import Path

from diff_transformer.durable import write_whole
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result
from diff_transformer.memory import keep_freed_memory
from diff_transformer.train.config import RunConfig
from diff_transformer.train.metrics import read_metrics

POINTS = 60  # of a curve that is kept


def run_cell(folder: Path, *, measured: bool) -> None:
    """Train (or go on training) the run of ``folder/request.json``, measure it, and write ``folder/result.json``.

    A run may diverge: that is a result too (``diverged`` says where), without experiments.
    """
    from diff_transformer.lab.worker import run_member, write_status
    from diff_transformer.train.loop import train

    config, started = RunConfig.load(folder / "request.json"), time.perf_counter()
    diverged = None

    def report(step: int, values: dict):
        if values or step % 5 == 0:
            write_status(folder, "training", step, values.get("loss"))

    try:
        if measured:
            run_member(folder, explorer=False)
        else:
            train(config, folder / "run", resume=(folder / "run" / "config.json").exists(), progress=report)
    except FloatingPointError as stopped:
        diverged = str(stopped).split(",")[0]
    record = summary(folder, config) | {"diverged": diverged, "seconds": round(time.perf_counter() - started, 1)}
    write_whole(folder / "result.json", json.dumps(record) + "\n")


def summary(folder: Path, config: RunConfig) -> dict:
    """The numbers of a finished cell: metrics of every experiment, curves and where they are from; no examples."""
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    logged = [line for line in lines if "loss" in line]
    checked = [line for line in lines if "validation_loss" in line]
    stride = max(1, len(logged) // POINTS)
    results = [Result.load(path) for path in sorted((folder / "evals").glob("*.json"))]
    return {
        "model": config.model,
        "lr": config.optim.lr,
        "seed": config.train.seed,
        "steps": config.train.steps,
        "tokens_per_step": config.train.batch_size * config.data.length,
        "validation": {"step": [x["step"] for x in checked], "loss": [x["validation_loss"] for x in checked]},
        "sources": by_source(logged, [line["step"] for line in checked]),
        "training": {name: [x[name] for x in logged[::stride]] for name in ("step", "loss", "grad_norm")},
        "gradients": gradient_record([line["grad_norm"] for line in logged]),
        "lambda": logged[-1].get("lambda") if logged else None,
        "metrics": {result.eval: result.metrics for result in results},
        "provenance": provenance(),
    }


def by_source(logged: list[dict], steps: list[int]) -> dict[str, list[float | None]]:
    """The training loss of each source of the mixture up to each of ``steps``, a mean over the lines since the step
    before; None where it was not in a batch. Needle and recall documents are made anew for each batch, and so is text
    within its first epoch: there it is a loss on rows not seen before."""
    curves: dict[str, list[float | None]] = {}
    for name in dict.fromkeys(name for line in logged for name in line.get("loss_by_source", {})):
        curves[name] = []
        for after, until in zip([-1, *steps], steps, strict=False):
            values = [line["loss_by_source"].get(name) for line in logged if after < line["step"] <= until]
            known = [value for value in values if value is not None]
            curves[name].append(round(sum(known) / len(known), 5) if known else None)
    return curves


def gradient_record(norms: list[float]) -> dict[str, float | None]:
    """What gradient norms say of stability: their median and largest after the first tenth, and how many spikes.

    A spike is a norm of more than three times the median of the (up to) 20 logged before it.
    """
    spikes = 0
    for i in range(5, len(norms)):
        before = sorted(norms[max(0, i - 20) : i])
        spikes += norms[i] > 3 * before[len(before) // 2]
    late = sorted(norms[len(norms) // 10 :])
    if not late:  # diverged before anything was logged
        return {"median": None, "largest": None, "spikes": 0, "logged": 0}
    return {"median": late[len(late) // 2], "largest": late[-1], "spikes": spikes, "logged": len(norms)}


def main() -> int:
    from transformers.utils import logging

    from diff_transformer.train.loop import Interrupted

    logging.disable_progress_bar()
    keep_freed_memory()
    try:
        run_cell(Path(sys.argv[1]), measured=sys.argv[2] == "measured")
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
