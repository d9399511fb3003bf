"""Name the process that holds up the others; a collective operation that times out names none, or an innocent one.

Each process publishes its step and phase to a store on rank 0. If none moves for ``seconds``, the run ends with a
sentence about those that are silent or furthest behind. A checkpoint may take any time.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

PHASES = ("data", "step", "validation", "checkpoint")  # in their order within a step
EXIT_CODE = 75  # EX_TEMPFAIL: the run can be resumed


class Heartbeat(threading.Thread):
    """Watch the processes of a run until it is set: ``over``.

    Args:
        share: returns rank 0's argument on every process (Fabric's ``broadcast``).
    """

    def __init__(self, rank: int, world: int, seconds: float, share: Callable[[int], int]):
        super().__init__(name="heartbeat", daemon=True)
        self.rank, self.world, self.seconds, self.over = rank, world, seconds, threading.Event()
        self._pause, self._seen, self._answered = min(seconds / 8, 5.0), {}, time.monotonic()
        self.at(0, "data")
        host, timeout = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=max(1.0, seconds))
        store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False) if rank == 0 else None
        port = share(store.port if store is not None else 0)
        self._store = store or dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)

    def at(self, step: int, phase: str) -> None:
        """Record that this process is in ``phase`` of ``step`` (from 0)."""
        self._now, self._since = (step, phase), time.monotonic()

    def run(self) -> None:
        while not self.over.wait(self._pause):
            try:
                stalled, self._answered = self.stalled(), time.monotonic()
            except (RuntimeError, OSError):
                silent = time.monotonic() - self._answered >= self.seconds
                stalled = {0: "has the store of the run, which does not answer"} if silent else {}
            if stalled and not self.over.is_set():
                if self.rank == min(set(range(self.world)) - set(stalled) or stalled):
                    about = "; ".join(f"rank {rank} {text}" for rank, text in stalled.items())
                    print(f"error: no process moved for {self.seconds:.0f} s: {about}", file=sys.stderr)
                    print("the last checkpoint is intact; continue with --resume", file=sys.stderr, flush=True)
                time.sleep(2 * self._pause)  # for the others to see it too
                os._exit(EXIT_CODE)

    def stalled(self) -> dict[int, str]:
        """Publish this process's progress and read everybody's: the ranks that hold up the others, if any, and why."""
        now, where = time.monotonic(), f"{socket.gethostname()}, process {os.getpid()}"
        self._store.set(str(self.rank), json.dumps([*self._now, now - self._since, now, where]))
        known = {rank: self._store.get(str(rank)).decode() for rank in range(self.world)}
        self._seen = {r: self._seen[r] if self._seen.get(r, ("",))[0] == t else (t, now) for r, t in known.items()}
        behind: dict[tuple, dict[int, str]] = {}  # by place, silent ranks first
        for rank, (text, seen) in self._seen.items():
            step, phase, age, _, where = json.loads(text)
            silent = now - seen >= self.seconds
            if not silent and (phase == "checkpoint" or age + now - seen < self.seconds):
                return {}
            place, verb = ((), "silent since") if silent else ((step, PHASES.index(phase)), "in")
            behind.setdefault(place, {})[rank] = f"({where}) is {verb} {phase!r} of step {step + 1}"
        return behind[min(behind)]
