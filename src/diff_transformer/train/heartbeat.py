"""Name the process that holds up the others; a collective operation that times out names none, or an innocent one.

Each process publishes its step and phase to the store of the process group. If none moves for ``seconds``, the run
ends with a sentence about those that are silent or furthest behind. A checkpoint may take any time.
"""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

PHASES = ("data", "step", "validation", "checkpoint")  # in their order within a step


class Heartbeat(threading.Thread):
    """Watch the processes of a run until it is set: ``over``. They share ``store``."""

    def __init__(self, rank: int, world: int, seconds: float, store):
        super().__init__(name="heartbeat", daemon=True)
        self.rank, self.world, self.seconds, self.over = rank, world, seconds, threading.Event()
        self._store = dist.PrefixStore("heartbeat", store.clone())  # training may block its own connection
        self._pause, self._seen = min(seconds / 8, 5.0), {}
        self.at(0, "data")

    def at(self, step: int, phase: str) -> None:
        """Record that this process is in ``phase`` of ``step`` (from 0)."""
        self._now, self._since = (step, phase), time.monotonic()

    def run(self) -> None:
        with suppress(RuntimeError):  # the store ends with torchrun, which ends the processes
            while not self.over.wait(self._pause):
                if (stalled := self.stalled()) and not self.over.is_set():
                    if self.rank == min(set(range(self.world)) - set(stalled) or stalled):
                        about = "; ".join(f"rank {rank} {text}" for rank, text in stalled.items())
                        about = f"no process moved for {self.seconds:.0f} s: {about}\nthe last checkpoint is intact"
                        print(f"error: {about}; continue with --resume", file=sys.stderr, flush=True)
                    time.sleep(2 * self._pause)  # for the others to see it too
                    os._exit(os.EX_TEMPFAIL)  # the run can be resumed

    def stalled(self) -> dict[int, str]:
        """Publish this process's progress and read everybody's: the ranks that hold up the others, if any, and why."""
        now, where = time.monotonic(), f"{socket.gethostname()}, process {os.getpid()}"
        self._store.set(str(self.rank), json.dumps([*self._now, now - self._since, now, where]))
        known = [text.decode() for text in self._store.multi_get([str(rank) for rank in range(self.world)])]
        self._seen = {r: self._seen[r] if self._seen.get(r, ("",))[0] == t else (t, now) for r, t in enumerate(known)}
        behind: dict[tuple, dict[int, str]] = {}  # by place, silent ranks first
        for rank, (text, seen) in self._seen.items():
            step, phase, age, _, where = json.loads(text)
            silent = now - seen >= self.seconds
            if not silent and (phase == "checkpoint" or age + now - seen < self.seconds):
                return {}
            place, verb = ((), "silent since") if silent else ((step, PHASES.index(phase)), "in")
            behind.setdefault(place, {})[rank] = f"({where}) is {verb} {phase!r} of step {step + 1}"
        return behind[min(behind)]
