"""Key-value recall in noise.

    n k1 v1 n n k2 v2 n  |  k2 v2  k1 v1
    noise and pairs      |  questions: keys, each to be followed by its value

Keys, values and noise are ordinary tokens from three disjoint sets. Only the values after the bar have a loss. By
default every key is asked for once, in random order; then a model that only excludes the answers already given is right
in (1 + 1/2 + ... + 1/n) / n of n answers. With ``questions``, keys are drawn with replacement, and exclusion gains
nothing. ``distractors`` is the share of the noise that looks like keys: keys of no pair of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from diff_transformer.data.mixture import IGNORED
from diff_transformer.data.seeding import training_rng
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SYMBOL_SEED = 0
_BLOCK = 256  # training rows that one generator draws


@dataclass(frozen=True)
class RecallVocabulary:
    """Three disjoint sets of token ids, int64."""

    keys: np.ndarray
    values: np.ndarray
    noise: np.ndarray


def recall_vocabulary(
    tokenizer_or_ids: PreTrainedTokenizerFast | Sequence[int] | np.ndarray,
    num_symbols: int | None = None,
    noise_symbols: int | None = None,
) -> RecallVocabulary:
    """The division of a vocabulary into keys, values and noise. It has no seed, so training and evaluation agree on it.

    Args:
        tokenizer_or_ids: a tokenizer, whose special tokens are left out, or token ids.
        num_symbols: number of keys, and of values (default: a quarter of the ids, at most 256).
        noise_symbols: number of noise tokens (default: all other ids).

    Raises:
        UserError: if no ids, or fewer than ``noise_symbols``, are left for noise.
    """
    if isinstance(tokenizer_or_ids, Sequence | np.ndarray):
        ids = np.unique(np.asarray(tokenizer_or_ids, dtype=np.int64))
    else:
        vocabulary, special = tokenizer_or_ids.get_vocab().values(), tokenizer_or_ids.all_special_ids
        ids = np.setdiff1d(np.array(list(vocabulary), dtype=np.int64), np.array(special, dtype=np.int64))
    num_symbols = min(len(ids) // 4, 256) if num_symbols is None else num_symbols
    if num_symbols < 1 or 2 * num_symbols >= len(ids):
        raise UserError(
            f"{num_symbols} keys and {num_symbols} values leave no noise among {len(ids)} ids; give fewer symbols or a "
            "larger vocabulary"
        )
    ids = np.random.default_rng(_SYMBOL_SEED).permutation(ids)
    keys, values, noise = np.split(ids, [num_symbols, 2 * num_symbols])
    if noise_symbols is not None and not 1 <= noise_symbols <= len(noise):
        raise UserError(f"noise_symbols is {noise_symbols}; give 1 to {len(noise)}, the ids that are left, or None")
    return RecallVocabulary(keys, values, noise[:noise_symbols])


@dataclass(frozen=True)
class RecallTask:
    """The form of a row.

    Attributes:
        length: tokens a row.
        pairs: key-value pairs in a row.
        questions: keys asked for, drawn with replacement; 0 asks for every key once, in random order.
        distractors: share of the noise tokens that are keys of no pair of the row, each with this probability.

    Raises:
        UserError: for sizes out of range, or a length in which pairs and questions do not fit.
    """

    length: int = 64
    pairs: int = 4
    questions: int = 0
    distractors: float = 0.0

    def __post_init__(self):
        if self.pairs < 1 or self.questions < 0 or not 0 <= self.distractors <= 1:
            raise UserError(
                f"pairs is {self.pairs}, questions {self.questions}, distractors {self.distractors}; give pairs of 1 "
                "or more, questions of 0 or more, and a share from 0 to 1"
            )
        if self.length < 2 * (self.pairs + self.asked):
            raise UserError(
                f"{self.pairs} pairs and {self.asked} questions need a length of at least "
                f"{2 * (self.pairs + self.asked)}, got {self.length}"
            )

    @property
    def asked(self) -> int:
        """Questions in a row."""
        return self.questions or self.pairs

    @property
    def context(self) -> int:
        """Tokens before the first question."""
        return self.length - 2 * self.asked

    def check(self, vocabulary: RecallVocabulary) -> None:
        """Raise UserError if the vocabulary has too few keys or values for a row."""
        symbols = min(len(vocabulary.keys), len(vocabulary.values))
        if self.pairs + (self.distractors > 0) > symbols:
            raise UserError(
                f"pairs must lie between 1 and the number of keys ({symbols}), one fewer with distractors; got "
                f"{self.pairs}"
            )


class RecallRows(NamedTuple):
    """Rows of the task, int64. ``ids[b, answers[b, j]]`` is the answer to question j of row b.

    A causal model predicts it from position ``answers[b, j] - 1``. Its value stands in the context at
    ``sources[b, j]``, right after its key.
    """

    ids: np.ndarray  # [rows, length]
    answers: np.ndarray  # [rows, questions]
    sources: np.ndarray  # [rows, questions]


def make_recall_batch(
    rng: np.random.Generator, vocabulary: RecallVocabulary, task: RecallTask, rows: int
) -> RecallRows:
    """``rows`` rows of ``task``. The keys of a row are distinct, and so are its values.

    Raises:
        UserError: for more pairs than there are keys.
    """
    task.check(vocabulary)
    pairs, context = task.pairs, task.context
    keys = _distinct(rng, vocabulary.keys, rows, None)  # [rows, all keys]
    values = _distinct(rng, vocabulary.values, rows, pairs)  # [rows, pairs]
    ids = np.empty((rows, task.length), dtype=np.int64)
    ids[:, :context] = rng.choice(vocabulary.noise, size=(rows, context))
    if task.distractors:
        strangers = rng.integers(pairs, keys.shape[1], (rows, context))
        lookalike = rng.random((rows, context)) < task.distractors
        ids[:, :context] = np.where(lookalike, _at(keys, strangers), ids[:, :context])
    # The context is a sequence of context - pairs units, each a pair or a noise token. A unit starts one token later
    # for each pair before it.
    every = np.arange(pairs)
    places = np.sort(_distinct(rng, np.arange(context - pairs), rows, pairs), axis=1) + every
    asked = rng.integers(pairs, size=(rows, task.questions)) if task.questions else _distinct(rng, every, rows, pairs)
    np.put_along_axis(ids, places, keys[:, :pairs], axis=1)
    np.put_along_axis(ids, places + 1, values, axis=1)
    ids[:, context::2], ids[:, context + 1 :: 2] = _at(keys, asked), _at(values, asked)
    answers = np.broadcast_to(np.arange(context + 1, task.length, 2), asked.shape).copy()
    return RecallRows(ids, answers, _at(places + 1, asked))


def _at(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, places, axis=1)


def _distinct(rng: np.random.Generator, items: np.ndarray, rows: int, count: int | None) -> np.ndarray:
    """In each row, ``count`` of the items (None: all) in random order, without repetition: [rows, count]."""
    return items[np.argsort(rng.random((rows, len(items))), axis=1)[:, :count]]


class RecallSource:
    """Training rows of the task. Row i is a pure function of (seed, i). Labels are -100 except at the queried values.

    One generator draws a block of rows, which is kept until a row of another block is asked for.

    Raises:
        UserError: for more pairs than there are keys.
    """

    def __init__(self, vocabulary: RecallVocabulary, task: RecallTask, seed: int = 0):
        task.check(vocabulary)
        self.vocabulary, self.task, self.length, self.seed = vocabulary, task, task.length, seed
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]."""
        ids, labels = (np.empty((count, self.length), np.int64) for _ in range(2))
        done = 0
        while done < count:
            block, start = divmod(first + done, _BLOCK)
            size = min(_BLOCK - start, count - done)
            drawn = self._block(block)
            for whole, part in zip((ids, labels), drawn, strict=True):
                whole[done : done + size] = part[start : start + size]
            done += size
        return ids, labels

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        if self._drawn is None or self._drawn[0] != block:
            rng = training_rng(self.seed, "recall", block)
            ids, answers, _ = make_recall_batch(rng, self.vocabulary, self.task, _BLOCK)
            self._drawn = block, ids, answer_labels(ids, answers)
        return self._drawn[1:]


def answer_labels(ids: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Labels of rows ``ids``: those of the ``answers`` positions, -100 elsewhere."""
    labels = np.full_like(ids, IGNORED)
    np.put_along_axis(labels, answers, np.take_along_axis(ids, answers, axis=1), axis=1)
    return labels
