"""Choice by measurement: the fastest of several correct ways to compute the same, timed once on a machine.

``measure`` times the candidates in turns and keeps what it found in the package's cache folder under ``fastest``: one
JSON file for each key, with all times. Delete the file to measure again. ``DIFF_TRANSFORMER_TUNE=0`` neither measures
nor reads what was kept, and ``force`` measures once in each process and replaces what was kept.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from diff_transformer.durable import cache_folder, once, write_whole

log = logging.getLogger("diff_transformer")

SWITCH = "DIFF_TRANSFORMER_TUNE"
SECONDS = 0.03  # spent on the turns of all candidates, if these are shorter than that
TURNS = 4, 50  # at least and at most, of each candidate: a single turn may be 20 times slower on a busy machine
HOPELESS = 1.5  # a candidate this many times slower than the fastest after the first of TURNS gets no further one
WAIT = 60.0  # seconds for another process that measures the same

Run = Callable[[], object]
Timer = Callable[[Run], float]  # calls the function and returns its seconds


class NotNow(RuntimeError):
    """Raised by a candidate that cannot be timed in this process, but perhaps in another."""


class Measurement(NamedTuple):
    """Which of the candidates is the fastest, and their times."""

    fastest: str
    milliseconds: dict[str, float]  # the shortest time of each candidate that ran
    left_out: dict[str, str]  # why each other candidate was not timed
    complete: bool = True  # False, and not kept, if a candidate could not be timed for a passing reason, or none ran


_measurements: dict[str, Measurement] = {}  # of this process
_measuring = threading.Lock()


def tuning() -> str:
    """The value of DIFF_TRANSFORMER_TUNE: "0", "1" (the default) or "force".

    Raises:
        ValueError: for any other value.
    """
    given = os.environ.get(SWITCH, "1")
    if given not in ("0", "1", "force"):
        raise ValueError(
            f"{SWITCH} is {given!r}; give 0 (never measure), 1 (measure once on a machine, the default) or force "
            "(measure again)"
        )
    return given


def wall_clock(run: Run) -> float:
    """Seconds of one call on the CPU."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(
    key: Mapping[str, str | int], candidates: Mapping[str, Run], timer: Timer = wall_clock, again: bool = False
) -> Measurement:
    """Which of the candidates is the fastest, measured or as kept; the first one, the default, without times where
    nothing can be measured.

    A candidate that raises is left out. One that fails for a reason that may pass (memory, the disk, a compiler that
    does not start, ``NotNow``) is left out in this process only. A disk that cannot be read or written costs another
    measurement in the next process. Of the processes that want the same measurement at a time, one measures and the
    others wait.

    Args:
        key: what the measurement depends on: processor or GPU, versions, dtype, widths, and the candidates' names.
        candidates: functions without arguments by name; each is called some times.
        timer: calls a function and returns its seconds.
        again: measure what was measured before.

    Raises:
        ValueError: DIFF_TRANSFORMER_TUNE is neither 0, 1 nor force.
    """
    given, names = tuning(), list(candidates)
    default = Measurement(names[0], {}, {}, complete=False)
    if given == "0" or len(names) == 1:
        return default
    told = _told(key, names)
    if again or told not in _measurements:
        measurement = _kept_or_measured(told, candidates, timer, read=not again and given != "force")
        if measurement is None:
            return default
        _measurements[told] = measurement
        log.info("fastest of %s: %s", told, described(measurement))
    return _measurements[told]


def kept(key: Mapping[str, str | int], names: Sequence[str]) -> str:
    """The fastest of the candidates as it was kept, or the first one; nothing is measured.

    Raises:
        ValueError: as ``measure``.
    """
    if tuning() == "0" or len(names) == 1:
        return names[0]
    told = _told(key, list(names))
    measurement = _measurements.get(told) or _read(_path(told), names)
    if measurement is None:
        return names[0]
    if told not in _measurements:
        log.info("fastest of %s: %s", told, described(measurement))
    return _measurements.setdefault(told, measurement).fastest


