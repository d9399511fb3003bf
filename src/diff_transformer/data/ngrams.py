"""Associative-recall hits (AR-Hit), the positions that Table 6 reports separately."""

import numpy as np

from diff_transformer.errors import UserError


def frequent_ngrams(token_ids: np.ndarray, n: int = 2, *, threshold: int, vocab_size: int) -> np.ndarray:
    """Keys of the n-grams that occur more than ``threshold`` times in ``token_ids`` [N]: sorted int64 [F].

    A key is the n-gram read as a number in base ``vocab_size``.
    """
    keys, counts = np.unique(_keys(np.asarray(token_ids)[None], n, vocab_size)[0], return_counts=True)
    return keys[counts > threshold]


def ar_hits(token_ids: np.ndarray, frequent: np.ndarray, n: int = 2, *, vocab_size: int) -> np.ndarray:
    """True if the n-gram ending at t occurred before in the same row and is not ``frequent``: bool [B, T].

    Such a token can be predicted from the context alone (associative recall). True marks the predicted token, so the
    loss of its label, not of its successor's, is an AR-Hit loss.

    Args:
        token_ids: int [B, T].
        frequent: the result of :func:`frequent_ngrams` on the training set with the same ``n`` and ``vocab_size``.

    Raises:
        UserError: for n-grams that do not fit 63 bits.
    """
    token_ids = np.asarray(token_ids)
    hits = np.zeros(token_ids.shape, dtype=bool)
    keys = _keys(token_ids, n, vocab_size)  # [B, T - n + 1]
    order = np.argsort(keys, axis=1, kind="stable")
    in_order = np.take_along_axis(keys, order, axis=1)
    repeated = np.zeros(keys.shape, dtype=bool)
    np.put_along_axis(repeated, order[:, 1:], in_order[:, 1:] == in_order[:, :-1], axis=1)
    hits[:, n - 1 :] = repeated & ~np.isin(keys, frequent)
    return hits


def _keys(token_ids: np.ndarray, n: int, vocab_size: int) -> np.ndarray:
    """int64 [B, max(T - n + 1, 0)] of int [B, T]."""
    if vocab_size**n >= 1 << 63:
        raise UserError(f"{n}-grams of a vocabulary of {vocab_size} do not fit 63 bits; give a smaller n")
    windows = max(token_ids.shape[1] - n + 1, 0)
    keys = np.zeros((token_ids.shape[0], windows), dtype=np.int64)
    for offset in range(n):
        keys = keys * vocab_size + token_ids[:, offset : offset + windows].astype(np.int64)
    return keys
