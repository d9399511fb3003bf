"""The ablations of Table 6: seven models that differ in their attention alone, trained and measured side by side.

Each row is trained from nothing in ``FOLDER/ROW-seedK``, several at a time in processes of their own; then its loss on
held-out text is split in AR-Hit and Others. What is finished stays: a second call of the same settings trains what is
missing and goes on with what was interrupted.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diff_transformer.checks import differences, require_positive
from diff_transformer.evals.provenance import commit, provenance
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result
from diff_transformer.memory import keep_freed_memory
from diff_transformer.train.config import RunConfig

NEEDS_MODEL = False
SLICES = ("validation", "ar_hit", "others")
SHORT_RUN = 200  # steps below which a run says nothing of the models
_POLL_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Settings:
    """Fields:

    recipe: whose model, data and schedule the seven rows share (the paper's is 1.4B on 10B tokens).
    set: further settings of that recipe, as ("data.corpus=books", "optim.lr=1e-3").
    steps: training steps of each row; the recipe's if None.
    seeds: models of each row, with the recipe's seed and the next ones.
    rows: names of rows to train, of those in ``recipes/ablation.py``; all seven if empty.
    folder: where the runs live; a run there of the same settings is not done again. If empty, beside the result.
    jobs: rows trained at a time; on CPU one a core, on a GPU one, if None.
    """

    recipe: str = "demo"
    set: tuple[str, ...] = dataclasses.field(default=(), metadata={"example": ["optim.lr=1e-3"]})
    steps: int | None = None
    seeds: int = 1
    rows: tuple[str, ...] = dataclasses.field(default=(), metadata={"example": ["transformer", "diff"]})
    folder: str = ""
    jobs: int | None = None


# Seven rows of two dozen steps: that everything works, and nothing about the models.
QUICK: dict = {
    "recipe": "debug", "steps": 24,
    "set": ("data.mixture.needles=0", "data.mixture.recall=0", "evaluation.loss_rows=32"),
}  # fmt: skip


def run(lm, settings: Settings, samples: Samples) -> Result:
    """Make the seven configurations and train them; ``lm`` is not used."""
    from diff_transformer.lab.recipes import recipe
    from diff_transformer.lab.recipes.ablation import ablation_rows
    from diff_transformer.train.config import override

    require_positive(steps=settings.steps)
    base = override(recipe(settings.recipe), list(settings.set))
    if settings.steps is not None:
        base = override(base, [f"train.steps={settings.steps}"])
    rows = ablation_rows(base)
    unknown = sorted(set(settings.rows) - set(rows))
    if unknown:
        raise ValueError(f"no row {', '.join(unknown)}; there are: {', '.join(rows)}")
    chosen = {name: config for name, config in rows.items() if not settings.rows or name in settings.rows}
    return evaluate_ablation(
        chosen, _folder(settings, samples), seeds=settings.seeds, jobs=settings.jobs, samples=samples
    )


def _folder(settings: Settings, samples: Samples) -> Path:
    if settings.folder:
        return Path(settings.folder)
    if samples.journal is None:
        return Path("runs", "ablation")
    return samples.journal.with_name(f"{samples.journal.name.split('.')[0]}-runs")


def evaluate_ablation(
    rows: dict[str, RunConfig],
    folder: Path,
    *,
    seeds: int = 1,
    jobs: int | None = None,
    samples: Samples | None = None,
) -> Result:
    """Train every row ``seeds`` times in ``folder`` and measure its slices on held-out text.

    ``metrics``: ``{row}_{validation,ar_hit,others}`` in nats a token, means over seeds, and ``{row}_parameters``;
    ``rows``: one for each row and seed, with its heads, widths and settings.

    Raises:
        ValueError: if a folder holds a run of other settings.
        RuntimeError: if a run fails, with the end of its log; the others are asked to save and stop.
        KeyboardInterrupt: after Ctrl-C, once all have saved.
    """
    require_positive(seeds=seeds, jobs=jobs)
    samples = Samples() if samples is None else samples
    wanted = [(name, config, seed) for seed in range(seeds) for name, config in rows.items()]
    places = [_prepare(folder, *one) for one in wanted]
    jobs = jobs or _default_jobs()
    measured = samples.rows(
        "rows", places, lambda batch: _measure(batch, folder, jobs, samples), batch_size=len(places)
    )
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(row["row"] for row in measured):
        mine = [row for row in measured if row["row"] == name]
        for key in (*SLICES, "parameters"):
            values = [row[key] for row in mine if row.get(key) is not None]
            if values:
                metrics[f"{name}_{key}"] = float(np.mean(values))
    first = next(iter(rows.values()))
    size = {"steps": first.train.steps, "batch_size": first.train.batch_size, "length": first.data.length}
    shared = {"recipe": first.name.rsplit("-", 1)[0], "seeds": seeds, "jobs": jobs, **size}
    return Result("ablation", shared["recipe"], metrics, measured, provenance(**shared))


def table(result: Result):
    """The result as Table 6 has it, for a terminal: a rich table."""
    from rich.table import Table

    from diff_transformer.lab.recipes.ablation import ROWS

    steps = result.provenance.get("steps", SHORT_RUN)
    short = (
        f"{steps} steps of training: this shows that all rows run, nothing of the models" if steps < SHORT_RUN else None
    )
    shown = Table(title="Loss in nats a token (Table 6)", caption=short, title_justify="left", caption_justify="left")
    for name in ("model", "heads", "d", "head norm", "valid.", "AR-Hit", "Others"):
        shown.add_column(name, justify="left" if name == "model" else "right")
    for row in {entry["row"]: entry for entry in result.rows}.values():
        losses = [result.metrics.get(f"{row['row']}_{key}") for key in SLICES]
        cells = [str(row["heads"]), str(row["head_dim"]), "yes" if row["head_norm"] else "no"]
        label = ROWS[row["row"]][0] if row["row"] in ROWS else row["row"]
        shown.add_row(label, *cells, *("–" if loss is None else f"{loss:.3f}" for loss in losses))
    return shown


def _prepare(folder: Path, name: str, config: RunConfig, seed: int) -> Path:
    """The folder of one run, with its configuration as ``request.json``."""
    place = folder / f"{name}-seed{seed}"
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=config.train.seed + seed))
    request = place / "request.json"
    if request.exists():
        different = differences(RunConfig.load(request).to_dict(), config.to_dict())
        if different:
            listed = "\n  ".join(different)
            raise ValueError(
                f"{place} holds a run of other settings (there against here):\n  {listed}\nchoose another folder"
            )
    else:
        place.mkdir(parents=True, exist_ok=True)
        config.save(request)
    return place


def _default_jobs() -> int:
    import torch

    return 1 if torch.cuda.is_available() else os.cpu_count() or 1


def _measure(places: Sequence[Path], folder: Path, jobs: int, samples: Samples) -> list[dict]:
    """The rows of these runs; those without a result are dealt out to ``jobs`` processes, which read the corpus once
    each."""
    missing = [place for place in places if not (place / "slices.json").exists()]
    workers = [_start(folder / f"worker{i}.log", missing[i::jobs]) for i in range(min(jobs, len(missing)))]
    shown: dict[Path, tuple] = {}
    try:
        while any(worker.poll() is None for worker, _ in workers):
            time.sleep(_POLL_SECONDS)
            _show(missing, shown, samples)
            for worker, log in workers:
                _check(worker, log)
        for worker, log in workers:
            _check(worker, log)
    finally:
        for worker, _ in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
        for worker, _ in workers:
            worker.wait()
    return [json.loads((place / "slices.json").read_text()) for place in places]


def _start(log: Path, places: list[Path]) -> tuple[subprocess.Popen, Path]:
    environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-m", "diff_transformer.lab.ablation", *map(str, places)]
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment), log


def _check(worker: subprocess.Popen, log: Path) -> None:
    if worker.poll() == 130:
        raise KeyboardInterrupt
    if worker.poll():
        lines = log.read_text(errors="replace").strip().splitlines()[-12:]
        raise RuntimeError("\n".join([f"a row failed; the end of {log}:", *lines]))


def _show(places: list[Path], shown: dict[Path, tuple], samples: Samples) -> None:
    """The steps of the runs on the progress bar, where they have changed."""
    for place in places:
        progress = place / "progress.json"
        if samples.bar is not None and progress.exists():
            done, total = json.loads(progress.read_text())
            if shown.get(place) != (done, total):
                samples.bar(place.name, done, total)
                shown[place] = done, total


def train_rows(places: Sequence[Path]) -> None:
    """Train, or go on training, the run that each ``place/request.json`` asks for, and write its row as
    ``slices.json``."""
    from diff_transformer.train.loop import train
    from diff_transformer.train.training_data import load_training_data

    kept: tuple | None = None
    for place in places:
        config = RunConfig.load(place / "request.json")
        asks = (config.data, config.train, config.model["vocab_size"])  # all that the materials depend on
        materials = kept[1] if kept is not None and kept[0] == asks else load_training_data(config)
        kept = (asks, materials)

        def report(step: int, values: dict, place: Path = place, total: int = config.train.steps) -> None:
            if values or step % 5 == 0:
                _replace(place / "progress.json", [step, total])

        print(f"{place.name}: training", flush=True)
        resume = (place / "run" / "config.json").exists()
        trained = train(config, place / "run", resume=resume, progress=report, data=materials)
        result = _slices(trained, materials, place.name)
        _replace(place / "slices.json", _row(place.name, trained.model, config, result))


def _slices(trained, materials, name: str) -> Result:
    """The loss of a finished run on held-out rows, as its recipe's evaluation asks for."""
    from diff_transformer.data.packing import PackedCorpus
    from diff_transformer.evals.associative_recall import evaluate_associative_recall
    from diff_transformer.evals.lm import CausalLM
    from diff_transformer.train.training_data import spread_rows

    asked, length, tokenizer = trained.config.evaluation, trained.config.data.length, materials.tokenizer
    held_out = PackedCorpus.from_documents(materials.corpus.validation, tokenizer, length, shuffle=False)
    return evaluate_associative_recall(
        CausalLM(trained.model, tokenizer, name),
        spread_rows(held_out, min(asked.loss_rows, held_out.num_windows)),
        materials.text.tokens(),
        vocab_size=len(tokenizer),
        n=asked.ngram,
        frequent_share=asked.frequent_share,
    )


def _row(name: str, model, config: RunConfig, result: Result) -> dict:
    made = model.config
    paired = made.attention == "diff"
    norm = made.head_norm if paired else made.softmax_head_norm
    return {
        "row": name.rsplit("-seed", 1)[0],
        "seed": config.train.seed,
        "heads": made.num_diff_heads if paired else made.num_attention_heads,
        "head_dim": made.head_dim,
        "head_norm": bool(norm),
        "lambda_init": made.lambda_init if paired else None,
        "steps": config.train.steps,
        "commit": commit(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{key: result.metrics.get(key) for key in (*SLICES, "ar_hit_share")},
    }


def _replace(path: Path, values) -> None:
    """Write in one move, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    os.replace(partial, path)


def main() -> int:
    """Train the rows whose folders are the arguments; 130 after Ctrl-C or SIGTERM."""
    from transformers.utils import logging

    from diff_transformer.train.loop import Interrupted

    logging.disable_progress_bar()
    keep_freed_memory()
    try:
        train_rows([Path(argument) for argument in sys.argv[1:]])
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
