"""The next batches prepared in a thread while the present step runs."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_POLL_SECONDS = 0.1


@contextmanager
def prefetched(prepare: Callable[[int], T], first: int, last: int, *, ahead: int = 2) -> Generator[Iterator[T]]:
    """``prepare(first), ..., prepare(last - 1)`` in order, made up to ``ahead`` steps early in a thread of its own.

    ``prepare`` must depend on nothing but the step, so that running ahead changes no batch. What it raises is raised
    where that batch is asked for. With ``ahead`` 0 there is no thread. Leaving the context ends the thread.
    """
    if not ahead:
        yield map(prepare, range(first, last))
        return
    ready: queue.Queue[tuple[bool, T | BaseException]] = queue.Queue(ahead)
    over = threading.Event()

    def put(made: tuple[bool, T | BaseException]) -> bool:
        while not over.is_set():
            try:
                ready.put(made, timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work():
        for step in range(first, last):
            try:
                made = True, prepare(step)
            except BaseException as error:
                put((False, error))
                return
            if not put(made):
                return

    def batches() -> Iterator[T]:
        for _ in range(first, last):
            good, made = ready.get()
            if not good:
                raise made  # ty: ignore[invalid-raise]  (an exception, as it is no batch)
            yield made  # ty: ignore[invalid-yield]

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        yield batches()
    finally:
        over.set()
        thread.join()
