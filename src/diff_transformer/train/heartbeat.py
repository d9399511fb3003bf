"""A watchdog for distributed training that names the process that holds up the others.

If one process stalls, every other one waits inside a collective operation until that operation times out, with an error
that names no process. Here each process publishes (step, phase) to a store on rank 0. If no process makes progress for
``seconds``, the run ends with a message that names the processes that are furthest behind or silent.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

PHASES = ("waiting for data", "forward and backward", "update", "validation", "checkpoint")
EXIT_CODE = 75  # EX_TEMPFAIL: the run can be resumed
_CHECKS, _LONGEST_PAUSE = 10, 5.0  # checks within `seconds`; seconds between checks, at most
_GLOO = "gloo/transport"  # in gloo's errors, which have no class of their own
_OVER = "over"  # key in the store, set when a process ends the run


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a process."""

    step: int  # from 0
    phase: str  # one of PHASES
    age: float  # seconds in this phase, as far as is known
    silent: float  # seconds since the sign
    where: str = ""  # host and process id

    @property
    def place(self) -> tuple[int, int]:
        """(step, index of the phase), which orders processes by progress."""
        return self.step, PHASES.index(self.phase)


def stalled(signs: dict[int, Sign], seconds: float) -> list[int]:
    """The ranks that hold up the others: [] while any process makes progress, all ranks if none is behind."""
    if any(sign.age < seconds for sign in signs.values()):
        return []
    silent = [rank for rank, sign in signs.items() if sign.silent >= seconds]
    if silent:
        return silent
    first = min(sign.place for sign in signs.values())
    return [rank for rank, sign in signs.items() if sign.place == first]


def describe(signs: dict[int, Sign], ranks: list[int], seconds: float) -> str:
    """The error message that names ``ranks``."""
    if len(ranks) == len(signs) > 1:
        sign = signs[ranks[0]]
        return (
            f"no process has moved for {seconds:.0f} s: all {len(signs)} are in {sign.phase!r} of step "
            f"{sign.step + 1}, so an operation between them does not end (network, or one of them is slow there)"
        )
    parts = []
    for rank in ranks:
        sign = signs[rank]
        silent = f"; no sign of life for {sign.silent:.0f} s" if sign.silent >= seconds else ""
        parts.append(
            f"rank {rank}{sign.where} stalled in {sign.phase!r} of step {sign.step + 1} for {sign.age:.0f} s{silent}"
        )
    waiting = [rank for rank in signs if rank not in ranks]
    others = f"; waiting for it: rank {', '.join(map(str, waiting))}" if waiting else ""
    return " and ".join(parts) + others


class PeerLost(RuntimeError):
    """Another process of the run has ended, or cannot be reached."""


@contextmanager
def lost_peers_explained(folder: object) -> Generator[None]:
    """Context in which a broken connection to another process is raised as ``PeerLost``, with what to do.

    Args:
        folder: of the run, for the message.
    """
    try:
        yield
    except RuntimeError as error:
        lines = str(error).splitlines() or [""]
        if not isinstance(error, dist.DistError) and _GLOO not in lines[0]:
            raise
        raise PeerLost(
            f"this process lost its connection to another one of the run in {folder}, which was probably killed (its "
            f"own output and the system's log say why); the last checkpoint is intact, continue with --resume. The "
            f"connection's error: {lines[0][:200]}"
        ) from error


class Heartbeat:
    """Publishes the progress of this process and watches the others. As a context manager, it yields ``at``.

    Args:
        rank, world: this process's rank and the number of processes.
        seconds: time without progress after which the run ends; 0 for no limit.
        share: returns rank 0's argument on every process (Fabric's ``broadcast``).
        say: called with the message on one process, before all end with ``EXIT_CODE``.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        seconds: float,
        share: Callable[[int], int],
        say: Callable[[str], None] | None = None,
    ):
        self.rank, self.world, self.seconds = rank, world, seconds
        self._say = say or (lambda message: print(f"error: {message}", file=sys.stderr, flush=True))
        self._now, self._since = (0, PHASES[0]), time.monotonic()
        self._pause = min(seconds / _CHECKS, _LONGEST_PAUSE)
        self._seen: dict[int, tuple[str, float]] = {}
        self._answered = time.monotonic()
        self._over = threading.Event()
        if not seconds:
            return
        host, timeout = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=max(1.0, seconds))
        store = None
        if rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            for other in range(world):
                store.set(str(other), json.dumps([0, PHASES[0], 0.0, 0, ""]))
            store.set(_OVER, "")
        port = share(store.port if store is not None else 0)
        self._store = store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def at(self, step: int, phase: str) -> None:
        """Record that this process is in ``phase`` of ``step`` (from 0)."""
        self._now, self._since = (step, phase), time.monotonic()

    def __enter__(self) -> Callable[[int, str], None]:
        self._since = self._answered = time.monotonic()
        if self.seconds:
            self._thread.start()
        return self.at

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if self.seconds and kind is None:  # after an error the thread may wait for a process that has ended
            self._thread.join(self.seconds)

    def _watch(self) -> None:
        count = 0
        while not self._over.wait(self._pause):
            count += 1
            try:
                signs = self.exchange(count)
            except (RuntimeError, OSError):  # the store does not answer
                silent = time.monotonic() - self._answered
                if silent < self.seconds or self._over.is_set():
                    continue
                step, phase = self._now
                signs = {r: Sign(step, phase, silent, silent if r == 0 else 0.0) for r in range(self.world)}
            else:
                self._answered = time.monotonic()
            ranks = stalled(signs, self.seconds)
            if ranks and not self._over.is_set():
                self.end(signs, ranks)

    def exchange(self, count: int) -> dict[int, Sign]:
        """Publish this process's progress for the ``count``-th time and read everyone's; exit if the run is over."""
        now = time.monotonic()
        (step, phase), age = self._now, now - self._since
        where = f" ({socket.gethostname()}, process {os.getpid()})"
        self._store.set(str(self.rank), json.dumps([step, phase, age, count, where]))
        over, *texts = self._store.multi_get([_OVER, *(str(rank) for rank in range(self.world))])
        if over:
            os._exit(EXIT_CODE)
        signs = {}
        for rank, text in enumerate(texts):
            text = text.decode()
            step, phase, age, _, where = json.loads(text)
            before, at = self._seen.get(rank, ("", now))
            if text != before:
                at = now
                self._seen[rank] = text, now
            signs[rank] = Sign(step, phase, age + now - at, now - at, where)
        return signs

    def end(self, signs: dict[int, Sign], ranks: list[int]) -> None:
        """Exit, after all processes could learn of it. The first rank that waits for ``ranks`` prints the message."""
        waiting = [rank for rank in signs if rank not in ranks]
        if self.rank == min(waiting or ranks):
            self._say(describe(signs, ranks, self.seconds) + "; the last checkpoint is intact, continue with --resume")
            with suppress(RuntimeError, OSError):  # the store itself may not answer
                self._store.set(_OVER, "yes")
        time.sleep(2 * self._pause)  # rank 0 keeps the store
        os._exit(EXIT_CODE)
