"""``compare``: train the matched pair over several seeds and write ``results.json`` and ``report.html``.

A comparison is a plan for the pool: each side with each seed, plus the variants. When all have finished, ``compare``
times both models in turns, judges the claims, and writes the report.
"""

import dataclasses
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from diff_transformer.checks import differences, require_positive
from diff_transformer.durable import require_writable, write_whole
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result
from diff_transformer.lab.claims import judge, paper_claims
from diff_transformer.lab.pool import Executor, default_jobs, progress_bars, run_pool
from diff_transformer.lab.recipes.recall_study import recall_run
from diff_transformer.lab.record import PAIR, Record, load_run, of_result
from diff_transformer.lab.spec import EXPLORER, RECALL, RunSpec, everything, side_model, with_seed
from diff_transformer.lab.worker import more_experiments
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import model_cost
from diff_transformer.model.matching import LABELS, VARIANTS
from diff_transformer.train.config import RunConfig
from diff_transformer.train.data_config import DataConfig
from diff_transformer.train.run_folder import RunLock

_SPEEDS = ("train_tokens_per_second", "forward_tokens_per_second")
ROWS_OF_TEXT = {"quantization": "rows", "gradient_flow": "samples"}  # experiments on held-out rows, and their number
_NO_EVAL = ("gradients", "model")  # metrics of a record that no experiment measured


def compare(
    config: RunConfig,
    out: Path | str,
    *,
    seeds: int = 1,
    jobs: int | None = None,
    resume: bool = False,
    variants: Sequence[str] = (),
    executor: Executor | None = None,
    console=None,
) -> dict:
    """Train a DIFF Transformer and its matched Transformer, measure both, judge the claims, write the report.

    Both sides get the same data in the same order, batch, steps, learning rate and seed, and equal initial weights in
    all parameters that they share. Seed k of ``seeds`` trains with ``config.train.seed + k``.

    Args:
        config: of either side; ``model.attention`` is set for each.
        out: folder for everything: ``results.json``, ``report.html``, ``members/SIDE-seedK/`` with ``run/model``
            (Hugging Face format), TensorBoard files, metrics, single results and ``record.json``.
        seeds: number of pairs; with ``resume`` it may be larger than before.
        jobs: models trained at a time; by default ``default_jobs``, or all with an ``executor``. If
            ``config.train.threads`` is 0, they share the cores equally, or take one each with an ``executor``; a
            resumed comparison keeps the threads it began with.
        resume: continue an interrupted comparison; finished runs are kept.
        variants: relatives of differential attention to train beside the pair, by their names in ``VARIANTS``
            (``"diff_v2"``, ``"grouped_diff"``, ``"dint"``, ``"fixed_lambda"``, and ``"softmax_norm"``, the Transformer
            with DIFF's head norm, which separates the norm's gain from the subtraction's). Data, steps and seeds are
            equal, and parameter counts agree with the pair's to within 1 %. The claims are about the pair; the
            measurements of ``"softmax_norm"`` stand beside theirs, as a control. Variants of an earlier call in
            ``out`` stay; ``resume`` can add more.
        executor: of the runs, for example ``RayTasks``; processes on this machine by default. The models are timed on
            this machine.

    Returns:
        The content of ``results.json``.

    Raises:
        FileExistsError: if ``out`` is not empty and ``resume`` is False.
        ValueError: for settings that contradict each other, or a ``resume`` with other settings.
        DiskError: if ``out`` is not writable, or another comparison is running in it.
        RunFailed: if training or measuring fails.
        RuntimeError: without the extra ``report``.
    """
    from diff_transformer.report.page import require_installed

    console = console or Console()
    out, started = Path(out), time.perf_counter()
    require_positive(seeds=seeds, jobs=jobs)
    here = 1 if executor else os.cpu_count() or 1  # cores to share
    names = known_variants(variants, out)
    if executor is None:
        jobs = jobs or default_jobs((len(PAIR) + len(names)) * seeds)
    if not config.train.threads:
        threads = _threads_there(out) or max(1, here // (jobs or 1))
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, threads=threads))
    config.validate()
    parallel = config.train.parallel
    if max(parallel.devices, parallel.num_nodes) > 1:
        raise ValueError(
            f"train.parallel.devices is {parallel.devices} and num_nodes {parallel.num_nodes}; a comparison trains "
            "each model in one process: leave them out, or train each side with `diff-transformer train`"
        )
    require_installed()  # what the report at the end needs
    for name in names:
        side_model(config, name)  # raises where the heads do not fit
    _prepare(config, out, seeds, resume)
    with RunLock(out):
        pool = partial(run_pool, jobs=jobs, executor=executor)
        return _compare(config, out, names, seeds, pool, console, started)


