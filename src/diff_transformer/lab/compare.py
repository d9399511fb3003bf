"""``compare``: the pair over several seeds, from nothing to ``results.json`` and ``report.html``."""

import dataclasses
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from diff_transformer.checks import differences, require_positive
from diff_transformer.durable import require_writable, write_whole
from diff_transformer.evals.provenance import provenance
from diff_transformer.evals.types import Result
from diff_transformer.lab.claims import judge, paper_claims
from diff_transformer.lab.pool import run_pool
from diff_transformer.lab.variants import known_variants, variant_folders, variant_model, variant_rows
from diff_transformer.train.config import DataConfig, RunConfig
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.run_folder import RunLock

SIDES = ("diff", "softmax")


def compare(
    config: RunConfig,
    out: Path | str,
    *,
    seeds: int = 1,
    jobs: int | None = None,
    resume: bool = False,
    variants: Sequence[str] = (),
    console=None,
) -> dict:
    """Train a DIFF Transformer and its matched Transformer, measure both, judge the claims, write the report.

    Both sides get the same data in the same order, batch, steps, learning rate and seed, and equal initial weights in
    all parameters that they share. Seed k of ``seeds`` trains with ``config.train.seed + k``.

    Args:
        config: of either side; ``model.attention`` is set for each.
        out: folder for everything: ``results.json``, ``report.html``, ``members/SIDE-seedK/`` with ``run/model``
            (Hugging Face format), TensorBoard files, metrics and single results.
        seeds: pairs; with ``resume`` more may be asked for than there are.
        jobs: members trained at a time; on CPU one a core, on a GPU one. The cores are divided among them where
            ``config.train.threads`` is 0; a resumed comparison keeps the threads it began with.
        resume: go on with an interrupted comparison; what is finished is not done again.
        variants: relatives of differential attention to train beside the pair, by their names in ``VARIANTS``
            (``"diff_v2"``, ``"grouped_diff"``, ``"dint"``, ``"fixed_lambda"``, and ``"softmax_norm"``, the Transformer
            with DIFF's head norm, which tells the norm's gain from the subtraction's), with equal data, steps and seeds
            and sizes that keep the pair's parameters within 1 %. The claims are about the pair alone. Those of an
            earlier call in ``out`` stay; more can be added with ``resume``.

    Returns:
        What is written to ``results.json``.

    Raises:
        FileExistsError: if ``out`` is not empty and ``resume`` is False.
        ValueError: for settings that do not fit together, or a ``resume`` with other settings.
        DiskError: if ``out`` cannot be written to, or another comparison is at work in it.
        MemberFailed: if training or measuring fails.
    """
    console = console or Console()
    out, started = Path(out), time.perf_counter()
    require_positive(seeds=seeds, jobs=jobs)
    jobs = jobs or _default_jobs(seeds)
    if not config.train.threads:
        threads = _threads_there(out) or max(1, (os.cpu_count() or 1) // jobs)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, threads=threads))
    config.validate()
    names = known_variants(variants, out, SIDES)
    for name in names:
        variant_model(config, name)  # raises where the heads do not fit
    _prepare(config, out, seeds, resume)
    with RunLock(out):
        folders = _member_folders(config, out, seeds)
        return _compare(config, out, folders, names, seeds, jobs, console, started)


def _compare(
    config, out: Path, folders: list[Path], names: list[str], seeds: int, jobs: int, console: Console, started: float
) -> dict:
    more = variant_folders(config, out, names, seeds)
    run_pool([*folders, *more], config.train.steps, jobs=jobs, console=console)
    results = [Result.load(path) for folder in folders for path in sorted((folder / "evals").glob("*.json"))]
    with console.status("timing both models in turns"):
        results += _throughput(config, out)
    rows = []
    if names:
        sides = [*SIDES, *names]
        with console.status("timing all variants in turns"):
            speeds = _throughput(config, out, sides, out / "throughput" / "variants")
        found = [Result.load(path) for folder in more for path in sorted((folder / "evals").glob("*.json"))]
        rows = variant_rows(config, sides, [*results, *found], speeds)
    spent = _seconds_spent(out, time.perf_counter() - started)
    summary = _assemble(config, folders, results, seeds, spent)
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


def _prepare(config: RunConfig, out: Path, seeds: int, resume: bool) -> None:
    """Make ``out`` the folder of this comparison, or check that it is and may go on."""
    path = out / "compare.json"
    if path.exists():
        if not resume:
            raise FileExistsError(f"{out} holds a comparison already; resume it (--resume) or choose another folder")
        there = json.loads(path.read_text())
        earlier = RunConfig.from_dict(there["config"])
        different = differences({"config": earlier.to_dict()}, {"config": config.to_dict()})
        if different:
            listed = "\n  ".join(different)
            raise ValueError(f"{out} holds a comparison with other settings (there against here):\n  {listed}")
        if seeds < there["seeds"]:
            raise ValueError(
                f"{out} holds a comparison of {there['seeds']} seeds, and {seeds} is asked for; give --seeds "
                f"{there['seeds']} to go on with it, more to add some, or choose another folder"
            )
    elif out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and holds no comparison; choose another folder")
    else:
        require_writable(out)
        _check_materials(config)
        out.mkdir(parents=True, exist_ok=True)
        _write(path, _request(config, seeds))


def _request(config: RunConfig, seeds: int) -> dict:
    return {"seeds": seeds, "config": config.to_dict()}


def _member_folders(config: RunConfig, out: Path, seeds: int) -> list[Path]:
    """The folders of the pair's members, with their requests; remembers in ``out`` how many seeds there are."""
    _write(out / "compare.json", _request(config, seeds))
    folders = []
    for seed in range(seeds):
        for side in SIDES:
            folder = out / "members" / f"{side}-seed{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            member = dataclasses.replace(
                config,
                model={**config.model, "attention": side},
                train=dataclasses.replace(config.train, seed=config.train.seed + seed),
            )
            member.save(folder / "request.json")
            folders.append(folder)
    return folders


