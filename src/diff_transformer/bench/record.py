"""A benchmark's record: rows as they come, saved after each, so that a run cut short leaves what it has."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from diff_transformer.durable import write_whole
from diff_transformer.evals.provenance import provenance


class Deadline:
    """A moment after which nothing new is begun; ``seconds=None`` is never."""

    def __init__(self, seconds: float | None = None):
        self.end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        return float("inf") if self.end is None else self.end - time.monotonic()

    def passed(self) -> bool:
        return self.left() <= 0


def collect(
    benchmark: str,
    rows: Iterator[dict],
    settings: dict,
    *,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """{"benchmark": name, "rows": [...], "provenance": {...}} of a generator of rows.

    A row of {"unfinished": reason} is not kept as a row but as the record's field of that name. With ``out`` the file
    is written after every row.
    """
    record: dict = {"benchmark": benchmark, "rows": [], "provenance": provenance(**settings)}
    save(record, out)
    for row in rows:
        if "unfinished" in row:
            record["unfinished"] = row["unfinished"]
        else:
            record["rows"].append(row)
            if on_row is not None:
                on_row(row)
        save(record, out)
    return record


def save(record: dict, out: Path | None) -> None:
    """Write the record atomically; do nothing where ``out`` is None."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(record, indent=1) + "\n")
