"""``compare``: train the matched pair over several seeds and write ``report.html``.

A comparison is a plan for the pool: each side with each seed, plus the variants. When all have finished, ``compare``
times the models in turns, judges the claims, and writes the report.
"""

import dataclasses
import itertools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from diff_transformer.checks import first_line, require_positive
from diff_transformer.durable import require_writable, write_whole
from diff_transformer.errors import UserError
from diff_transformer.lab.announce import announced_runs
from diff_transformer.lab.pool import Executor, default_jobs, progress_bars, run_pool
from diff_transformer.lab.recipes import recipe
from diff_transformer.lab.recipes.recall import recall_run
from diff_transformer.lab.results import ABOUT, REQUEST, SPEED, read_comparison
from diff_transformer.lab.rows import EXPLORER, RECALL, Rows, finished, read_file, row, rows_of, write_rows
from diff_transformer.lab.sides import PAIR, SOURCE, in_order
from diff_transformer.lab.spec import (
    RunSpec,
    check_folders,
    everything,
    require_drawn,
    side_model,
    with_seed,
)
from diff_transformer.lab.verdicts import Verdicts
from diff_transformer.lab.worker import more_experiments, settings_of_run
from diff_transformer.model.card import label_of
from diff_transformer.train.config import RunConfig, override
from diff_transformer.train.plan import resolve
from diff_transformer.train.run_folder import locked

ROWS_OF_TEXT = {"quantization": "rows", "gradient_flow": "samples"}  # experiments on held-out rows, and their number


def compare(
    config: RunConfig | str,
    out: Path | str,
    *,
    settings: Mapping[str, Any] | None = None,
    source: Path | str | None = None,
    seeds: int = 1,
    jobs: int | None = None,
    resume: bool = False,
    variants: Sequence[str] = (),
    arms: Sequence[str] = (),
    executor: Executor | None = None,
    minutes: float | None = None,
    report: bool = True,
    dry_run: bool = False,
) -> Verdicts:
    """Train a DIFF Transformer and its matched Transformer, measure both, judge the claims, write the report.

    Both sides get the same data in the same order, batch, steps, learning rate and seed, and equal initial weights in
    all parameters that they share. Seed k of ``seeds`` trains with ``config.train.seed + k``.

    Args:
        config: of either side, or the name of a recipe; ``model.attention`` is set for each.
        source: a pretrained softmax Transformer, as a folder or name on the hub, to go on from instead of random
            weights. The sides are then the source ("softmax") and ``arms``; all start with the source's logits, which
            are measured too ("source"). ``docs/pretrained_to_diff.md`` explains them.
        out: folder for everything: ``report.html``, ``members/SIDE-seedK/`` with ``run/model`` (Hugging Face format),
            TensorBoard files, metrics and ``rows.jsonl.gz``.
        settings: what differs from ``config``, by dotted name, such as ``{"optim.lr": 1e-3}``.
        seeds: number of pairs; with ``resume`` a larger number adds some.
        jobs: models trained at a time; by default ``default_jobs``, one with ``source``, or all with an ``executor``.
            If ``config.train.threads`` is 0, they share the cores equally, or take one each with an ``executor``.
        resume: continue an interrupted comparison; finished runs are kept.
        variants: relatives of differential attention to train beside the pair, by their names in ``VARIANTS``
            (``"diff_v2"``, ``"grouped_diff"``, ``"dint"``, ``"fixed_lambda"``, and ``"softmax_norm"``, the
            Transformer + head norm, which separates the norm's gain from the subtraction's). Data, steps and seeds are
            equal, and parameter counts agree with the pair's to within 1 %. The claims are about the pair; the
            measurements of ``"softmax_norm"`` stand beside theirs, as a control. Those of an earlier call in ``out``
            stay in the report; ``resume`` can add more.
        arms: with ``source``: its conversions "diff", "diff_v2", "diff_v3" and "dex"; "wider", a control with as many
            parameters as "diff"; "attention" and "lora", other ways to train it. By default "diff", "diff_v2", "wider".
        executor: of the runs, for example ``RayTasks``; processes on this machine by default. The models are timed on
            this machine.
        minutes: training and measuring stop after this time, with every state saved; ``resume`` goes on.
        report: judge the claims and write ``report.html``, which needs the extra ``report``. Without it the rows are
            complete, and ``diff-transformer report OUT`` makes the page of them anywhere.
        dry_run: only say what would be done.

    Returns:
        The verdicts on the claims, by the quantity's id and the other side (``lab/verdicts.py``), from the models that
        are finished. Empty without ``report``, and if there is no pair yet.

    Raises:
        FileExistsError: if ``out`` is not empty and ``resume`` is False.
        ValueError: for settings that contradict each other, a ``resume`` with other settings, or a ``source`` that
            cannot be differential.
        UserError: if ``out`` is not writable, or another comparison is running in it.
        RunFailed: if training or measuring fails.
        RuntimeError: with ``report``, without the extra of that name.
    """
    console = Console()
    config = recipe(config) if isinstance(config, str) else config
    if settings:
        config = override(config, [f"{name}={json.dumps(value, default=str)}" for name, value in settings.items()])
    out, started = Path(out), time.monotonic()
    require_positive(seeds=seeds, jobs=jobs, minutes=minutes)
    start = None
    if source is None:
        require_drawn(config)
        if arms:
            raise UserError(f"arms are {', '.join(arms)}, which need a pretrained model; give a source, or variants")
        sides = [*PAIR, *(name for name in variants if name not in PAIR)]
    else:
        from diff_transformer.lab.uptrain import ARMS, USUAL, read_source

        if variants:
            raise UserError(
                f"variants are {', '.join(variants)}, and a comparison from a source takes arms: {', '.join(ARMS)}"
            )
        start = read_source(source, arms or USUAL)
        config, sides = start.configured(config), in_order(start.models)
        if start.no_control:
            console.print(f"no control of as many parameters: {start.no_control}")
    if executor is None:
        jobs = jobs or (default_jobs(len(sides) * seeds) if start is None else 1)
    if not config.train.threads:
        threads = 1 if executor else max(1, (os.cpu_count() or 1) // (jobs or 1))
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, threads=threads))
    if report:
        from diff_transformer.report.page import require_installed

        require_installed()  # what the report at the end needs
    run = None if start is None else lambda side, seed: start.run(config, side, seed, out)
    specs = comparison_specs(config, sides, seeds, run)
    runs = {out / ("recall" if spec.setting == RECALL else "members") / spec.name: spec for spec in specs}
    unfinished = [spec for folder, spec in runs.items() if not finished(folder)]
    console.print(announced_runs(unfinished, here=executor is None), soft_wrap=True)
    _check(config, out, runs, resume, drawn=start is None)
    if dry_run:
        return {}
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        facts = {"seeds": seeds} | ({} if start is None else {"source": label_of(str(start.folder))})
        write_whole(out / REQUEST, json.dumps({**facts, "config": config.to_dict()}, indent=1) + "\n")
        if start is not None:
            start.write(out)
        with progress_bars(runs, console) as show:
            until = started + 60 * minutes if minutes else math.inf
            if start is not None:  # all train before any is measured
                untrained = {
                    folder: dataclasses.replace(spec, measure=None)
                    for folder, spec in runs.items()
                    if spec.side != SOURCE and not (folder / "run" / "model").exists()
                }
                run_pool(untrained, jobs=jobs, executor=executor, until=until, show=show)
            run_pool(runs, jobs=jobs, executor=executor, until=until, show=show)
        _write_facts(out, facts, time.monotonic() - started)
        done = sum(map(finished, runs))
        if done == len(runs):
            with console.status("timing all models in turns"):
                measure_speed(config, out, [side for side in sides if side != SOURCE], console)
        else:
            console.print(f"{done} of {len(runs)} models are finished; the same command with --resume goes on")
        if not report:
            console.print(f"models and rows: {out}; diff-transformer report {out} --out FILE judges them")
            return {}
        return _report(out, console) if done else {}


