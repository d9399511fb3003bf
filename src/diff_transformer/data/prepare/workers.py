"""Units to shards in several processes, of which none outlives this one."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

from diff_transformer.data.prepare.encoder import Encoder
from diff_transformer.data.prepare.shard_files import write_shard
from diff_transformer.data.prepare.units import Unit


@dataclass(frozen=True)
class Task:
    """What every shard is made with. ``state``: the tokenizer as JSON; ``dtype``: "<u2" or "<u4"."""

    folder: Path
    state: str
    dtype: str
    end_of_text: int


def shards(units: Iterable[Unit], task: Task, jobs: int) -> Iterator[tuple[dict, Unit]]:
    """The record of each shard as it is finished, in any order, with its unit. ``jobs`` + 1 units are held at a time.

    Raises:
        RuntimeError: if a process is killed, as happens where memory runs out.
    """
    if jobs == 1:
        encoder = Encoder(task.state, task.dtype)
        for unit in units:
            yield write_shard(task.folder, unit, encoder, task.end_of_text), unit
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin, initargs=(task,))
    waiting: dict[Future, Unit] = {}
    try:
        for unit in units:
            waiting[pool.submit(_work, unit)] = unit
            if len(waiting) > jobs:
                yield from _finished(waiting)
        while waiting:
            yield from _finished(waiting)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a process that tokenised was killed, perhaps because memory ran out; what is finished is kept: go on with "
            "--resume and fewer --jobs"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(waiting: dict[Future, Unit]) -> Iterator[tuple[dict, Unit]]:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        yield future.result(), waiting.pop(future)


_own: tuple[Task, Encoder] | None = None


def _begin(task: Task) -> None:
    """In each process: the tokenizer on one thread, Ctrl-C left to the parent, and an end when the parent ends."""
    global _own
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _own = task, Encoder(task.state, task.dtype)


def _end_with_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(unit: Unit) -> dict:
    assert _own is not None
    task, encoder = _own
    return write_shard(task.folder, unit, encoder, task.end_of_text)
