"""Preparation in tasks of datatrove: which are finished, and what they made.

The files of the sources are divided among a fixed number of tasks. Each task writes shards of its own and a journal,
so that the bytes depend on the number of tasks, and not on the engine or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from diff_transformer.checks import listed
from diff_transformer.data.prepare.config import PrepareConfig, TokenizerFacts
from diff_transformer.data.prepare.engine import ENGINES, Engine
from diff_transformer.data.prepare.folder import (
    DUPLICATES,
    ERROR,
    LAST_STAGE,
    LOGS,
    SHARDS,
    SPLITS,
    TASKS,
    WORKING,
    finished_mark,
    journal_path,
    read_journal,
)
from diff_transformer.data.prepare.readers import Tally
from diff_transformer.data.prepare.sources import TextSource
from diff_transformer.data.prepare.workers import Task
from diff_transformer.durable import remove

MAX_DEFAULT_TASKS = 64


def parts_of(sources: Sequence[TextSource]) -> list[TextSource]:
    """The sources, those of files divided into one source for each file."""
    parts = []
    for source in sources:
        files = [replace(source, items=(item,), size=item.size) for item in source.items]
        parts += files if source.kind == "files" else [source]
    return parts


def with_tasks(config: PrepareConfig, sources: Sequence[TextSource]) -> PrepareConfig:
    """The config with its number of tasks: by default one for each file, at most 64.

    Raises:
        ValueError: for more tasks than files.
    """
    parts = parts_of(sources)
    if any(part.kind == "hub" for part in parts):
        return replace(config, tasks=config.tasks or MAX_DEFAULT_TASKS)
    if config.tasks > len(parts):
        raise ValueError(
            f"tasks is {config.tasks}, and the sources have {len(parts)} files, which are not divided; give --tasks of "
            f"at most {len(parts)}"
        )
    return replace(config, tasks=config.tasks or min(len(parts), MAX_DEFAULT_TASKS))


def run_tasks(
    config: PrepareConfig,
    out: Path,
    sources: Sequence[TextSource],
    facts: TokenizerFacts,
    engine: Engine | None,
    *,
    jobs: int | None,
    wrong: Callable[[Path, dict, str], str | None],
) -> tuple[dict[str, dict], Tally, int] | None:
    """Run the tasks that are not finished.

    Args:
        engine: where to run them; None if all are finished.
        jobs: tasks at a time; None for no limit.
        wrong: tells what is wrong with a shard (`folder.wrong_size` or `folder.wrong_content`), which is made again.

    Returns:
        The records of all shards by name, the counts of documents, and the number that filters dropped; None if Slurm
        will run the tasks.

    Raises:
        ValueError: for tasks that failed, with the reason of the first one, or are not finished without an engine.
        RuntimeError: if a process was killed.
    """
    out = out.absolute()  # tasks may run elsewhere
    todo = _unfinished(config, out, facts, wrong)
    if todo and engine is None:
        raise ValueError(
            f"{_some(todo)} of the {config.tasks} tasks of {out} are not finished; when none is running, continue with "
            f"`diff-transformer prepare --out {out} --resume --engine {'|'.join(ENGINES)}`"
        )
    if todo and engine is not None:
        from diff_transformer.data.prepare.executors import run_stages

        for rank in todo:
            (out / LOGS / LAST_STAGE / "completions" / f"{rank:05d}").unlink(missing_ok=True)
        for name in (SHARDS, TASKS):
            (out / name).mkdir(exist_ok=True)
        task = Task(out / SHARDS, facts.state, facts.dtype, facts.end_of_text)
        try:
            run_stages(config, out, parts_of(sources), task, engine, jobs)
        except Exception as error:
            raise _failure(config, out) or error from None
        if engine.kind == "slurm":
            return None
        if _unfinished(config, out, facts, wrong):
            raise RuntimeError(f"not all tasks finished; see {out / LOGS}, then --resume")
    for name in WORKING:
        remove(out / DUPLICATES / name)
    return _collected(config, out)


def _unfinished(config: PrepareConfig, out: Path, facts: TokenizerFacts, wrong) -> list[int]:
    todo = []
    for rank in range(config.tasks):
        records = read_journal(journal_path(out, rank))
        mark = records.pop(finished_mark(rank), None)
        if mark is None or any(wrong(out / SHARDS, record, facts.dtype) for record in records.values()):
            todo.append(rank)
    return todo


def _failure(config: PrepareConfig, out: Path) -> ValueError | None:
    """The error of the first task that failed, if one did."""
    failed = [rank for rank in range(config.tasks) if (out / TASKS / f"{rank:05d}{ERROR}").exists()]
    if not failed:
        return None
    reason = (out / TASKS / f"{failed[0]:05d}{ERROR}").read_text()
    return ValueError(f"{_some(failed)} of {config.tasks} failed: {reason}. Finished tasks are kept (--resume)")


def _some(ranks: list[int]) -> str:
    return f"task{'s' * (len(ranks) > 1)} {listed([str(rank) for rank in ranks])}"


def _collected(config: PrepareConfig, out: Path) -> tuple[dict[str, dict], Tally, int]:
    records, tally, filtered = {}, Tally(), 0
    for rank in range(config.tasks):
        mine = read_journal(journal_path(out, rank))
        mark = mine.pop(finished_mark(rank))
        records |= mine
        for counts in (mark["documents"], mark["left_out"]):
            for name, count in counts.items():
                if name == "filtered":
                    filtered += count
                else:
                    setattr(tally, name, getattr(tally, name) + count)
    assert set(mark["documents"]) == set(SPLITS)
    return records, tally, filtered
