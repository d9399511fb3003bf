from collections import Counter

import numpy as np
import pytest

from diff_transformer.data.ngrams import ar_hits, frequent_ngrams

VOCAB = 7


def _slow_hits(rows, training, n, threshold):
    counts = Counter(tuple(training[i : i + n]) for i in range(len(training) - n + 1))
    hits = np.zeros(rows.shape, bool)
    for b, row in enumerate(rows):
        for t in range(n - 1, len(row)):
            gram = tuple(row[t - n + 1 : t + 1])
            before = any(tuple(row[s - n + 1 : s + 1]) == gram for s in range(n - 1, t))
            hits[b, t] = before and counts[gram] <= threshold
    return hits


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("threshold", [0, 3, 10, 10**6])
@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_hits_agree_with_a_loop(n, threshold, dtype):
    rng = np.random.default_rng(n)
    training = rng.integers(VOCAB, size=400).astype(dtype)
    rows = rng.integers(VOCAB, size=(5, 63)).astype(dtype)
    frequent = frequent_ngrams(training, n, threshold=threshold, vocab_size=VOCAB)
    hits = ar_hits(rows, frequent, n, vocab_size=VOCAB)
    assert hits.dtype == bool
    np.testing.assert_array_equal(hits, _slow_hits(rows, training, n, threshold))


def test_a_case_by_hand():
    # position:          0  1  2  3  4  5  6
    row = np.array([[1, 2, 3, 1, 2, 2, 2]])  # (1 2) comes back at 4, (2 2) at 6
    none = np.empty(0, np.int64)
    assert np.flatnonzero(ar_hits(row, none, vocab_size=4)).tolist() == [4, 6]
    frequent = frequent_ngrams(np.array([1, 2, 1, 2, 3, 3]), threshold=1, vocab_size=4)
    assert frequent.tolist() == [1 * 4 + 2]
    assert np.flatnonzero(ar_hits(row, frequent, vocab_size=4)).tolist() == [6]


def test_large_vocabularies_do_not_collide():
    vocab = 150_000
    rows = np.array([[vocab - 1, vocab - 1, 0, vocab - 1, vocab - 1]])
    assert np.flatnonzero(ar_hits(rows, np.empty(0, np.int64), 2, vocab_size=vocab)).tolist() == [4]


def test_errors():
    with pytest.raises(ValueError, match="do not fit 63 bits"):
        frequent_ngrams(np.array([1, 2]), 4, threshold=1, vocab_size=100_000)
