"""One model of a comparison: train it, run the experiments on it, write what came out. Runs in a process of its own."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from diff_transformer.durable import write_whole
from diff_transformer.lab.experiments import experiment, run_eval, settings_of
from diff_transformer.memory import keep_freed_memory
from diff_transformer.train.config import RunConfig
from diff_transformer.train.signals import sigterm_interrupts

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes of a member that stopped
EVALS = ("associative_recall", "needle", "allocation", "outliers")


def run_member(folder: Path, *, explorer: bool) -> None:
    """Train (or go on training) the run in ``folder``, then every experiment that has no result there yet.

    The folder holds the run's configuration as ``request.json``; results go to ``evals/NAME.json``, the state of
    affairs to ``status.json``.
    """
    from diff_transformer.evals.lm import CausalLM
    from diff_transformer.train.loop import train
    from diff_transformer.train.training_data import load_training_data

    config = RunConfig.load(folder / "request.json")
    run = folder / "run"

    def report(step: int, values: dict):
        if values or step % 5 == 0:
            write_status(folder, "training", step, values.get("loss"))

    write_status(folder, "reading the corpus")
    materials = load_training_data(config)
    resume = (run / "config.json").exists()
    trained = train(config, run, resume=resume, progress=report, data=materials)
    lm = CausalLM(trained.model, trained.tokenizer, folder.name)
    for name in EVALS:
        path = folder / "evals" / f"{name}.json"
        if not path.exists():
            write_status(folder, f"measuring {name}", config.train.steps)
            _evaluate(name, lm, materials, config).save(path)
    for name, settings in more_experiments(config).items():
        path = folder / "evals" / f"{name}.json"
        if not path.exists():
            write_status(folder, f"measuring {name}", config.train.steps)
            run_eval(name, lm, settings, path, resume=True)
    if explorer and not (folder / "explorer.json").exists():
        from diff_transformer.data.filler import Filler
        from diff_transformer.evals.explorer import explorer_entry

        entry = explorer_entry(lm, Filler(materials.corpus.validation), config)
        write_whole(folder / "explorer.json", json.dumps(entry))
    write_status(folder, "done", config.train.steps)


def more_experiments(config: RunConfig) -> dict[str, Any]:
    """The settings of each experiment of ``evaluation.more``.

    Raises:
        ValueError: for an experiment that does not exist or is part of every comparison, or a setting it does not have;
            for one that reads a corpus, without one of its own, where ``data.corpora`` mixes several.
    """
    corpora = list(config.data.corpora) or [config.data.corpus]
    general = {"corpus": corpora[0], "length": config.data.length, "seed": config.evaluation.seed}
    settings = {}
    for name, own in config.evaluation.more.items():
        if name in EVALS or not getattr(experiment(name), "NEEDS_MODEL", True):
            raise ValueError(f"evaluation.more.{name}: {name} is {'always measured' if name in EVALS else 'no model'}")
        assignments = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        settings[name] = settings_of(name, general, assignments, quick=True, lenient=True)
        if len(corpora) > 1 and hasattr(settings[name], "corpus") and "corpus" not in own:
            raise ValueError(
                f"evaluation.more.{name} reads one corpus, and data.corpora has {', '.join(corpora)}; choose one of "
                f"them, --set evaluation.more.{name}.corpus={corpora[0]}, or leave it out, --set evaluation.more={{}}"
            )
    return settings


def _evaluate(name: str, lm, materials, config: RunConfig):
    from diff_transformer.data.filler import Filler
    from diff_transformer.data.packing import PackedCorpus
    from diff_transformer.evals.allocation import evaluate_allocation
    from diff_transformer.evals.associative_recall import evaluate_associative_recall
    from diff_transformer.evals.needle import evaluate_needle
    from diff_transformer.evals.outliers import evaluate_outliers
    from diff_transformer.train.training_data import spread_rows

    settings, length = config.evaluation, config.data.length
    if name in ("associative_recall", "outliers"):
        wanted = settings.loss_rows if name == "associative_recall" else settings.outlier_rows
        held_out = PackedCorpus.from_documents(materials.corpus.validation, materials.tokenizer, length, shuffle=False)
        rows = spread_rows(held_out, min(wanted, held_out.num_windows))
        if name == "outliers":
            return evaluate_outliers(lm, rows)
        return evaluate_associative_recall(
            lm,
            rows,
            materials.text.tokens(),
            vocab_size=len(materials.tokenizer),
            n=settings.ngram,
            frequent_share=settings.frequent_share,
        )
    filler, digits = Filler(materials.corpus.validation), config.data.needles.digits
    if name == "needle":
        return evaluate_needle(
            lm, filler, settings=settings.needles, length=length, per_cell=settings.samples, digits=digits,
            seed=settings.seed,
        )  # fmt: skip
    return evaluate_allocation(
        lm, filler, length=length - 4, per_cell=settings.allocation_samples, needles=settings.allocation_needles,
        digits=digits, seed=settings.seed,
    )  # fmt: skip


def write_status(folder: Path, stage: str, step: int = 0, loss: float | None = None):
    """Replace ``status.json`` in one move, so that a reader never sees half of it."""
    path = folder / "status.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"stage": stage, "step": step, "loss": loss}))
    os.replace(partial, path)


def read_status(folder: Path) -> dict:
    path = folder / "status.json"
    return json.loads(path.read_text()) if path.exists() else {"stage": "starting", "step": 0, "loss": None}


def main() -> int:
    from transformers.utils import logging

    logging.disable_progress_bar()
    keep_freed_memory()
    folder, explorer = Path(sys.argv[1]), sys.argv[2] == "explorer"
    try:
        with sigterm_interrupts():
            run_member(folder, explorer=explorer)
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "stopped", file=sys.stderr)
        return TERMINATED if getattr(stopped, "number", signal.SIGINT) == signal.SIGTERM else INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
