"""``diff-transformer prepare``: the progress bar and the summary."""

from __future__ import annotations

import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from diff_transformer.cli.app import bytes_done
from diff_transformer.data.datatrove_tasks import LOGS, Engine
from diff_transformer.data.prepare import PrepareConfig, prepare
from diff_transformer.data.prepared_folder import read_plan, repair_command, verify
from diff_transformer.data.sources import SPLITS
from diff_transformer.errors import UserError


def run_prepare(
    sources: list[str], out: Path, settings: dict[str, Any], *, resume: bool = False, engine: Engine | None = None
) -> None:
    """Prepare ``out`` with a progress bar, and print a summary and the command that trains on it.

    Args:
        sources: the sources of text; none to continue the preparation in ``out``.
        settings: fields of ``PrepareConfig``; None for the default, or without sources for that of ``out``.
        engine: as ``prepare``; shows no progress.

    Raises:
        ValueError: no sources and no preparation to continue; and as ``prepare``.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    config = PrepareConfig(tuple(map(_absolute, sources)), **given) if sources else _planned(out, given)
    if engine is not None:
        print(f"tasks run on {engine.kind}; logs: {out / LOGS}")
    with nullcontext(lambda read, total: None) if engine is not None else bytes_done("tokenising") as show:
        manifest = prepare(config, out, resume=resume, progress=show, engine=engine)
    if manifest is None:
        print(f"{'scripts of the jobs' if engine and engine.dry_run else 'submitted; logs'}: {out / LOGS}")
        return
    print(describe(manifest))
    print(f"prepared: {out}; to train on it:")
    print(f"diff-transformer train --recipe novels --set data.corpus={out} --out RUN")


def run_verify(folder: Path) -> None:
    """Check every file of a prepared folder.

    Raises:
        ValueError: if something is wrong, with the list of problems and the command that repairs the folder.
    """
    if problems := verify(folder):
        listed = "\n  ".join(problems)
        raise UserError(f"{folder} is damaged:\n  {listed}\nRepair it with `{repair_command(folder)}`")
    print(f"every file of {folder} is as it was written")


def describe(manifest: dict[str, Any]) -> str:
    """A summary of a prepared folder: tokens, documents, shards and tokenizer, a line each."""
    lines = []
    for side in SPLITS:
        part = manifest[side]
        counts = f"{part['tokens']:,} tokens of {part['documents']:,} documents"
        lines.append(f"{side}: {counts}, {part['text_bytes']:,} bytes of text")
    left_out = {kind: count for kind, count in manifest["left_out"].items() if count}
    if left_out:
        lines.append("left out: " + ", ".join(f"{count:,} {kind}" for kind, count in left_out.items()))
    tokenizer = manifest["tokenizer"]
    lines.append(f"tokenizer: {tokenizer['size']:,} tokens, hash {tokenizer['hash']}; {manifest['dtype'][1:]} a token")
    return "\n".join(lines)


def _planned(out: Path, given: dict[str, Any]) -> PrepareConfig:
    """The config of the preparation in ``out``, with what is given."""
    plan = read_plan(out)
    if plan is None:
        raise UserError("no source of text; give at least one, or the --out of a preparation to continue (--resume)")
    return dataclasses.replace(PrepareConfig.from_dict(plan["settings"]), **given)


def _absolute(source: str) -> str:
    """An absolute path, so that the folder can be continued from any working directory."""
    return source if source == "python" or source.startswith("hub:") else os.path.abspath(source)