def _compare(
    config: RunConfig, out: Path, names: list[str], seeds: int, pool: Callable, console: Console, started: float
) -> dict:
    _write(out / "compare.json", {"seeds": seeds, "config": config.to_dict()})
    if names:
        write_whole(out / "variants.json", json.dumps(names))
    specs = comparison_specs(config, names, seeds)
    runs = {out / ("recall" if spec.setting == RECALL else "members") / spec.name: spec for spec in specs}
    with progress_bars(runs, console) as show:
        pool(runs, show=show)
    records = [load_run(folder, spec.setting, spec.side, spec.seed) for folder, spec in runs.items()]
    with console.status("timing both models in turns"):
        measured = [*records, *throughput(config, out, PAIR, out / "throughput")]
    rows = []
    if names:
        with console.status("timing all variants in turns"):
            speeds = throughput(config, out, [*PAIR, *names], out / "throughput" / "variants")
        rows = variant_rows(config, [*PAIR, *names], records, speeds)
    summary = _summary(config, measured, seeds, _seconds_spent(out, time.perf_counter() - started))
    if rows:
        summary["variants"] = rows
    _write(out / "results.json", summary)

    from diff_transformer.report import render_claims, write_report

    report = write_report(summary, out / "report.html", overwrite=True)
    console.print(render_claims(summary))
    console.print(
        f"report: {report}\nresults: {out / 'results.json'}\nmodels: {out}/members/*/run/model", soft_wrap=True
    )
    return summary


# ---- the plan


def comparison_specs(config: RunConfig, names: Sequence[str], seeds: int) -> list[RunSpec]:
    """The runs of a comparison: the pair with each seed, then each variant of ``names``.

    With ``evaluation.recall_steps``, small ones on recall alone follow. The first pair also writes its attention maps.
    """
    specs, more = [], []
    for sides in (PAIR, names):
        for seed in range(seeds):
            for side in sides:
                trained = with_seed(config, config.train.seed + seed, side_model(config, side))
                maps = (EXPLORER,) if side in PAIR and seed == 0 else ()
                specs.append(RunSpec(config.name, side, seed, trained, (*everything(config), *maps)))
                if config.evaluation.recall_steps:
                    small = recall_run(side, trained.train, config.evaluation.recall_steps)
                    more.append(RunSpec(RECALL, side, seed, small, (RECALL, *maps)))
    return specs + more


def known_variants(names: Iterable[str], out: Path) -> list[str]:
    """The variants of a comparison without the pair: the requested ones and those that ``out`` already has.

    Raises:
        ValueError: for a name that is not in ``VARIANTS``.
    """
    names, path = list(names), out / "variants.json"
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"no variant {', '.join(map(repr, unknown))}; there are: {', '.join(VARIANTS)}")
    earlier = json.loads(path.read_text()) if path.exists() else []
    return [name for name in dict.fromkeys([*earlier, *names]) if name not in PAIR]


def _prepare(config: RunConfig, out: Path, seeds: int, resume: bool) -> None:
    """Create ``out`` for this comparison, or check that it holds this comparison and may be continued."""
    path = out / "compare.json"
    if path.exists():
        if not resume:
            raise FileExistsError(f"{out} holds a comparison already; resume it (--resume) or choose another folder")
        there = json.loads(path.read_text())
        earlier = RunConfig.from_dict(there["config"])
        different = differences({"config": earlier.to_dict()}, {"config": config.to_dict()})
        if different:
            listed = "\n  ".join(different)
            raise ValueError(f"{out} holds a comparison with other settings (saved against given):\n  {listed}")
        if seeds < there["seeds"]:
            raise ValueError(
                f"{out} holds a comparison of {there['seeds']} seeds, more than the given {seeds}; give --seeds "
                f"{there['seeds']} to continue it, a larger number to add seeds, or choose another folder"
            )
    elif out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and holds no comparison; choose another folder")
    else:
        require_writable(out)
        _check_data(config)
        out.mkdir(parents=True, exist_ok=True)
        _write(path, {"seeds": seeds, "config": config.to_dict()})


