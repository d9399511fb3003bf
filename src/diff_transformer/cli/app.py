"""The app, the options that commands share, and the context in which commands run."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option("--out", help="Folder for all output; must be new.")]
Recipe = Annotated[str, typer.Option("--recipe", help="Name of a recipe; `diff-transformer info` lists them.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a setting, e.g. --set optim.lr=1e-3.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run in the same folder.")]


def _version(wanted: bool) -> None:
    if wanted:
        from diff_transformer import __version__

        print(f"diff-transformer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
):
    """Differential attention (arXiv 2410.05258): train the matched pair, run the experiments, write a report."""


@contextmanager
def resumable(out: Path, kept: Callable[[], object], how: str = "with --resume") -> Generator[None]:
    """After Ctrl-C or SIGTERM, say what can be resumed and exit with 130 or 143; with 0 if training saved its state on
    SIGTERM.

    Args:
        kept: tells whether ``out`` holds finished work.
        how: how to resume.
    """
    from diff_transformer.train.launch import is_first
    from diff_transformer.train.signals import sigterm_interrupts

    try:
        with sigterm_interrupts():
            yield
    except KeyboardInterrupt as stopped:
        if is_first():
            print(str(stopped) or _stopped(out, bool(kept()), how), file=sys.stderr)
        raise typer.Exit(getattr(stopped, "exit_code", 130)) from None


def _stopped(out: Path, kept: bool, how: str) -> str:
    if kept:
        return f"stopped; what was finished is kept in {out}: continue {how}"
    begun = out.is_dir() and any(out.iterdir())
    return "stopped before anything was saved" + (f"; start again {how}" if begun else "")


@contextmanager
def bytes_done(title: str) -> Generator:
    """A progress bar in bytes: ``progress(done, total)``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TextColumn("left"))
    screen = Console(stderr=True)
    quiet = not screen.is_terminal
    with Progress(*columns, TimeRemainingColumn(), transient=True, console=screen, disable=quiet) as bars:
        task = bars.add_task(title, total=None)

        def show(done: int, total: int):
            bars.update(task, completed=done, total=total)

        yield show


def step_bars(**options):
    """rich's progress bars in steps, with the time taken and the time left.

    Args:
        options: of ``rich.progress.Progress``.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), **options)


def quiet():
    """Silence the progress bars and warnings of libraries."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # transformers imports torchao if it is installed, and torchao warns of every kernel for another machine.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def computing():
    """``quiet``, and keep freed memory: for commands that compute in this process."""
    from diff_transformer.memory import keep_freed_memory

    quiet()
    keep_freed_memory()


def training():
    """``computing``, for commands that train. Raises RuntimeError if the extra ``train`` is not installed."""
    from diff_transformer.checks import require_extra

    require_extra("train", "training", "lightning", "tensorboard")
    computing()


def configuration(name: str, assignments: list[str] | None):
    from diff_transformer.lab.recipes import recipe
    from diff_transformer.train.config import override

    return override(recipe(name), assignments or [])
