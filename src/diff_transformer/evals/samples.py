"""Score the samples of an experiment in batches, with progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Samples:
    """The progress of an experiment: ``bar(part, done, total)`` is called after each batch."""

    bar: Callable[[str, int, int], None] | None = None

    def rows(
        self, part: str, items: Sequence[Item], score: Callable[[Sequence[Item]], list[dict]], *, batch_size: int = 1
    ) -> list[dict]:
        """The rows of all items, in their order.

        Args:
            part: name of this part of the experiment, for the progress bar.
            score: takes a batch of items and returns its rows, mostly one for each: numbers, strings, lists and
                dictionaries.
            batch_size: items per call of ``score``.
        """
        rows = []
        for start in range(0, len(items), batch_size):
            rows += score(items[start : start + batch_size])
            if self.bar is not None:
                self.bar(part, min(start + batch_size, len(items)), len(items))
        return rows


ALL = Samples()  # no progress