def _write_facts(out: Path, about: Mapping[str, Any], seconds: float) -> None:
    """Write rows about the comparison. Its seconds are those of all calls."""
    path = out / ABOUT
    earlier = Rows(read_file(path)).about("comparison").get("seconds", 0.0) if path.exists() else 0.0
    called = Path(sys.argv[0])  # by the command, or by a script, whose arguments say nothing
    by_command = called.stem == "diff-transformer" or called.parts[-2:] == ("diff_transformer", "__main__.py")
    facts = {
        **({"command": shlex.join(["diff-transformer", *sys.argv[1:]])} if by_command else {}),
        "seconds": earlier + seconds,
        **about,
    }
    write_rows(path, [row("about", "", of="comparison", example=key, key=key, value=facts[key]) for key in facts])


def _report(out: Path, console: Console) -> Verdicts:
    """Judge what is finished, write the page and print the claims."""
    from diff_transformer.report.page import judged, terminal_table, write_report

    rows = read_comparison(out)
    page = write_report(rows, out / "report.html", overwrite=True)
    ours, verdicts = judged(rows)
    if verdicts:
        console.print(terminal_table(verdicts, ours))
    console.print(f"report: {page}\nmodels: {out}/members/*/run/model", soft_wrap=True)
    return verdicts


def measure_speed(config: RunConfig, out: Path, sides: Sequence[str], console: Console) -> None:
    """The speed of the trained models of the first seed, alone on the machine, with all threads.

    It is measured once and kept in ``out/throughput.jsonl.gz``. All models are timed together, so that any two can be
    compared: again if one of ``sides`` is new. Their steps are those of the run, but for what it compiles. Models that
    do not fit into the GPU's memory together are not timed, which ``console`` says.
    """
    import torch

    from diff_transformer.bench.throughput import measure_throughput
    from diff_transformer.model.loading import read_model
    from diff_transformer.train.recompute import recompute
    from diff_transformer.train.weights import choose_weights

    path = out / SPEED
    if path.exists() and {each["side"] for each in read_file(path)} >= set(sides):
        return
    folders = {side: out / "members" / f"{side}-seed0" / "run" / "model" for side in sides}
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shape = (config.train.batch_size, config.data.length)
    ids = torch.randint(0, config.model["vocab_size"], shape, generator=generator)
    try:
        ids, models = ids.to(device), {name: read_model(folder).to(device) for name, folder in folders.items()}
        for side, model in models.items():
            choose_weights(model, RunSpec.load(out / "members" / f"{side}-seed0").config.train)
            recompute(model, config.train.activation_checkpointing)
        results = measure_throughput(
            models, ids, precision=config.train.precision, pass_rows=config.train.rows_of_a_pass(),
            loss_chunk=config.train.loss_chunk, repeats=config.evaluation.throughput_repeats,
        )  # fmt: skip
    except torch.OutOfMemoryError as error:  # a pass did not fit beside the other models
        console.print(f"the speed of training is not measured: {first_line(error)}")
        return
    finally:
        torch.set_num_threads(threads)
    rows = [rows_of(of.experiment, of.rows, of.about, side, setting=config.name) for side, of in results.items()]
    write_rows(path, itertools.chain.from_iterable(rows))


