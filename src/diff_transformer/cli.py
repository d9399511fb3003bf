"""The command line: each command is a thin wrapper of one importable function."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Differential attention (arXiv 2410.05258): train the matched pair, run the experiments, write a report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option("--out", help="Folder for everything that is written; must be new.")]
Recipe = Annotated[str, typer.Option("--recipe", help="Name of a recipe: see `diff-transformer info`.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a setting, e.g. --set optim.lr=1e-3.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in the same folder.")]


@app.command()
def compare(
    out: Out,
    recipe: Recipe = "demo",
    assignments: Set = None,
    seeds: Annotated[int, typer.Option(help="Pairs to train, each with a seed of its own.")] = 1,
    jobs: Annotated[int | None, typer.Option(help="Models trained at a time; on CPU, one a core by default.")] = None,
    resume: Resume = False,
):
    """Train a DIFF Transformer and its matched Transformer, measure both, write the report with the verdicts."""
    from diff_transformer.compare import compare as run

    _quiet()
    with _resumable():
        run(_configuration(recipe, assignments), out, seeds=seeds, jobs=jobs, resume=resume)


@app.command()
def train(out: Out, recipe: Recipe = "demo", assignments: Set = None, resume: Resume = False):
    """Train one model of a recipe (--set model.attention=softmax for the matched Transformer)."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from diff_transformer.train.loop import train as run

    _quiet()
    config = _configuration(recipe, assignments)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with _resumable(), Progress(*columns, TextColumn("left"), TimeRemainingColumn()) as bar:
        task = bar.add_task("training", total=config.train.steps)

        def show(step: int, values: dict):
            described = f"loss {values['loss']:.3f}" if "loss" in values else None
            bar.update(task, completed=step, description=described)

        trained = run(config, out, resume=resume, progress=show)
    print(f"model: {trained.folder / 'model'}")


@app.command(name="eval")
def evaluate(
    name: Annotated[str, typer.Argument(help="An experiment, or all: see the list above.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file for one result, or a folder; must be new.")],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Folder with its tokenizer, hub name or preset; may be repeated."),
    ] = None,
    assignments: Set = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: a minute an experiment on a small model.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="At most so many samples of each part of an experiment.")] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help='Text: "python", a file, a folder, an archive. What a folder of it trains is kept out.'),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Labelled data: a file, hub:NAME, or the offline default.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a prompt or row.")] = None,
    samples: Annotated[int | None, typer.Option(help="Prompts in a cell, questions, or rows of text.")] = None,
    seed: Annotated[int | None, typer.Option(help="What is drawn at random is drawn from it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; CUDA where there is one by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; the checkpoint's by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts or rows in one forward pass.")] = 32,
    resume: Resume = False,
):
    """Run an experiment, or all of them, on any causal language model."""
    from diff_transformer.evals.suite import Plan, names_of

    _quiet()
    options = {"corpus": corpus, "data": data, "length": length, "samples": samples, "seed": seed}
    plan = Plan(
        names_of(name, quick), models or [], options, assignments or [], quick, limit, device, dtype, batch_size
    )
    single = out.suffix == ".json" and len(plan.names) == 1 and len(plan.models) <= 1
    with _resumable(), _bars() as bar:
        failed = _evaluate_one(plan, out, resume, bar) if single else _evaluate_many(plan, out, resume, bar)
    if failed:
        raise typer.Exit(2)


def _evaluate_one(plan, out: Path, resume: bool, bar) -> bool:
    from diff_transformer.evals.command import experiment, load_lm, run_eval, settings_of

    (name,) = plan.names
    settings = settings_of(name, plan.options, plan.assignments, quick=plan.quick)
    lm = None
    if getattr(experiment(name), "NEEDS_MODEL", True):
        if not plan.models:
            raise ValueError("no model; give --model with a folder, a name on the hub or a preset")
        lm = load_lm(plan.models[0], device=plan.device, dtype=plan.dtype, batch_size=plan.batch_size)
    result = run_eval(name, lm, settings, out, limit=plan.limit, resume=resume, bar=bar(name))
    if hasattr(experiment(name), "table"):
        from rich.console import Console

        Console().print(experiment(name).table(result))
    else:
        for metric, value in result.metrics.items():
            print(f"{metric:32} {value:.4f}")
    print(f"result: {out}")
    return False


