"""Key-value recall in noise.

    n k1 v1 n n k2 v2 n  |  k2 v2  k1 v1
    noise and pairs      |  questions: keys, each to be followed by its value

Keys, values and noise are ordinary tokens from three disjoint sets. Only the values after the bar have a loss. By
default every key is asked for once, in random order; then a model that only excludes the answers already given is right
in (1 + 1/2 + ... + 1/n) / n of n answers. With ``questions``, keys are drawn with replacement, and exclusion gains
nothing. ``distractors`` is the share of the noise that looks like keys: keys of no pair of the row. ``unanswerable`` is
the share of questions about such keys; their answer is a token of its own, which says that the row has none.

With ``shots`` and ``forms`` the pairs are labelled examples: values are labels, dealt anew in each row, and a key is a
class, which any of its tokens, or forms, stands for. A row has as many examples of each of its classes, one of
``shots``:

    Oslo 7  dog 3  cat 3  Rome 7  |  Bern 7

The last form of a class is not asked for in training; with ``new_form`` it alone is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diff_transformer.checks import require_positive
from diff_transformer.data.mixture import IGNORED
from diff_transformer.data.seeding import training_rng

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SYMBOL_SEED = 0
_BLOCK = 256  # training rows that one generator draws


@dataclass(frozen=True)
class RecallVocabulary:
    """Three disjoint sets of token ids, int64, and the answer to a question that has none."""

    keys: np.ndarray
    values: np.ndarray
    noise: np.ndarray
    no_answer: int  # the last noise token, unless ``noise`` leaves it out


def recall_vocabulary(
    tokenizer_or_ids: PreTrainedTokenizerFast | Sequence[int] | np.ndarray,
    num_symbols: int | None = None,
    noise_symbols: int | None = None,
    forms: int = 1,
) -> RecallVocabulary:
    """The division of a vocabulary into keys, values and noise. It has no seed, so training and evaluation agree on it.

    Args:
        tokenizer_or_ids: a tokenizer, whose special tokens are left out, or token ids.
        num_symbols: number of keys, and of values (default: a quarter of the ids, at most 256).
        noise_symbols: number of noise tokens (default: all other ids).
        forms: key tokens for each key: ``keys[forms * i : forms * (i + 1)]`` stand for key i.

    Raises:
        ValueError: for fewer than 1 form, or if no ids, or fewer than ``noise_symbols``, are left for noise.
    """
    if isinstance(tokenizer_or_ids, Sequence | np.ndarray):
        ids = np.unique(np.asarray(tokenizer_or_ids, dtype=np.int64))
    else:
        vocabulary, special = tokenizer_or_ids.get_vocab().values(), tokenizer_or_ids.all_special_ids
        ids = np.setdiff1d(np.array(list(vocabulary), dtype=np.int64), np.array(special, dtype=np.int64))
    require_positive(forms=forms)
    num_symbols = min(len(ids) // 4, 256) if num_symbols is None else num_symbols
    if num_symbols < 1 or (forms + 1) * num_symbols >= len(ids):
        raise ValueError(
            f"{num_symbols} keys of {forms} form(s) and {num_symbols} values leave no noise among {len(ids)} ids; "
            "give fewer symbols or forms, or a larger vocabulary"
        )
    ids = np.random.default_rng(_SYMBOL_SEED).permutation(ids)
    keys, values, noise = np.split(ids, [forms * num_symbols, (forms + 1) * num_symbols])
    if noise_symbols is not None and not 1 <= noise_symbols <= len(noise):
        raise ValueError(f"noise_symbols is {noise_symbols}; give 1 to {len(noise)}, the ids that are left, or None")
    return RecallVocabulary(keys, values, noise[:noise_symbols], int(noise[-1]))


@dataclass(frozen=True)
class RecallTask:
    """The form of a row.

    Attributes:
        length: tokens a row.
        pairs: key-value pairs in a row.
        questions: keys asked for, drawn with replacement; 0 asks for every key once, in random order.
        distractors: share of the noise tokens that are keys of no pair of the row, each with this probability.
        unanswerable: share of the questions about keys of no pair of the row, each with this probability. Their answer
            is ``RecallVocabulary.no_answer``. Needs ``questions``.
        shots: pairs of each key of a row, one of these numbers, with equal probability. All divide ``pairs``. Numbers
            above 1 need ``questions``.
        forms: tokens that stand for a key. More than 1 needs ``questions``.
        new_form: ask only for the forms that training does not ask for, where none of the row's pairs has them.

    Raises:
        ValueError: for sizes out of range, or a length in which pairs and questions do not fit.
    """

    length: int = 64
    pairs: int = 4
    questions: int = 0
    distractors: float = 0.0
    unanswerable: float = 0.0
    shots: tuple[int, ...] = (1,)
    forms: int = 1
    new_form: bool = False

    def __post_init__(self):
        shares = (self.distractors, self.unanswerable)
        if self.pairs < 1 or self.questions < 0 or not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                f"pairs is {self.pairs}, questions {self.questions}, distractors {self.distractors}, unanswerable "
                f"{self.unanswerable}; give pairs of 1 or more, questions of 0 or more, and shares from 0 to 1"
            )
        if min(self.shots, default=0) < 1 or any(self.pairs % shots for shots in self.shots) or self.forms < 1:
            raise ValueError(
                f"shots is {list(self.shots)}, forms {self.forms}; give shots that divide pairs ({self.pairs}), and "
                "forms of 1 or more"
            )
        if self.new_form and self.forms == 1:
            raise ValueError(
                "new_form is True, but forms is 1, so training asks for every form; give forms of 2 or more"
            )
        if not self.questions and (self.unanswerable or max(self.shots) > 1 or self.forms > 1):
            raise ValueError(
                f"questions is 0, so each pair's key is asked for once, but unanswerable is {self.unanswerable}, shots "
                f"{list(self.shots)} and forms {self.forms}; give questions of 1 or more"
            )
        if self.length < 2 * (self.pairs + self.asked):
            raise ValueError(
                f"{self.pairs} pairs and {self.asked} questions need a length of at least "
                f"{2 * (self.pairs + self.asked)}, got {self.length}"
            )

    @property
    def asked(self) -> int:
        """Questions in a row."""
        return self.questions or self.pairs

    @property
    def keys(self) -> int:
        """Distinct keys of a row's pairs, at most."""
        return self.pairs // min(self.shots)

    @property
    def context(self) -> int:
        """Tokens before the first question."""
        return self.length - 2 * self.asked

    def check(self, vocabulary: RecallVocabulary) -> None:
        """Raise ValueError if the vocabulary has too few keys or values for a row."""
        symbols = min(len(vocabulary.keys) // self.forms, len(vocabulary.values))
        needed = self.keys + (self.distractors > 0 or self.unanswerable > 0)
        if needed > symbols:
            raise ValueError(
                f"pairs must lie between 1 and the number of keys ({symbols}), one fewer with distractors or "
                f"unanswerable questions; got {self.keys}"
            )
        if self.unanswerable and vocabulary.no_answer in vocabulary.noise:
            raise ValueError(
                f"the {len(vocabulary.noise)} noise tokens leave no token that says that a question has no answer; "
                "give fewer noise_symbols"
            )


class RecallRows(NamedTuple):
    """Rows of the task, int64. ``ids[b, answers[b, j]]`` is the answer to question j of row b.

    A causal model predicts it from position ``answers[b, j] - 1``. Its value stands in the context at
    ``sources[b, j]``, right after its key (the first of several pairs of that key); -1 if the question has no answer.
    """

    ids: np.ndarray  # [rows, length]
    answers: np.ndarray  # [rows, questions]
    sources: np.ndarray  # [rows, questions]


def make_recall_batch(
    rng: np.random.Generator, vocabulary: RecallVocabulary, task: RecallTask, rows: int
) -> RecallRows:
    """``rows`` rows of ``task``. The keys of a row are distinct, and so are its values.

    Raises:
        ValueError: for more pairs than there are keys.
    """
    task.check(vocabulary)
    pairs, context, shape = task.pairs, task.context, (rows, task.questions)
    keys = _distinct(rng, np.arange(len(vocabulary.keys) // task.forms), rows, None)  # [rows, all keys]
    values = _distinct(rng, vocabulary.values, rows, task.keys)  # [rows, keys]
    ids = np.empty((rows, task.length), dtype=np.int64)
    ids[:, :context] = rng.choice(vocabulary.noise, size=(rows, context))
    if task.distractors:
        strangers = rng.integers(task.keys, keys.shape[1], (rows, context))
        lookalike = rng.random((rows, context)) < task.distractors
        strange = _token(vocabulary, task, _at(keys, strangers), 0)
        ids[:, :context] = np.where(lookalike, strange, ids[:, :context])
    # The context is a sequence of context - pairs units, each a pair or a noise token. A unit starts one token later
    # for each pair before it.
    places = np.sort(_distinct(rng, np.arange(context - pairs), rows, pairs), axis=1) + np.arange(pairs)
    every = np.arange(pairs)
    which = np.broadcast_to(every, (rows, pairs))  # the key of each pair, as its place among the keys of the row
    counts: Any = pairs
    if max(task.shots) > 1:
        counts = pairs // rng.choice(task.shots, size=(rows, 1))  # keys of each row
        which = rng.permuted(which % counts, axis=1)
    asked = rng.integers(counts, size=shape) if task.questions else _distinct(rng, every, rows, pairs)
    shown, queried = _forms(rng, task, which, asked)
    np.put_along_axis(ids, places, _token(vocabulary, task, _at(keys, which), shown), axis=1)
    np.put_along_axis(ids, places + 1, _at(values, which), axis=1)
    questions, replies = _token(vocabulary, task, _at(keys, asked), queried), _at(values, asked)
    sources = _at(places + 1, (which[:, None] == asked[:, :, None]).argmax(2))
    if task.unanswerable:
        unanswerable = rng.random(shape) < task.unanswerable
        strangers = _token(vocabulary, task, _at(keys, rng.integers(task.keys, keys.shape[1], shape)), queried)
        questions = np.where(unanswerable, strangers, questions)
        replies = np.where(unanswerable, vocabulary.no_answer, replies)
        sources = np.where(unanswerable, -1, sources)
    ids[:, context::2], ids[:, context + 1 :: 2] = questions, replies
    answers = np.broadcast_to(np.arange(context + 1, task.length, 2), asked.shape).copy()
    return RecallRows(ids, answers, sources)


def reordered(rng: np.random.Generator, made: RecallRows, vocabulary: RecallVocabulary, task: RecallTask) -> RecallRows:
    """The same rows with their pairs in another random order. The places of pairs and noise stay, and the questions."""
    ids, context = made.ids.copy(), made.ids[:, : task.context]
    places = np.nonzero(np.isin(context, vocabulary.values))[1].reshape(len(ids), task.pairs)
    order = _distinct(rng, np.arange(task.pairs), len(ids), None)
    for token in (0, 1):  # value, then key
        np.put_along_axis(ids, places - token, _at(ids, _at(places, order) - token), axis=1)
    hits = ids[:, None, : task.context] == _at(ids, made.answers)[:, :, None]
    return RecallRows(ids, made.answers, np.where(made.sources < 0, -1, hits.argmax(2)))


def _forms(rng: np.random.Generator, task: RecallTask, which: np.ndarray, asked: np.ndarray) -> tuple[Any, Any]:
    """The form of each pair's key and of each question, below ``task.forms``.

    A pair has any form, a question any but the last; with ``new_form`` a question has the last, a pair any other.
    """
    if task.forms == 1:
        return 0, 0
    last = task.forms - 1
    shown = rng.integers(last if task.new_form else task.forms, size=which.shape)
    return shown, np.full(asked.shape, last) if task.new_form else rng.integers(last, size=asked.shape)


def _token(vocabulary: RecallVocabulary, task: RecallTask, keys: np.ndarray, form: Any) -> np.ndarray:
    return vocabulary.keys[keys * task.forms + form]


def _at(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, places, axis=1)


def _distinct(rng: np.random.Generator, items: np.ndarray, rows: int, count: int | None) -> np.ndarray:
    """In each row, ``count`` of the items (None: all) in random order, without repetition: [rows, count]."""
    return items[np.argsort(rng.random((rows, len(items))), axis=1)[:, :count]]


class RecallSource:
    """Training rows of the task. Row i is a pure function of (seed, i). Labels are -100 except at the queried values.

    One generator draws a block of rows, which is kept until a row of another block is asked for.

    Args:
        tokenizer_or_ids, num_symbols, noise_symbols: as for ``recall_vocabulary``.
        task: fields of ``RecallTask``; its ``forms`` are those of the vocabulary.
    """

    def __init__(
        self,
        tokenizer_or_ids: PreTrainedTokenizerFast | Sequence[int] | np.ndarray,
        *,
        seed: int = 0,
        num_symbols: int | None = None,
        noise_symbols: int | None = None,
        **task: Any,
    ):
        self.task = RecallTask(**task)
        self.vocabulary = recall_vocabulary(tokenizer_or_ids, num_symbols, noise_symbols, self.task.forms)
        self.task.check(self.vocabulary)
        self.length = self.task.length
        self.seed = seed
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]."""
        ids, labels = (np.empty((count, self.length), np.int64) for _ in range(2))
        done = 0
        while done < count:
            block, start = divmod(first + done, _BLOCK)
            size = min(_BLOCK - start, count - done)
            made = self._block(block)
            for whole, part in zip((ids, labels), made, strict=True):
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
