"""``diff-transformer prepare``: the progress bar and the summary."""

import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from diff_transformer.cli.app import step_bars
from diff_transformer.data.prepare import PrepareConfig, prepare, totals
from diff_transformer.data.sources import SPLITS, find_sources
from diff_transformer.data.tokens import is_prepared, read_plan, repair_command, verify
from diff_transformer.errors import UserError
from diff_transformer.settings import build


def run_prepare(
    sources: list[str], out: Path, settings: dict[str, Any], *, resume: bool = False, dry_run: bool = False
) -> None:
    """Say what is to be prepared, prepare ``out`` with a progress bar, and print the command that trains on it.

    Args:
        sources: the sources of text; none to continue the preparation in ``out``.
        settings: fields of ``PrepareConfig``; None for the default, or without sources for that of ``out``.
        dry_run: only say what is to be prepared.

    Raises:
        UserError: no sources and no preparation to continue; a side without a document; and as ``prepare``.
    """
    options = {key: value for key, value in settings.items() if value is not None}
    if sources:
        options["sources"] = [_absolute(os.path.expanduser(source)) for source in sources]
    elif is_prepared(out):
        options = read_plan(out)["settings"] | options
    else:
        raise UserError("no source of text; give at least one, or the --out of a preparation to continue (--resume)")
    config = build(PrepareConfig, options)
    files = find_sources(config.sources, config.validation)
    size = f"{sum(file.size for file in files) / 1e6:,.1f} MB" if all(file.size for file in files) else "size unknown"
    print(f"{len(files):,} source{'s' * (len(files) > 1)} of text ({size}), tokenizer {config.tokenizer}, to {out}")
    if dry_run:
        return
    screen = Console(stderr=True)
    with step_bars(in_bytes=True, transient=True, console=screen, disable=not screen.is_terminal) as bars:
        task = bars.add_task("tokenising", total=None)

        def show(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total or None)

        prepare(config, out, resume=resume, progress=show)
    print(describe(out))
    print(f"prepared: {out}; to train on it:")
    corpus = shlex.quote(f"data.corpus={out}")
    print(f"diff-transformer train --set {corpus} --set 'data.mixture={{\"text\": 1}}' --out RUN")


def run_verify(folder: Path) -> None:
    """Check every file of a prepared folder.

    Raises:
        UserError: if something is wrong, with the list of problems and the command that repairs the folder.
    """
    if problems := verify(folder):
        listed = "\n  ".join(problems)
        raise UserError(f"{folder} is damaged:\n  {listed}\nRepair it with `{repair_command(folder)}`")
    print(f"every file of {folder} is as it was written")


def describe(folder: Path) -> str:
    """A summary of a prepared folder: tokens, documents and tokenizer, a line each.

    Raises:
        UserError: for a side without a document.
    """
    sums, plan, lines = totals(folder), read_plan(folder), []
    left_out = ", ".join(f"{count:,} {kind}" for kind, count in sums["left_out"].items() if count)
    for side in SPLITS:
        part = sums[side]
        if not part["documents"]:
            raise UserError(
                f"the {side} side has no document ({left_out or 'none'} left out); give more text, a larger "
                "--validation, or folders train/ and val/, and another --out"
            )
        counts = f"{part['tokens']:,} tokens of {part['documents']:,} documents"
        lines.append(f"{side}: {counts}, {part['text_bytes']:,} bytes of text")
    if left_out:
        lines.append(f"left out: {left_out}")
    tokenizer = plan["tokenizer"]
    size = np.dtype(plan["dtype"]).itemsize
    lines.append(f"tokenizer: {tokenizer['size']:,} tokens, hash {tokenizer['hash']}; {size} bytes a token")
    return "\n".join(lines)


def _absolute(source: str) -> str:
    """An absolute path, so that the folder can be continued from any working directory."""
    return source if source == "python" or source.startswith("hub:") or "://" in source else os.path.abspath(source)