def _threads_there(out: Path) -> int:
    """Threads of a model in the comparison that ``out`` holds, 0 where there is none."""
    path = out / "compare.json"
    return json.loads(path.read_text())["config"]["train"]["threads"] if path.exists() else 0


def _check_materials(config: RunConfig):
    """Let what is wrong with the configuration come to light before the folder is made and processes start."""
    from diff_transformer.data.filler import Filler
    from diff_transformer.evals.needle import check_needle_fits
    from diff_transformer.lab.worker import more_experiments
    from diff_transformer.train.initial_model import check_model
    from diff_transformer.train.training_data import load_training_data

    more_experiments(config)
    for side in SIDES:
        check_model(dataclasses.replace(config, model={**config.model, "attention": side}))
    materials = load_training_data(config)
    filler, settings = Filler(materials.corpus.validation), config.evaluation
    check_needle_fits(
        filler, materials.tokenizer, settings.needles, config.data.length, config.data.needles.digits,
        per_cell=settings.samples, seed=settings.seed,
    )  # fmt: skip


def _default_jobs(seeds: int) -> int:
    import torch

    return 1 if torch.cuda.is_available() else max(1, min(os.cpu_count() or 1, 2 * seeds))


def _throughput(config: RunConfig, out: Path, sides: Sequence[str] = SIDES, folder: Path | None = None) -> list[Result]:
    """Timed on the trained models of the first seed, alone on the machine, with all its threads."""
    import torch

    from diff_transformer.bench.throughput import measure_throughput
    from diff_transformer.model.loading import read_model

    paths = [(folder or out / "throughput") / f"{side}-seed0.json" for side in sides]
    if not all(path.exists() for path in paths):
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        models = {
            f"{side}-seed0": read_model(out / "members" / f"{side}-seed0" / "run" / "model")
            .to(device)
            for side in sides
        }  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        shape = (config.train.batch_size, config.data.length)
        ids = torch.randint(0, config.model["vocab_size"], shape, generator=generator).to(device)
        results = measure_throughput(
            models, ids, precision=config.train.precision, repeats=config.evaluation.throughput_repeats
        )
        for path, result in zip(paths, results, strict=True):
            result.save(path)
        torch.set_num_threads(threads)
    return [Result.load(path) for path in paths]


def _assemble(config: RunConfig, folders: list[Path], results: list[Result], seeds: int, seconds: float) -> dict:
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.cost import model_cost

    pair = {}
    for side in SIDES:
        fields: dict[str, Any] = {**config.model, "attention": side}
        model = DiffTransformerConfig(**fields)
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
            "corpus": _corpus_label(config.data),
            "mixture": {name: share / total for name, share in config.data.mixture.items()},
            "lr": config.optim.lr,
            "config": config.to_dict(),
        },
        "claims": judge(paper_claims(config.evaluation.needles), results),
        "curves": [_curve(folder) for folder in folders],
        "evals": [_labelled(result) for result in results],
        "explorer": [
            {**json.loads((folder / "explorer.json").read_text()), "attention": folder.name.split("-")[0]}
            for folder in folders
            if (folder / "explorer.json").exists()
        ],
    }


def _corpus_label(data: DataConfig) -> str:
    """``novels``; of several corpora ``novels 70 %, code 30 %``."""
    if len(data.corpora) < 2:
        return Path(next(iter(data.corpora), data.corpus)).name
    total = sum(data.corpora.values())
    return ", ".join(f"{Path(name).name} {100 * weight / total:.3g} %" for name, weight in data.corpora.items())


def _labelled(result: Result) -> dict:
    side, seed = result.model.split("-seed")
    return {**result.to_dict(), "attention": side, "seed": int(seed)}


def _curve(folder: Path) -> dict:
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    logged = [line for line in lines if "loss" in line]
    checked = [line for line in lines if "validation_loss" in line]
    side, seed = folder.name.split("-seed")
    curve = {
        "attention": side,
        "seed": int(seed),
        "step": [line["step"] for line in logged],
        **{name: [line[name] for line in logged] for name in ("loss", "grad_norm", "tokens_per_second")},
        "validation_step": [line["step"] for line in checked],
        "validation_loss": [line["validation_loss"] for line in checked],
    }
    if side == "diff":
        config = json.loads((folder / "run" / "model" / "config.json").read_text())
        curve["lambda"] = [line["lambda"] for line in logged]
        curve["lambda_init"] = _lambda_starts(config)
    return curve


def _lambda_starts(config: dict) -> list[float]:
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.lambdas import lambda_init

    setting = config.get("lambda_init", DiffTransformerConfig.lambda_init)
    layers, offset = config["num_hidden_layers"], config.get("lambda_depth_offset", 0)
    return [lambda_init(i, offset) if setting == "depth" else float(setting) for i in range(layers)]


def _seconds_spent(out: Path, now: float) -> float:
    """Seconds of this call and of earlier, interrupted ones."""
    path = out / "seconds.json"
    total = now + (json.loads(path.read_text()) if path.exists() else 0.0)
    write_whole(path, json.dumps(total))
    return total


def _write(path: Path, values: dict):
    write_whole(path, json.dumps(values, indent=1) + "\n")
