"""Commands that measure, and that show results: eval, bench, report, info."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli.app import (
    DryRun,
    Resume,
    Set,
    app,
    computing,
    resumable,
    step_bars,
)
from diff_transformer.errors import UserError


@app.command(name="eval")
def evaluate(
    name: Annotated[
        str,
        typer.Argument(
            help="harness, scaling, long_nll, needle, allocation, many_shot, hallucination, outliers, quantization, "
            "associative_recall, recall, ruler, anatomy, gradient_flow; all; or the Python file of your own experiment."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results and their page; must be new.")],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Folder with its tokenizer, hub name or preset; may be repeated."),
    ] = None,
    assignments: Set = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: about a minute per experiment on a small model.")
    ] = False,
    corpus: Annotated[
        str | None,
        typer.Option(help='Text: "python", a file or a folder of text, JSON lines or parquet.'),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Labelled data: a file, hub:NAME, or the offline default.")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Part of the corpus: held-out, all, or auto: held-out for models of this package, which may have been "
            "trained on the rest."
        ),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a prompt or row.")] = None,
    samples: Annotated[int | None, typer.Option(help="Prompts per cell, questions, or rows of text.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random draws.")] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Ask an instruct model through its tokenizer's chat template.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; CUDA where there is one by default.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default, on a CPU float32.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts or rows per forward pass.")] = 32,
    resume: Resume = False,
    dry_run: DryRun = False,
):
    """Run an experiment, or all of them, on any causal language model."""
    from diff_transformer.lab.announce import announced_experiments
    from diff_transformer.lab.evaluate import Plan, names_of

    computing()
    options = {"corpus": corpus, "split": split, "data": data, "length": length, "samples": samples, "seed": seed}
    options["chat_template"] = chat_template or None
    plan = Plan(
        names_of(name), models or [], options=options, assignments=assignments or [], quick=quick, device=device,
        dtype=dtype, batch_size=batch_size,
    )  # fmt: skip
    announced, prompts = announced_experiments(plan)
    print(announced)
    if dry_run:
        return
    with resumable(out, lambda: any(out.glob("*/*.jsonl*"))), _bar(prompts) as bar:
        failed = _evaluate(plan, out, resume, bar)
    if failed:
        raise typer.Exit(2)


def _evaluate(plan, out: Path, resume: bool, bar) -> bool:
    from diff_transformer.lab.evaluate import run_suite
    from diff_transformer.lab.results import read_results
    from diff_transformer.report.page import require_installed, write_report
    from diff_transformer.report.tables import markdown

    outcomes = run_suite(plan, out, resume=resume, bar=bar)
    for outcome in outcomes:
        print(
            f"{outcome.name:20} {outcome.model or '':16} {outcome.error or outcome.path}",
            file=sys.stderr if outcome.error else sys.stdout,
        )
        if outcome.record:
            _print_note(outcome.record)
    if any(outcome.error is None for outcome in outcomes):
        try:
            require_installed()
            print(f"report: {write_report([out], out / 'report.html', overwrite=True)}")
            for outcome in outcomes:
                if not outcome.error and len(plan.names) == 1:
                    print(markdown(read_results(outcome.path)))
        except UserError as error:  # the results are there, and tables and a page can be made of them anywhere
            print(f"not shown: {error}", file=sys.stderr)
    return any(outcome.error for outcome in outcomes)


def _print_note(record) -> None:
    """Print what a reader must know before the numbers."""
    for name in record.rows.experiments:
        about = record.rows.about(name)
        for key in ("note", "asked"):
            if about.get(key):
                print(f"note: {name} of {record.side}: {about[key]}")


@contextmanager
def _bar(prompts: int) -> Generator:
    """One progress bar for all experiments, of ``prompts`` or as many as they turn out to have:
    ``bar(title)(part, done, total)``."""
    with step_bars(transient=True) as progress:
        task, parts = progress.add_task("loading", total=prompts or None), {}

        def bar(title: str):
            def show(part: str, done: int, total: int):
                parts[title, part] = done, total
                finished, known = map(sum, zip(*parts.values(), strict=True))
                progress.update(
                    task, description=f"{title}: {part}", completed=finished, total=max(prompts, known), refresh=True
                )

            return show

        yield bar


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="attention, decode or throughput.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file for the record; must be new. Default: in runs/bench.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The full grid of lengths and widths.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    grid: Annotated[
        str | None, typer.Option(help="Shapes for attention, batch x heads x length x width: 1x4x2048x64,...")
    ] = None,
):
    """Time the operator and the models against matched softmax attention, after a check of correctness."""
    from diff_transformer.bench.run import run_bench

    computing()
    run_bench(name, out, full, device, grid)


@app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Folders of `compare`, `study` or `eval`, or files of rows (.jsonl.gz)."),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file to write; with --figure an SVG file.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print tables in Markdown instead.")] = False,
    figure: Annotated[str | None, typer.Option(help="Draw this figure alone: losses, needles, recall, ...")] = None,
    settings: Annotated[list[str] | None, typer.Option("--setting", help="Setting to show; may be repeated.")] = None,
    sides: Annotated[list[str] | None, typer.Option("--side", help="Model to show; may be repeated.")] = None,
    quantities: Annotated[list[str] | None, typer.Option("--quantity", help="For --table; may be repeated.")] = None,
):
    """Write the page of results and print the claims; or print tables, or draw one figure."""
    from rich.console import Console

    from diff_transformer.checks import require_known
    from diff_transformer.lab.results import read_results
    from diff_transformer.report.page import judged, terminal_table, write_picture, write_report
    from diff_transformer.report.tables import markdown

    if (out is None) != table or (figure and table) or (quantities and not table):
        raise UserError("give --out FILE for a page or (--figure) a figure, or --table for tables (--quantity)")
    rows = read_results(*results)
    for name, given, known in (("setting", settings, rows.settings), ("side", sides, rows.sides)):
        for value in given or ():
            require_known(name, value, known)
    rows = rows.only(**{name: [*of, ""] for name, of in (("setting", settings), ("side", sides)) if of})
    if out is None:
        return print(markdown(rows, quantities))
    if figure is not None:
        return print(f"figure: {write_picture(rows, figure, out, overwrite=overwrite)}")
    page = write_report(rows, out, overwrite=overwrite)
    ours, verdicts = judged(rows) if len([name for name in rows.settings if name]) < 2 else ("", {})
    if verdicts:
        Console().print(terminal_table(verdicts, ours))
    print(f"report: {page}")


@app.command()
def info(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A model preset; by default, all of them and the recipes."),
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence, for FLOPs and cache.")] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="Variant to compare: diff_v2, diff_v3, gated, grouped_diff, dint, fixed_lambda, softmax_norm."
        ),
    ] = None,
):
    """Both sides of a preset: parameters by part, FLOPs per token, key/value cache."""
    from rich.console import Console

    from diff_transformer.checks import require_positive
    from diff_transformer.cli.info import pair_table, preset_table
    from diff_transformer.lab.recipes import RECIPES
    from diff_transformer.model.presets import PRESETS

    require_positive(length=length)
    if name is None and (length or attention):
        raise UserError(f"--length and --attention are for one preset; name it: {', '.join(PRESETS)}")
    Console().print(pair_table(name, length, attention or "diff") if name else preset_table(RECIPES))