def _told(key: Mapping[str, str | int], names: list[str]) -> str:
    return json.dumps({**key, "candidates": names}, sort_keys=True)


def _path(told: str) -> Path | None:
    """The measurement's file; None without a home folder."""
    try:
        return cache_folder() / "fastest" / f"{hashlib.sha256(told.encode()).hexdigest()[:24]}.json"
    except RuntimeError:
        return None


def described(measurement: Measurement) -> str:
    """The measurement in one line: the fastest form first, then the others, then those that were left out."""
    times = sorted(measurement.milliseconds.items(), key=lambda item: (item[0] != measurement.fastest, item[1]))
    parts = [f"{name} {ms:.3g} ms" for name, ms in times]
    return ", ".join([*parts, *(f"{name} left out ({reason})" for name, reason in measurement.left_out.items())])


def _kept_or_measured(told: str, candidates: Mapping[str, Run], timer: Timer, read: bool) -> Measurement | None:
    """The kept measurement or a new one; None if there is none and it cannot be measured now."""
    path = _path(told)

    def known() -> Measurement | None:
        return _read(path, candidates) if read else None

    def measured(locked: bool) -> Measurement:
        if not locked:
            log.info("measuring without a lock")
        measurement = in_turns(candidates, timer)
        if measurement.complete:
            _write(path, told, measurement)
        return measurement

    if not _measuring.acquire(blocking=False):
        return known()  # the lock is not waited for: its holder may need this thread, which may be autograd's
    try:
        return once(path, known, measured, seconds=WAIT)
    finally:
        _measuring.release()


def in_turns(candidates: Mapping[str, Run], timer: Timer) -> Measurement:
    """Time the candidates in turns, every other turn in the opposite order, after one call of each.

    The shortest time counts. ``TURNS``, ``SECONDS`` and ``HOPELESS`` limit the number of turns. The first candidate is
    the fastest if none ran.
    """
    left_out: dict[str, str] = {}
    complete = True
    best: dict[str, float] = {}
    deadline = time.perf_counter() + SECONDS
    for turn in range(-1, TURNS[1]):  # turn -1 compiles and warms up
        if turn >= TURNS[0] and time.perf_counter() > deadline:
            break
        limit = HOPELESS * min(best.values(), default=float("inf"))
        running = [n for n in candidates if n not in left_out and (turn < TURNS[0] or best[n] <= limit)]
        if turn >= TURNS[0] and len(running) == 1:
            break
        for name in running[:: -1 if turn % 2 else 1]:
            try:
                seconds = timer(candidates[name])
            except Exception as error:  # each library raises its own types
                best.pop(name, None)
                memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in str(error)
                left_out[name] = "out of memory" if memory else f"{type(error).__name__}: {error}"[:300]
                passing = isinstance(error, OSError | NotNow) or "Failed to find C compiler" in str(error)
                complete = complete and not (memory or passing)
                continue
            if turn >= 0:
                best[name] = min(seconds, best.get(name, seconds))
        if turn < 0:
            deadline = time.perf_counter() + SECONDS
    milliseconds = {name: round(seconds * 1e3, 6) for name, seconds in best.items()}
    name = min(best, key=best.__getitem__, default=next(iter(candidates)))
    return Measurement(name, milliseconds, left_out, complete and bool(best))


def _read(path: Path | None, candidates: Container[str]) -> Measurement | None:
    try:
        kept = json.loads(path.read_text()) if path is not None else {}
        milliseconds = {name: float(ms) for name, ms in kept["milliseconds"].items()}
        measurement = Measurement(kept["fastest"], milliseconds, dict(kept["left_out"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no file, or no measurement in it
        return None
    return measurement if measurement.fastest in candidates else None


def _write(path: Path | None, told: str, measurement: Measurement) -> None:
    if path is None:
        return
    found = {"fastest": measurement.fastest, "milliseconds": measurement.milliseconds, "left_out": measurement.left_out}
    try:
        write_whole(path, json.dumps({"key": json.loads(told), **found}, indent=1) + "\n")
    except OSError as error:
        log.info("the measurement is not kept: %s", error)
