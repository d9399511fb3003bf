"""``diff-transformer prepare``: the progress bar and the summary."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.data.prepare.config import TOKENIZERS, PrepareConfig
from diff_transformer.data.prepare.engine import SHARD_BYTES, Engine
from diff_transformer.data.prepare.folder import LOGS, MANIFEST, PLAN, read_manifest, repair_command, verify
from diff_transformer.data.prepare.run import Progress, prepare
from diff_transformer.data.prepare.sources import is_url


def run_prepare(
    sources: list[str],
    out: Path,
    settings: dict,
    *,
    jobs: int | None = None,
    resume: bool = False,
    engine: Engine | None = None,
) -> dict | None:
    """Prepare ``out`` with a progress bar; return its manifest, or None. Raises as ``run.prepare``.

    Args:
        sources: the sources of text; none to continue the preparation in ``out``.
        settings: fields of ``PrepareConfig``. For None, the default is used, or without sources the setting of ``out``.
        jobs: number of processes; one a core by default, and without limit on the engines of clusters.
        engine: as ``run.prepare``; shows no progress.
    """
    if sources and engine is not None:
        settings = {**settings, "shard_bytes": settings["shard_bytes"] or SHARD_BYTES}
    given = {key: value for key, value in settings.items() if value is not None}
    config = PrepareConfig(tuple(sources), **given) if sources else _planned(out, given)
    if engine is None or engine.kind == "local":
        jobs = jobs or os.cpu_count() or 1
    if engine is not None:
        print(f"tasks run on {engine.kind}; logs: {out / LOGS}")
    with nullcontext() if engine is not None or config.tasks else _bar() as show:
        manifest = prepare(_absolute(config), out, jobs=jobs, resume=resume, progress=show, engine=engine)
    if manifest is None:
        print(f"{'scripts of the jobs' if engine and engine.dry_run else 'submitted; logs'}: {out / LOGS}")
        return None
    print(describe(manifest))
    print(f"prepared: {out}")
    return manifest


def run_verify(folder: Path) -> None:
    """Check every file of a prepared folder.

    Raises:
        ValueError: if something is wrong, with the list of problems and the command that repairs the folder.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("checking shards"), BarColumn(), MofNCompleteColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task("")
        problems = verify(folder, lambda done, total: bar.update(task, completed=done, total=total))
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(f"{folder} is damaged:\n  {listed}\nRepair it with `{repair_command(folder)}`")
    print(f"every file of {folder} is what was written")


def describe(manifest: dict) -> str:
    """A summary of a prepared folder: tokens, documents, shards and tokenizer, a line each."""
    lines = []
    for side in ("train", "validation"):
        part = manifest[side]
        lines.append(
            f"{side}: {part['tokens']:,} tokens of {part['documents']:,} documents, {part['text_bytes']:,} bytes of "
            f"text, in {len(part['shards'])} shards"
        )
    left_out = {kind: count for kind, count in manifest["left_out"].items() if count}
    if left_out:
        lines.append("left out: " + ", ".join(f"{count:,} {kind}" for kind, count in left_out.items()))
    tokenizer = manifest["tokenizer"]
    lines.append(f"tokenizer: {tokenizer['size']:,} tokens, hash {tokenizer['hash']}; {manifest['dtype'][1:]} a token")
    return "\n".join(lines)


def _planned(out: Path, given: dict) -> PrepareConfig:
    """The config of the preparation in ``out``; raises ValueError if ``given`` differs or there is none."""
    for name in (MANIFEST, PLAN):
        if (out / name).exists():
            plan = read_manifest(out) if name == MANIFEST else read_json(out / name)
            config = PrepareConfig.from_dict(plan["settings"])
            different = {key: value for key, value in given.items() if getattr(config, key) != value}
            if different:
                raise ValueError(
                    f"{out} is prepared with other settings than {different}; leave them out to continue it, or "
                    "choose another folder"
                )
            return config
    raise ValueError("no source of text; give at least one, or the --out of a preparation to continue (--resume)")


def _absolute(config: PrepareConfig) -> PrepareConfig:
    """The config with absolute paths, so that the folder can be repaired from any working directory."""
    paths = [s if s == "python" or s.startswith("hub:") or is_url(s) else os.path.abspath(s) for s in config.sources]
    given = config.tokenizer  # a folder may be called "bpe"
    tokenizer = os.path.abspath(given) if given not in TOKENIZERS and Path(given).exists() else given
    return dataclasses.replace(config, sources=tuple(paths), tokenizer=tokenizer)


@contextmanager
def _bar() -> Generator:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Bars(*columns, TimeRemainingColumn(elapsed_when_finished=False)) as bars:
        task = bars.add_task("choosing the tokenizer", total=None)
        begun: list[float] = []

        def show(state: Progress) -> None:
            if not begun:
                begun.append(time.perf_counter())
            rate = state.text_bytes / 1e6 / max(time.perf_counter() - begun[0], 1e-9)
            bars.update(
                task,
                completed=state.read,
                total=state.total or None,
                description=f"{state.tokens:,} tokens, {rate:.1f} MB/s of text",
            )

        yield show
