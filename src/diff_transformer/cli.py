"""The command line: each command is a thin wrapper of one importable function."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

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
    name: Annotated[str, typer.Argument(help="loss, needle, allocation or outliers.")],
    model: Annotated[str, typer.Option(help="Folder of a model with its tokenizer, or its name on the hub.")],
    out: Annotated[Path, typer.Option("--out", help="JSON file for the result; must be new.")],
    corpus: Annotated[str, typer.Option(help='"python", a text file, a folder or a tar archive.')] = "python",
    length: Annotated[int, typer.Option(help="Tokens in a prompt or row.")] = 128,
    samples: Annotated[int, typer.Option(help="Prompts in a cell, or rows of text.")] = 50,
):
    """Run one experiment on one model."""
    from diff_transformer.evals.command import run_eval

    _quiet()
    result = run_eval(name, model, corpus=corpus, length=length, samples=samples, out=out)
    for metric, value in result.metrics.items():
        print(f"{metric:24} {value:.4f}")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="attention")],
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON file for the record; must be new. Default: in runs/bench.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The whole grid of lengths and widths.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
):
    """Time the operator's backends against softmax attention of the matched size; correctness is checked first."""
    if name != "attention":
        raise ValueError(f"no benchmark {name!r}; there is: attention")
    import time

    from diff_transformer.bench.attention import main as run

    out = out or Path("runs", "bench", f"{name}-{device}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    run(out=out, full=full, device=device)
    print(f"record: {out}")


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
    results: Annotated[Path, typer.Argument(help="results.json of a comparison, or its folder.")],
    out: Annotated[Path, typer.Option("--out", help="HTML file to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
):
    """Write the report of a comparison again, and print its claims."""
    from rich.console import Console

    from diff_transformer.report import load_results, render_claims, write_report

    loaded = load_results(results)
    Console().print(render_claims(loaded))
    print(f"report: {write_report(loaded, out, overwrite=overwrite)}")


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