def _threads_there(out: Path) -> int:
    """Threads per model in the comparison that ``out`` holds; 0 if it holds none."""
    path = out / "compare.json"
    return json.loads(path.read_text())["config"]["train"]["threads"] if path.exists() else 0


def _check_data(config: RunConfig) -> None:
    """Raise for an invalid configuration before the folder is created and any process starts."""
    from diff_transformer.data.evaluation_text import load_rows
    from diff_transformer.data.filler import Filler
    from diff_transformer.evals.needle import check_needle_fits
    from diff_transformer.train.initial_model import check_model
    from diff_transformer.train.training_data import load_training_data

    more = more_experiments(config)
    for side in PAIR:
        check_model(dataclasses.replace(config, model=side_model(config, side)))
    data = load_training_data(config)
    filler, settings = Filler(data.corpus.validation), config.evaluation
    check_needle_fits(
        filler, data.tokenizer, settings.needles, config.data.length, config.data.needles.digits,
        per_cell=settings.samples, seed=settings.seed,
    )  # fmt: skip
    for name, rows in ROWS_OF_TEXT.items():
        wanted = more.get(name)
        if wanted is not None and wanted.split == "auto" and getattr(wanted, rows):
            try:
                load_rows(wanted.corpus, data.tokenizer, wanted.length, getattr(wanted, rows))
            except ValueError as error:
                hint = str(error).replace("--split all", f"--set evaluation.more.{name}.split=all")
                raise ValueError(f"evaluation.more.{name}: {hint}") from None


# ---- the results


def throughput(config: RunConfig, out: Path, sides: Sequence[str], folder: Path) -> list[Record]:
    """Time the trained models of the first seed, alone on the machine, with all threads; results go to ``folder``."""
    import torch

    from diff_transformer.bench.throughput import measure_throughput
    from diff_transformer.model.loading import read_model

    names = [f"{side}-seed0" for side in sides]
    paths = [folder / f"{name}.json" for name in names]
    if not all(path.exists() for path in paths):
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        models = {name: read_model(out / "members" / name / "run" / "model").to(device) for name in names}
        generator = torch.Generator().manual_seed(0)
        shape = (config.train.batch_size, config.data.length)
        ids = torch.randint(0, config.model["vocab_size"], shape, generator=generator).to(device)
        results = measure_throughput(
            models, ids, precision=config.train.precision, repeats=config.evaluation.throughput_repeats
        )
        for path, result in zip(paths, results, strict=True):
            result.save(path)
        torch.set_num_threads(threads)
    return [
        of_result(Result.load(path), setting=config.name, side=side, seed=0)
        for path, side in zip(paths, sides, strict=True)
    ]


def variant_rows(config: RunConfig, sides: Sequence[str], records: Sequence[Record], speeds: Sequence[Record]) -> list:
    """One row per model: its cost and, by seed, the loss on held-out text, the needles found in each cell, and recall.

    Args:
        records: of all runs.
        speeds: throughput of the first seed's models, measured together.
    """
    rows = []
    for side in sides:
        made = DiffTransformerConfig(**side_model(config, side))
        cost = model_cost(made, length=config.data.length)
        of_side = [record for record in records if record.side == side]
        mine = [record for record in of_side if record.setting != RECALL]
        needles = [f"n{n}_r{r}" for n, r in config.evaluation.needles]
        found = {str(r.seed): r.metrics["needle"] for r in mine if "needle" in r.metrics}
        losses = {str(r.seed): r.metrics["associative_recall"] for r in mine if "associative_recall" in r.metrics}
        row: dict[str, Any] = {
            "variant": side,
            "label": LABELS[side],
            "config": made.to_diff_dict(),
            "parameters": cost.total_parameters,
            "flops_per_token": cost.flops_per_token,
            "kv_bytes_per_token": cost.kv_bytes_per_token,
            "intermediate_size": made.intermediate_size,
            "loss": {seed: metrics["validation"] for seed, metrics in losses.items()},
            "needles": {cell: {seed: metrics[cell] for seed, metrics in found.items()} for cell in needles if found},
            "recall": {
                str(record.seed): {"metrics": record.metrics[RECALL], "curve": record.curves[RECALL]}
                for record in of_side
                if record.setting == RECALL
            },
        }
        for speed in speeds:
            if speed.side == side:
                row |= {way: speed.metrics["throughput"][way] for way in _SPEEDS}
        rows.append(row)
    return rows


