"""``eval ablation``: the seven models of Table 6, which differ in their attention alone, trained and measured.

An ablation is a plan for the pool. Each row is trained from scratch in ``FOLDER/ROW-seedK``, several at a time. Then
its loss on held-out text is split into AR-Hit and Others. A second call with the same settings trains the missing rows
and resumes interrupted ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diff_transformer.checks import require_extra, require_positive
from diff_transformer.errors import UserError
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.samples import Samples
from diff_transformer.evals.types import Result
from diff_transformer.lab.pool import Executor, default_jobs, run_pool
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.recipes.ablation import ROWS, ablation_rows
from diff_transformer.lab.record import Record, load_run
from diff_transformer.lab.spec import RunSpec, with_seed
from diff_transformer.train.config import RunConfig, override
from diff_transformer.train.run_folder import locked

NEEDS_MODEL = False
EXPERIMENT = "associative_recall"
SLICES = ("validation", "ar_hit", "others")
SHORT_RUN = 200  # a run of fewer steps says nothing about the models


@dataclass(frozen=True)
class Settings:
    """The settings of a training run. The comment at each field documents it."""

    recipe: str = "demo"  # gives all seven rows their model, data and schedule (the paper: 1.4B, 10B tokens)
    # further settings of that recipe
    set: tuple[str, ...] = ()
    steps: int | None = None  # training steps of each row; the recipe's if None
    seeds: int = 1  # models per row; they take the recipe's seed and the next ones
    # names of rows to train, of those in lab/recipes/ablation.py; all seven if empty
    rows: tuple[str, ...] = ()
    folder: str = ""  # folder of the runs; finished runs with these settings are kept. If empty, beside the result
    # rows trained at a time; if None, one on a GPU, one per CPU core (all if fewer than two per core)
    jobs: int | None = None


# Seven rows of two dozen steps show that everything runs. They cannot judge the models.
QUICK: dict = {
    "recipe": "debug", "steps": 24,
    "set": ("data.mixture.needles=0", "data.mixture.recall=0", "evaluation.loss_rows=32"),
}  # fmt: skip


def require_installed() -> None:
    """Raise RuntimeError if the extra for training is not installed."""
    require_extra("train", "training", "lightning", "tensorboard")


def run(lm, settings: Settings, samples: Samples, executor: Executor | None = None) -> Result:
    """Make the seven configurations and train them, with ``executor`` if one is given; ``lm`` is not used."""
    require_positive(steps=settings.steps)
    require_installed()
    base = override(recipe(settings.recipe), list(settings.set))
    if settings.steps is not None:
        base = override(base, [f"train.steps={settings.steps}"])
    rows = ablation_rows(base)
    unknown = sorted(set(settings.rows) - set(rows))
    if unknown:
        raise UserError(f"no row {', '.join(unknown)}; there are: {', '.join(rows)}")
    chosen = {name: config for name, config in rows.items() if not settings.rows or name in settings.rows}
    return evaluate_ablation(
        chosen,
        _folder(settings, samples),
        seeds=settings.seeds,
        jobs=settings.jobs,
        samples=samples,
        executor=executor,
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
    seeds: int = Settings.seeds,
    jobs: int | None = Settings.jobs,
    samples: Samples | None = None,
    executor: Executor | None = None,
) -> Result:
    """Train every row ``seeds`` times in ``folder`` and measure its slices on held-out text.

    Returns:
        ``metrics`` has ``{row}_{validation,ar_hit,others}`` in nats a token, means over seeds, and
        ``{row}_parameters``. ``rows`` has one entry for each row and seed, with its heads, widths and settings.

    Raises:
        ValueError: if a folder holds a run with other settings.
        RunFailed: if a run fails, with the end of its log; the others save and stop.
        Interrupted: after Ctrl-C or SIGTERM, once the runs have saved their states.
        UserError: if another ablation is running in ``folder``.
    """
    require_positive(seeds=seeds, jobs=jobs)
    samples = Samples() if samples is None else samples
    specs = [
        RunSpec("ablation", name, seed, with_seed(config, config.train.seed + seed), (EXPERIMENT,))
        for seed in range(seeds)
        for name, config in rows.items()
    ]
    runs = {folder / spec.name: spec for spec in specs}
    for place, spec in runs.items():
        different = spec.differences(place, evaluation=True)
        if different:
            listed = "\n  ".join(different)
            raise UserError(
                f"{place} holds a run with other settings (saved against given):\n  {listed}\nchoose another folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    jobs = jobs or (len(runs) if executor else default_jobs(len(runs)))
    with locked(folder):
        measured = samples.rows(
            "rows", specs, lambda batch: _measure(batch, folder, jobs, samples, executor), batch_size=len(specs)
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
    """A rich table of the result for a terminal, laid out like Table 6."""
    from rich.table import Table

    steps = result.provenance.get("steps", SHORT_RUN)
    short = (
        f"{steps} steps of training show that every row runs, and nothing about the models"
        if steps < SHORT_RUN
        else None
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


def _measure(
    specs: Sequence[RunSpec], folder: Path, jobs: int, samples: Samples, executor: Executor | None
) -> list[dict]:
    """The rows of these runs, after the pool has finished them."""
    runs = {folder / spec.name: spec for spec in specs}
    shown: dict[Path, int] = {}

    def show(place: Path, status: dict) -> None:
        step = status["step"]
        if samples.bar is not None and step and shown.get(place) != step:
            samples.bar(place.name, step, runs[place].config.train.steps)
            shown[place] = step

    run_pool(runs, jobs=jobs, show=show, executor=executor)
    return [_row(load_run(place)) for place, spec in runs.items()]


def _row(record: Record) -> dict:
    """A line of Table 6."""
    from diff_transformer.model.config import DiffTransformerConfig

    made = DiffTransformerConfig(**record.config["model"])
    paired = made.attention == "diff"
    slices = record.metrics[EXPERIMENT]
    return {
        "row": record.side,
        "seed": record.config["train"]["seed"],
        "heads": made.num_diff_heads if paired else made.num_attention_heads,
        "head_dim": made.head_dim,
        "head_norm": bool(made.head_norm if paired else made.softmax_head_norm),
        "lambda_init": made.lambda_init if paired else None,
        "steps": record.steps,
        "commit": record.provenance["training"]["commit"],
        "parameters": record.metrics["model"]["parameters"],
        **{name: slices.get(name) for name in (*SLICES, "ar_hit_share")},
    }
