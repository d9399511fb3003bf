"""Iterate over the samples of an experiment, with progress, a limit, and a journal to resume from.

The journal is a file of JSON lines beside the result: first the settings, then one line per finished sample. A run that
is interrupted or killed loses only its current batch.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from diff_transformer.checks import differences, require_positive
from diff_transformer.durable import append_lines, read_lines, require_writable, write_whole
from diff_transformer.errors import UserError

Item = TypeVar("Item")
# Metadata of a field of ``Settings`` that no result depends on: an interrupted run may go on with another value.
CHANGES_NOTHING = {"changes_nothing": True}


class Samples:
    """Scores the samples of an experiment in batches, and keeps what is finished.

    Args:
        journal: file for finished samples; None keeps none.
        settings: everything the samples depend on. A journal with other settings is refused.
        limit: most samples of each part; None for all.
        resume: continue an existing journal.
        bar: called as ``bar(part, done, total)`` after each batch.

    Raises:
        FileExistsError: if the journal exists and ``resume`` is False.
        ValueError: if the journal has other settings (naming them), or is not a journal.
    """

    def __init__(
        self,
        journal: Path | None = None,
        *,
        settings: dict | None = None,
        limit: int | None = None,
        resume: bool = False,
        bar: Callable[[str, int, int], None] | None = None,
    ):
        require_positive(limit=limit)
        self.journal, self.limit, self.bar = journal, limit, bar
        self.finished: dict[tuple[str, int], dict] = {}
        if journal is None:
            return
        require_writable(journal.parent)
        self._settings = json.loads(json.dumps(settings or {}))
        if journal.exists():
            if not resume:
                raise UserError(
                    f"{journal} holds an interrupted run; resume it (--resume), delete it, or choose another --out"
                )
            self._read(journal)

    def rows(
        self,
        part: str,
        items: Sequence[Item],
        score: Callable[[list[Item]], list[dict]],
        *,
        batch_size: int = 1,
    ) -> list[dict]:
        """One row for each of the first ``limit`` items, in their order.

        Args:
            part: unique name of this part of the experiment: a cell, a data set.
            score: takes a batch of items and returns a row for each. It is not called for samples in the journal.
                Rows must survive JSON unchanged (numbers, strings, lists, dictionaries).
            batch_size: items per call of ``score``.
        """
        require_positive(batch_size=batch_size)
        items = items[: self.limit]
        missing = [index for index in range(len(items)) if (part, index) not in self.finished]
        self._show(part, len(items) - len(missing), len(items))
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            scored = score([items[index] for index in batch])
            for index, row in zip(batch, scored, strict=True):
                self.finished[part, index] = row
            self._append([{"part": part, "index": index, "row": self.finished[part, index]} for index in batch])
            self._show(part, len(items) - len(missing) + start + len(batch), len(items))
        return [self.finished[part, index] for index in range(len(items))]

    def done(self) -> None:
        """Remove the journal. Call this after the result is saved."""
        if self.journal is not None:
            self.journal.unlink(missing_ok=True)

    def _show(self, part: str, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar(part, done, total)

    def _append(self, lines: list[dict]) -> None:
        if self.journal is None:
            return
        if not self.journal.exists():
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.journal, json.dumps({"settings": self._settings}) + "\n")
        append_lines(self.journal, lines)

    def _read(self, journal: Path) -> None:
        first, *entries = read_lines(journal) or [{}]
        if "settings" not in first:
            raise UserError(f"{journal} is not a journal of an experiment; delete it or choose another --out")
        different = differences(first["settings"], self._settings)
        if different:
            listed = "\n  ".join(different)
            raise UserError(f"{journal} belongs to a run with other settings (saved against given):\n  {listed}")
        self.finished = {(entry["part"], entry["index"]): entry["row"] for entry in entries}