def _summary(config: RunConfig, measured: list[Record], seeds: int, seconds: float) -> dict:
    """The content of ``results.json``, without the table of variants."""
    records, pair = [record for record in measured if record.side in PAIR], {}
    trained = [record for record in records if record.curves and record.setting != RECALL]
    for side in PAIR:
        model = DiffTransformerConfig(**side_model(config, side))
        cost = model_cost(model, length=config.data.length)
        pair[side] = {
            "parameters": cost.total_parameters,
            "parameters_by_part": cost.parameters,
            "flops_per_token": cost.flops_per_token,
            "config": model.to_diff_dict(),
        }
    total = sum(config.data.mixture.values())
    return {
        "schema": 1,
        "title": "DIFF Transformer against its matched Transformer",
        "recipe": config.name,
        "command": shlex.join(["diff-transformer", *sys.argv[1:]]),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "provenance": provenance(),
        "pair": pair,
        "train": {
            "steps": config.train.steps,
            "batch_size": config.train.batch_size,
            "sequence_length": config.data.length,
            "tokens": config.train.steps * config.train.batch_size * config.data.length,
            "seeds": [config.train.seed + k for k in range(seeds)],
            "corpus": corpus_label(config.data),
            "mixture": {name: share / total for name, share in config.data.mixture.items()},
            "lr": config.optim.lr,
            "config": config.to_dict(),
        },
        "claims": judge(paper_claims(config.evaluation.needles), measured),
        "curves": [_curve(record) for record in trained],
        "evals": [entry for record in records for entry in _evals(record)],
        "explorer": [
            {**entry, "attention": record.side} for record in records for entry in record.rows.get(EXPLORER, ())
        ],
    }


def corpus_label(data: DataConfig) -> str:
    """The corpus as text: ``novels``, or for several corpora ``novels 70 %, code 30 %``."""
    if len(data.corpora) < 2:
        return Path(next(iter(data.corpora), data.corpus)).name
    total = sum(data.corpora.values())
    return ", ".join(f"{Path(name).name} {100 * weight / total:.3g} %" for name, weight in data.corpora.items())


def _evals(record: Record) -> list[dict]:
    """The experiments of a record, in the form of ``results.json``."""
    return [
        {
            "eval": name,
            "model": f"{record.side}-seed{record.seed}",
            "metrics": metrics,
            "rows": record.rows.get(name, []),
            "provenance": record.provenance.get(name, {}),
            "attention": record.side,
            "seed": record.seed,
            **({"curves": {name: record.curves[name]}} if name in record.curves else {}),
        }
        for name, metrics in record.metrics.items()
        if name not in _NO_EVAL
    ]


def _curve(record: Record) -> dict:
    """The curves of a record, in the form of ``results.json``."""
    validation = {f"validation_{name}": values for name, values in record.curves["validation"].items()}
    curve = {"attention": record.side, "seed": record.seed, **record.curves["training"], **validation}
    if record.side == "diff":
        lambdas = record.curves["lambda"]
        curve |= {"lambda": lambdas["layers"], "lambda_init": lambdas["init"]}
    return curve


def _seconds_spent(out: Path, now: float) -> float:
    """Seconds of this call and of earlier, interrupted ones."""
    path = out / "seconds.json"
    total = now + (json.loads(path.read_text()) if path.exists() else 0.0)
    write_whole(path, json.dumps(total))
    return total


def _write(path: Path, values: dict) -> None:
    write_whole(path, json.dumps(values, indent=1) + "\n")
