"""The app, the options that commands share, and the context in which commands run."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option("--out", help="Folder for all output; must be new.")]
Recipe = Annotated[str, typer.Option("--recipe", help="Name of a recipe; `diff-transformer info` lists them.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a setting, e.g. --set optim.lr=1e-3.")]
Engine = Annotated[str, typer.Option("--engine", help="Where the models run: local, or ray for a Ray cluster.")]
GPUsPerRun = Annotated[
    float | None,
    typer.Option(help="GPUs of each model on the Ray cluster, or a fraction of one; 1 by default if it has GPUs."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")]
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
    from diff_transformer.train.ranks import is_first
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


def step_bars(*, in_bytes: bool = False, **options):
    """rich's progress bars, in steps or bytes, with the time taken and the time left.

    Args:
        options: of ``rich.progress.Progress``.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    done = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeElapsedColumn(), TextColumn("left"))
    return Progress(*columns, TimeRemainingColumn(), **options)


def quiet():
    """Silence the progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def computing():
    """``quiet``, and keep freed memory: for commands that compute in this process."""
    from diff_transformer.memory import keep_freed_memory

    quiet()
    keep_freed_memory()


def training():
    """``computing``, for commands that train. Raises UserError if the extra ``train`` is not installed."""
    from diff_transformer.checks import require_extra

    require_extra("train", "training", "lightning_fabric", "tensorboard")
    computing()


def executor(engine: str, out: Path, gpus_per_run: float | None):
    """The executor of ``--engine`` for a plan in the folder ``out``: None for processes on this machine.

    Raises:
        UserError: for an unknown engine, or options that it does not take; and as ``RayTasks``.
    """
    from diff_transformer.checks import require_known

    require_known("engine", engine, ("local", "ray"))
    if engine == "ray":
        from diff_transformer.lab.ray_pool import RayTasks

        return RayTasks(out, gpus_per_run)
    if gpus_per_run is not None:
        raise UserError("--gpus-per-run is of a Ray cluster; give --engine ray, or leave it out")
    return None


def configuration(name: str, assignments: list[str] | None, quick: bool = False):
    from diff_transformer.checks import require_known
    from diff_transformer.lab.evaluate import EXPERIMENTS
    from diff_transformer.lab.recipes import recipe, shortened
    from diff_transformer.train.config import override

    config = override(shortened(recipe(name)) if quick else recipe(name), assignments or [])
    for more in config.evaluation.more:  # also for ``train``, which measures nothing
        if not more.endswith(".py"):
            require_known("experiment of evaluation.more", more, EXPERIMENTS, ", or a file of Python")
    return config
