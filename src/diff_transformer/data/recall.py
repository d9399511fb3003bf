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
    return _assemble(vocabulary, length, *_draws(rng, vocabulary, rows, length, pairs))


def _draws(
    rng: np.random.Generator, vocabulary: RecallVocabulary, rows: int, length: int, pairs: int
) -> tuple[np.ndarray, ...]:
    """The random numbers of ``rows`` rows: noise tokens, and scores whose order picks keys, values, places and queries.

    int64 [rows, context] and four float64 [rows, ...] arrays.
    """
    context = length - 2 * pairs
    noise = rng.choice(vocabulary.noise, size=(rows, context))
    scores = (len(vocabulary.keys), len(vocabulary.values), context - pairs, pairs)
    return noise, *(rng.random((rows, size)) for size in scores)


def _assemble(
    vocabulary: RecallVocabulary,
    length: int,
    noise: np.ndarray,
    key_scores: np.ndarray,
    value_scores: np.ndarray,
    place_scores: np.ndarray,
    query_scores: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What ``make_recall_batch`` returns, from what ``_draws`` returns."""
    (rows, context), pairs = noise.shape, query_scores.shape[1]
    ids = np.empty((rows, length), dtype=np.int64)
    ids[:, :context] = noise
    keys = vocabulary.keys[np.argsort(key_scores, axis=1)[:, :pairs]]
    values = vocabulary.values[np.argsort(value_scores, axis=1)[:, :pairs]]
    # The context is a sequence of context - pairs units, each a pair or a noise token. A unit starts one token later
    # for each pair before it.
    starts = np.sort(np.argsort(place_scores, axis=1)[:, :pairs], axis=1) + np.arange(pairs)  # [rows, pairs]
    np.put_along_axis(ids, starts, keys, axis=1)
    np.put_along_axis(ids, starts + 1, values, axis=1)
    order = np.argsort(query_scores, axis=1)
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
        labels = np.full((count, self.length), IGNORED, dtype=np.int64)
        if not count:
            return labels.copy(), labels
        draws = [
            _draws(training_rng(self.seed, "recall", first + row), self.vocabulary, 1, self.length, self.pairs)
            for row in range(count)
        ]
        ids, positions, answers = _assemble(
            self.vocabulary, self.length, *(np.concatenate(part) for part in zip(*draws, strict=True))
        )
        np.put_along_axis(labels, positions, answers, axis=1)
        return ids, labels


def _check(vocabulary: RecallVocabulary, length: int, pairs: int) -> None:
    if pairs < 1 or pairs > min(len(vocabulary.keys), len(vocabulary.values)):
        raise ValueError(f"pairs must lie between 1 and the number of keys ({len(vocabulary.keys)}), got {pairs}")
    if length < 4 * pairs:
        raise ValueError(f"{pairs} pairs and their queries need a length of at least {4 * pairs}, got {length}")