def comparison_specs(
    config: RunConfig, sides: Sequence[str], seeds: int, run: Callable[[str, int], RunConfig] | None = None
) -> list[RunSpec]:
    """The runs of a comparison: the pair with each seed, then each other of ``sides``; with ``run`` seed by seed.

    With ``evaluation.recall_steps``, small ones on recall alone follow. The first pair also writes its attention maps.

    Args:
        run: the configuration of a side and seed; by default with weights drawn from the seed.
    """
    groups = (sides[: len(PAIR)], sides[len(PAIR) :]) if run is None else (sides,)
    run = run or (lambda side, seed: with_seed(config, config.train.seed + seed, side_model(config, side)))
    specs, more = [], []
    for group in groups:
        for seed in range(seeds):
            for side in group:
                if side == SOURCE and seed:  # it is not trained
                    continue
                trained = run(side, seed)
                maps = (EXPLORER,) if side in PAIR and seed == 0 else ()
                specs.append(RunSpec(config.name, side, seed, trained, (*everything(config), *maps)))
                if config.evaluation.recall_steps:
                    small = recall_run(side, trained.train, config.evaluation.recall_steps)
                    more.append(RunSpec(RECALL, side, seed, small, (RECALL, *maps)))
    return specs + more


def _check(config: RunConfig, out: Path, runs: Mapping[Path, RunSpec], resume: bool, drawn: bool) -> None:
    """Raise if ``out`` is not for this comparison or cannot be continued, or if a new one's data cannot be used."""
    if (out / REQUEST).exists():
        if not resume:
            raise UserError(f"{out} holds a comparison already; resume it (--resume) or choose another folder")
    elif out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out} is not empty and holds no comparison; choose another folder")
    check_folders(runs)
    require_writable(out)
    if drawn and not all(map(finished, runs)):
        for side in PAIR:
            resolve(dataclasses.replace(config, model=side_model(config, side)))
    if not (out / REQUEST).exists():
        _check_data(config)


def _check_data(config: RunConfig) -> None:
    """Raise for an invalid configuration before the folder is created and any process starts."""
    from diff_transformer.data.evaluation_text import load_rows
    from diff_transformer.data.filler import Filler
    from diff_transformer.evals.needle import Asking, check_needle_fits
    from diff_transformer.train.training_data import load_training_data

    more = more_experiments(config)
    data = load_training_data(config)
    filler, settings = Filler(data.corpus.validation), config.evaluation
    lengths = settings.needle_lengths or (config.data.length,)
    positions = config.model.get("max_position_embeddings", max(lengths))
    if positions < max(lengths):
        raise UserError(
            f"evaluation.needle_lengths has {max(lengths)} tokens, more than model.max_position_embeddings "
            f"{positions}; give fewer, or raise the latter"
        )
    asked = settings_of_run(config)["needle"]
    single = dataclasses.replace(asked, cells=((1, 1),), lengths=(config.data.length,))  # as attention is allocated to
    for needles in (asked, single):
        check_needle_fits(filler, Asking(data.tokenizer, needles))
    for name, rows in ROWS_OF_TEXT.items():
        wanted = more.get(name)
        if wanted is not None and wanted.split == "auto" and getattr(wanted, rows):
            try:
                load_rows(wanted.corpus, data.tokenizer, wanted.length, getattr(wanted, rows))
            except ValueError as error:
                hint = str(error).replace("--split all", f"--set evaluation.more.{name}.split=all")
                raise UserError(f"evaluation.more.{name}: {hint}") from None
