"""Several sources of rows in one batch, in fixed proportions."""

from collections.abc import Iterator, Mapping
from typing import Protocol, TypedDict

import numpy as np

from diff_transformer.data.seeding import training_rng
from diff_transformer.errors import UserError

IGNORED = -100  # the label of a token without loss


class RowSource(Protocol):
    """A source of rows of a fixed length, each a pure function of its index."""

    length: int

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]; label -100 = no loss."""
        ...


class Batch(TypedDict):
    """The rows of one step."""

    input_ids: np.ndarray  # int64 [B, T]
    labels: np.ndarray  # int64 [B, T]
    source: np.ndarray  # int64 [B], index into the mixture's `names`


class Mixture:
    """Batches with the same number of rows of each source at every step; a pure function of the step.

    The rows of a source come in their order: none is repeated or left out, and resuming needs only the step.

    Args:
        sources: by name; their rows have one length.
        weights: a positive number for each source.
        batch_size: rows of a batch.

    Raises:
        UserError: for a batch too small for every source to have a row.
    """

    def __init__(self, sources: Mapping[str, RowSource], weights: Mapping[str, float], batch_size: int, seed: int = 0):
        self.sources, self.names = dict(sources), tuple(sources)
        self.length = sources[self.names[0]].length
        self.batch_size = batch_size
        self.seed = seed
        rows = apportion(weights, batch_size)
        if missing := [name for name in self.names if not rows[name]]:
            raise UserError(
                f"batch_size {batch_size} leaves no row for {', '.join(missing)} at weights {weights}; give more"
            )
        self.rows_per_source = {name: rows[name] for name in self.names}

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The batch of ``step`` (from 0), or the part of one of ``world_size`` processes.

        Rows are shuffled, so that every part of the batch is a mixture. The parts of ranks 0, 1, ... joined are the
        whole batch; ``world_size`` divides it. Rows of other ranks are not computed.
        """
        order = training_rng(self.seed, "mixture", step).permutation(self.batch_size)
        shares = np.array(list(self.rows_per_source.values()))
        sources = np.repeat(np.arange(len(self.names)), shares)
        starts = step * shares - np.cumsum([0, *shares[:-1]])
        share = self.batch_size // world_size
        mine = order[rank * share : (rank + 1) * share]  # places in the batch before the shuffle
        ids, labels = (np.empty((share, self.length), np.int64) for _ in range(2))
        for number, name in enumerate(self.names):
            for first, count, places in _runs(mine, sources[mine] == number):
                ids[places], labels[places] = self.sources[name].rows(int(starts[number] + first), count)
        return {"input_ids": ids, "labels": labels, "source": sources[mine]}


def _runs(values: np.ndarray, chosen: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """The ``chosen`` ones of ``values`` as runs of consecutive numbers: (first, count, places in ``values``)."""
    places = np.flatnonzero(chosen)
    places = places[np.argsort(values[places])]
    breaks = np.flatnonzero(np.diff(values[places]) != 1) + 1
    for run in np.split(places, breaks):
        if len(run):
            yield int(values[run[0]]), len(run), run


def apportion(weights: Mapping[str, float], rows: int) -> dict[str, int]:
    """Whole numbers that sum to ``rows``, in the weights' proportions, by the largest remainder."""
    total = sum(weights.values())
    exact = {name: rows * weight / total for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(weights, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: rows - sum(shares.values())]:
        shares[name] += 1
    return shares
