"""Several corpora as one source of rows, in given proportions."""

from collections.abc import Mapping

import numpy as np

from diff_transformer.data.mixture import Source, apportion
from diff_transformer.data.seeding import training_rng

PERIOD = 10_000


class WeightedCorpora:
    """Rows of several sources by weight: every 10,000 rows in succession hold the same number of each source, in an
    order drawn from (seed, which 10,000). Row k of a source is the k-th of its rows, so that none is repeated or left
    out in an epoch of it. Row i is a pure function of (seed, i).

    Args:
        sources: what the rows are taken from, by name; of one length.
        weights: a positive number for each name; their sum counts as one.

    Raises:
        ValueError: for weights that do not fit, or one below 1 / 10,000 of their sum.
    """

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float], seed: int = 0):
        if not sources or sources.keys() != weights.keys():
            raise ValueError(f"sources {sorted(sources)} and weights {sorted(weights)} must have the same names")
        if any(not weight > 0 for weight in weights.values()):
            raise ValueError(f"weights must be above 0, got {weights}; leave out a corpus that is not wanted")
        lengths = {name: source.length for name, source in sources.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"sources must give rows of one length, got {lengths}")
        self.sources = list(sources.values())
        self.names = tuple(sources)
        self.length = self.sources[0].length
        self.seed = seed
        shares = apportion({name: weights[name] for name in sources}, PERIOD)
        rare = [name for name, share in shares.items() if not share]
        if rare:
            raise ValueError(f"the weight of {', '.join(rare)} is below 1 in {PERIOD}; give more, or leave it out")
        self.rows_per_period = np.array(list(shares.values()))
        self._period: tuple[int, np.ndarray, np.ndarray] | None = None

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]."""
        ids, labels = (np.empty((count, self.length), np.int64) for _ in range(2))
        for place in range(count):
            which, row = self.origin(first + place)
            made = self.sources[which].rows(row, 1)
            ids[place], labels[place] = made[0][0], made[1][0]
        return ids, labels

    def origin(self, index: int) -> tuple[int, int]:
        """(number of the source, row of that source) of row ``index``."""
        period, place = divmod(index, PERIOD)
        if self._period is None or self._period[0] != period:
            order = training_rng(self.seed, "corpora", period).permutation(
                np.repeat(np.arange(len(self.sources)), self.rows_per_period)
            )
            rank = np.empty(PERIOD, np.int64)
            for which, share in enumerate(self.rows_per_period):
                rank[order == which] = np.arange(share)
            self._period = period, order, rank
        _, order, rank = self._period
        which = int(order[place])
        return which, int(period * self.rows_per_period[which] + rank[place])
