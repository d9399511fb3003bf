"""Associative recall of key-value pairs in noise.

    n k1 v1 n n k2 v2 n  |  k2 v2  k1 v1
    noise and pairs      |  every key again, in random order, each to be followed by its value

Keys, values and noise are ordinary tokens from three disjoint sets. Only the values after the bar have a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.mixture import IGNORED
from diff_transformer.data.seeding import training_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SYMBOL_SEED = 0


@dataclass(frozen=True)
class RecallVocabulary:
    """Three disjoint sets of token ids, int64."""

    keys: np.ndarray
    values: np.ndarray
    noise: np.ndarray


def recall_vocabulary(
    tokenizer_or_ids: PreTrainedTokenizerFast | Sequence[int] | np.ndarray, num_symbols: int | None = None
) -> RecallVocabulary:
    """The division of a vocabulary into keys, values and noise. It has no seed, so training and evaluation agree on it.

    Args:
        tokenizer_or_ids: a tokenizer, whose special tokens are left out, or token ids.
        num_symbols: number of keys, and of values (default: a quarter of the ids, at most 256).

    Raises:
        ValueError: if no ids are left for noise.
    """
    if isinstance(tokenizer_or_ids, Sequence | np.ndarray):
        ids = np.unique(np.asarray(tokenizer_or_ids, dtype=np.int64))
    else:
        vocabulary, special = tokenizer_or_ids.get_vocab().values(), tokenizer_or_ids.all_special_ids
        ids = np.setdiff1d(np.array(list(vocabulary), dtype=np.int64), np.array(special, dtype=np.int64))
    num_symbols = min(len(ids) // 4, 256) if num_symbols is None else num_symbols
    if num_symbols < 1 or 2 * num_symbols >= len(ids):
        raise ValueError(
            f"{num_symbols} keys and {num_symbols} values leave no noise among {len(ids)} ids; "
            "give fewer symbols or a larger vocabulary"
        )
    ids = np.random.default_rng(_SYMBOL_SEED).permutation(ids)
    return RecallVocabulary(ids[:num_symbols], ids[num_symbols : 2 * num_symbols], ids[2 * num_symbols :])


def make_recall_batch(
    rng: np.random.Generator, vocabulary: RecallVocabulary, *, rows: int, length: int, pairs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids [rows, length], answer_positions [rows, pairs], answers [rows, pairs]), int64.

    ``ids[b, answer_positions[b, j]]`` is ``answers[b, j]``; a causal model predicts it from position
    ``answer_positions[b, j] - 1``. The keys of a row are distinct, and so are its values.

    Raises:
        ValueError: for more pairs than there are keys, or a length below ``4 * pairs``.
    """
    _check(vocabulary, length, pairs)
    context = length - 2 * pairs
    ids = np.empty((rows, length), dtype=np.int64)
    ids[:, :context] = rng.choice(vocabulary.noise, size=(rows, context))
    keys = _distinct(rng, vocabulary.keys, rows, pairs)
    values = _distinct(rng, vocabulary.values, rows, pairs)
    # The context is a sequence of context - pairs units, each a pair or a noise token. A unit starts one token later
    # for each pair before it.
    units = np.sort(_distinct(rng, np.arange(context - pairs), rows, pairs), axis=1)
    starts = units + np.arange(pairs)  # [rows, pairs]
    np.put_along_axis(ids, starts, keys, axis=1)
    np.put_along_axis(ids, starts + 1, values, axis=1)
    order = np.argsort(rng.random((rows, pairs)), axis=1)
    answers = np.take_along_axis(values, order, axis=1)
    ids[:, context::2] = np.take_along_axis(keys, order, axis=1)
    ids[:, context + 1 :: 2] = answers
    positions = np.broadcast_to(np.arange(context + 1, length, 2), (rows, pairs)).copy()
    return ids, positions, answers


class RecallSource:
    """Training rows of the task. Row i is a pure function of (seed, i). Labels are -100 except at the queried values.

    Args:
        tokenizer_or_ids, num_symbols: as for ``recall_vocabulary``.
        length: tokens a row.
        pairs: key-value pairs in a row.
    """

    def __init__(
        self,
        tokenizer_or_ids: PreTrainedTokenizerFast | Sequence[int] | np.ndarray,
        *,
        length: int = 64,
        pairs: int = 4,
        seed: int = 0,
        num_symbols: int | None = None,
    ):
        self.vocabulary = recall_vocabulary(tokenizer_or_ids, num_symbols)
        _check(self.vocabulary, length, pairs)
        self.length = length
        self.pairs = pairs
        self.seed = seed

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]."""
        ids = np.empty((count, self.length), dtype=np.int64)
        labels = np.full((count, self.length), IGNORED, dtype=np.int64)
        for row in range(count):
            rng = training_rng(self.seed, "recall", first + row)
            made, positions, answers = make_recall_batch(
                rng, self.vocabulary, rows=1, length=self.length, pairs=self.pairs
            )
            ids[row] = made[0]
            labels[row, positions[0]] = answers[0]
        return ids, labels


def _check(vocabulary: RecallVocabulary, length: int, pairs: int) -> None:
    if pairs < 1 or pairs > min(len(vocabulary.keys), len(vocabulary.values)):
        raise ValueError(f"pairs must lie between 1 and the number of keys ({len(vocabulary.keys)}), got {pairs}")
    if length < 4 * pairs:
        raise ValueError(f"{pairs} pairs and their queries need a length of at least {4 * pairs}, got {length}")


def _distinct(rng: np.random.Generator, pool: np.ndarray, rows: int, count: int) -> np.ndarray:
    """``count`` distinct members of ``pool`` in each row: [rows, count]."""
    return pool[np.argsort(rng.random((rows, len(pool))), axis=1)[:, :count]]
