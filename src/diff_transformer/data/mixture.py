"""Several sources of rows in one batch, in fixed proportions."""

from typing import Protocol, TypedDict

import numpy as np

from diff_transformer.data.seeding import training_rng


class Source(Protocol):
    """Rows of a fixed length, each a pure function of its index."""

    length: int

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]; -100 = no loss."""
        ...


class Batch(TypedDict):
    """``source`` indexes the mixture's ``names``."""

    input_ids: np.ndarray  # int64 [B, T]
    labels: np.ndarray  # int64 [B, T]
    source: np.ndarray  # int64 [B]


class Mixture:
    """Batches that hold the same number of rows of each source at every step; a pure function of the step.

    Row k of a source's share in step s is its row ``s * share + k``, so that nothing is repeated or left out, and
    resuming needs nothing but the step.
    """

    def __init__(self, sources: dict[str, Source], weights: dict[str, float], batch_size: int, seed: int = 0):
        if not sources or sources.keys() != weights.keys():
            raise ValueError(
                f"sources {sorted(sources)} and weights {sorted(weights)} must have the same names, at least one"
            )
        if any(not weight > 0 for weight in weights.values()):
            raise ValueError(f"weights must be above 0, got {weights}; leave out a source that is not wanted")
        lengths = {name: source.length for name, source in sources.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"sources must give rows of one length, got {lengths}")
        self.sources = dict(sources)
        self.names = tuple(sources)
        self.length = next(iter(lengths.values()))
        self.batch_size = batch_size
        self.seed = seed
        self.rows_per_source = _apportion(weights, batch_size)
        missing = [name for name in self.names if not self.rows_per_source[name]]
        if missing:
            enough = next(size for size in range(batch_size + 1, 1 << 30) if all(_apportion(weights, size).values()))
            raise ValueError(
                f"batch_size {batch_size} leaves no row for {', '.join(missing)} at weights {weights}; "
                f"give batch_size {enough} or a larger weight"
            )

    def batch(self, step: int) -> Batch:
        """The batch of ``step`` (from 0). Rows are shuffled, so that any part of the batch holds a mixture."""
        order = training_rng(self.seed, "mixture", step).permutation(self.batch_size)
        shares = [(self.sources[name], self.rows_per_source[name]) for name in self.names]
        parts = [source.rows(step * share, share) for source, share in shares]
        source = np.repeat(np.arange(len(self.names)), [share for _, share in shares])
        return {
            "input_ids": np.concatenate([ids for ids, _ in parts])[order],
            "labels": np.concatenate([labels for _, labels in parts])[order],
            "source": source[order],
        }


def _apportion(weights: dict[str, float], rows: int) -> dict[str, int]:
    """Whole numbers that sum to ``rows``, in the weights' proportions, by the largest remainder."""
    total = sum(weights.values())
    exact = {name: rows * weight / total for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(weights, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: rows - sum(shares.values())]:
        shares[name] += 1
    return shares
