"""Score the samples of an experiment in batches, with progress and a limit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from diff_transformer.checks import require_positive

Item = TypeVar("Item")


@dataclass(frozen=True)
class Samples:
    """Attributes:

    limit: most samples of each part; None for all.
    bar: called as ``bar(part, done, total)`` after each batch.
    """

    limit: int | None = None
    bar: Callable[[str, int, int], None] | None = None

    def __post_init__(self):
        require_positive(limit=self.limit)

    def rows(
        self, part: str, items: Sequence[Item], score: Callable[[Sequence[Item]], list[dict]], *, batch_size: int = 1
    ) -> list[dict]:
        """One row for each of the first ``limit`` items, in their order.

        Args:
            part: name of this part of the experiment, for the progress bar.
            score: takes a batch of items and returns a row for each: numbers, strings, lists and dictionaries.
            batch_size: items per call of ``score``.
        """
        items, rows = items[: self.limit], []
        for start in range(0, len(items), batch_size):
            rows += score(items[start : start + batch_size])
            if self.bar is not None:
                self.bar(part, len(rows), len(items))
        return rows


ALL = Samples()  # no limit, no progress