def _evaluate_many(plan, out: Path, resume: bool, bar) -> bool:
    from diff_transformer.evals.suite import run_suite

    outcomes = run_suite(plan, out, resume=resume, bar=bar)
    for outcome in outcomes:
        told = outcome.error or outcome.path
        print(f"{outcome.name:20} {outcome.model or '':16} {told}", file=sys.stderr if outcome.error else sys.stdout)
    if any(outcome.result for outcome in outcomes):
        print(f"report: {out / 'report.html'}")
    return any(outcome.error for outcome in outcomes)


@contextmanager
def _bars() -> Generator:
    """Progress bars, one for each part of an experiment: ``bar(title)(part, done, total)``."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), transient=True) as progress:

        def bar(title: str):
            tasks: dict[str, Any] = {}

            def show(part: str, done: int, total: int):
                if part not in tasks:
                    for task in list(progress.task_ids):
                        progress.update(task, visible=False)
                    tasks[part] = progress.add_task(f"{title}: {part}", total=total)
                progress.update(tasks[part], completed=done, total=total)

            return show

        yield bar


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="attention, decode or throughput.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file for the record; must be new. Default: in runs/bench.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The whole grid of lengths and widths.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    grid: Annotated[
        str | None, typer.Option(help="Shapes for attention, batch x heads x length x width: 1x4x2048x64,...")
    ] = None,
):
    """Time the operator and the models against softmax attention of the matched size; correctness is checked first."""
    from diff_transformer.bench.command import run_bench

    _quiet()
    run_bench(name, out, full, device, grid)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the model to convert.")],
    out: Out,
    origin: Annotated[str, typer.Option("--from", help="llama or diff-transformer.")] = "llama",
    target: Annotated[str, typer.Option("--to", help="diff-transformer or llama.")] = "diff-transformer",
):
    """Convert a Llama model to the matched Transformer of this package, or back; the logits stay equal."""
    from diff_transformer.model.convert import convert_folder

    _quiet()
    convert_folder(source, out, origin, target)
    print(f"model: {out}")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model with its tokenizer, or its name on the hub.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
):
    """Continue a prompt greedily."""
    from diff_transformer.evals.command import load_lm

    _quiet()
    print(prompt + load_lm(model).generate([prompt], max_new_tokens)[0])


@app.command()
def report(
    results: Annotated[
        list[Path], typer.Argument(help="results.json of a comparison or its folder; or results of `eval`, any number.")
    ],
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
):
    """Write the report of a comparison again and print its claims; or one page for results of experiments."""
    from rich.console import Console

    from diff_transformer.report import is_comparison, load_results, render_claims, write_evals_report, write_report

    if len(results) == 1 and is_comparison(results[0]):
        loaded = load_results(results[0])
        Console().print(render_claims(loaded))
        print(f"report: {write_report(loaded, out, overwrite=overwrite)}")
    else:
        print(f"report: {write_evals_report(list(results), out, overwrite=overwrite)}")


@app.command()
def info(
    preset: Annotated[str | None, typer.Argument(help="Name of a model preset; all of them if left out.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens a sequence, for FLOPs and cache.")] = None,
):
    """Both sides of a preset: parameters by part, FLOPs a token, key/value cache."""
    from rich.console import Console

    from diff_transformer.model.info import pair_table, preset_table

    Console().print(pair_table(preset, length) if preset else preset_table())


@contextmanager
def _resumable() -> Generator[None]:
    """After Ctrl-C say how to go on, and exit with 130."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "stopped, state saved; continue with --resume", file=sys.stderr)
        raise typer.Exit(130) from None


def _quiet():
    """Leave the screen to our own progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _configuration(name: str, assignments: list[str] | None):
    from diff_transformer.recipes import recipe
    from diff_transformer.train.config import override

    return override(recipe(name), assignments or [])


def main():
    """Run the command line; an error that a user can mend is a message, not a traceback."""
    try:
        app()
    except (ValueError, TypeError, FileExistsError, FileNotFoundError, FloatingPointError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
