"""Rows that teach a model to find something again, before it meets facts in long text.

A small model that sees needles alone names one of the numbers at random and stays there. It leaves that plateau once it
can copy: first text that occurs twice, then short facts with many questions, then needles.

    CopySource       ... by the river . a cold wind rose ... filler ... a cold wind rose
    FactSource       Oslo 4. Rome 7. Bern 1.    Rome 7.  Bern 1.  Rome 7.            wording "pairs"
                     Oslo is 4. Rome is 7.      Rome is 7.  Oslo is 4.               wording "clauses"
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.answer_rows import AnswerRows, Made
from diff_transformer.data.filler import Filler
from diff_transformer.data.mixture import IGNORED
from diff_transformer.data.needles import draw_facts
from diff_transformer.data.seeding import training_rng
from diff_transformer.data.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Wording of the facts -> a fact, and the question about it, which its number and "." follow.
WORDINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"pairs": (" {city} {number}.", "\n {city}"), "clauses": (" {city} is {number}.", "\n {city} is")}
)
_SHORTEST = 12  # tokens of a row in which a stretch of two occurs twice
_ROWS_CHECKED = 16


class CopySource:
    """Rows of text in which a stretch occurs twice: between text, and again at the end of the row.

    The stretch has from a sixth to a half of the row's tokens. Row i is a pure function of (seed, i).

    Args:
        filler: the text.
        length: tokens a row.
        copies_only: only the second occurrence carries a loss, without its first token, which nothing announces.

    Raises:
        ValueError: for a ``length`` below 12, or text shorter than a row.
    """

    def __init__(
        self,
        filler: Filler,
        tokenizer: PreTrainedTokenizerFast,
        *,
        length: int,
        seed: int = 0,
        copies_only: bool = False,
    ):
        self._ids = filler.tokens(tokenizer).ids
        if length < _SHORTEST or len(self._ids) < length:
            raise ValueError(
                f"length {length} and {len(self._ids)} tokens of text: rows of copies need a length of at least "
                f"{_SHORTEST}, and at least as much text"
            )
        self.length, self.seed, self.copies_only = length, seed, copies_only

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]."""
        ids = np.empty((count, self.length), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row in range(count):
            rng = training_rng(self.seed, "copies", first + row)
            size = int(rng.integers(self.length // 6, self.length // 2))
            stretch, other = self._text(rng, size), self._text(rng, self.length - 2 * size)
            place = rng.integers(len(other) + 1)
            ids[row] = np.concatenate([other[:place], stretch, other[place:], stretch])
            start = self.length - size + 1 if self.copies_only else 0
            labels[row, start:] = ids[row, start:]
        return ids, labels

    def _text(self, rng: np.random.Generator, size: int) -> np.ndarray:
        start = rng.integers(len(self._ids) - size + 1)
        return self._ids[start : start + size]


class FactSource(AnswerRows):
    """Rows of short facts and nothing else: N facts, then as many questions as fit, drawn with replacement.

    Args:
        wording: a key of ``WORDINGS``.
        length: tokens a row.
        needles: numbers of facts in a row, drawn with equal probability.
        digits: digits of a number.
        answer_loss_only: only the numbers of the answers carry a loss.

    Raises:
        ValueError: for a ``length`` in which the facts and a question do not fit, or too many facts.
    """

    def __init__(
        self,
        wording: str,
        tokenizer: PreTrainedTokenizerFast,
        *,
        length: int,
        seed: int = 0,
        needles: tuple[int, ...] = (4,),
        digits: int = 1,
        answer_loss_only: bool = False,
    ):
        self._fact, self._question = WORDINGS[wording]
        super().__init__(tokenizer, length=length, seed=seed, answer_loss_only=answer_loss_only)
        self.wording, self.needles, self.digits = wording, tuple(needles), digits
        self._known: dict[str, list[int]] = {}
        rng = training_rng(seed, wording, "length")
        for _ in range(_ROWS_CHECKED):
            row, answers = self._facts(rng, max(self.needles))
            if not answers:
                raise ValueError(
                    f"length {length} is too short: {max(self.needles)} facts take {len(row)} tokens with this "
                    "tokenizer, and a question does not fit; give a larger length or fewer facts"
                )

    def _row(self, index: int) -> Made:
        rng = training_rng(self.seed, self.wording, index)
        facts = self.needles[rng.integers(len(self.needles))]
        while True:  # long names may leave no room for a question: then others are drawn
            row, answers = self._facts(rng, facts)
            if answers:
                return row, answers

    def _facts(self, rng: np.random.Generator, facts: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a row, and the span of each answer's number in it."""
        cities, numbers = draw_facts(rng, facts, self.digits)
        row, answers = [], []
        for city, number in zip(cities, numbers, strict=True):
            row += self._tokens(self._fact.format(city=city, number=number))
        while True:
            which = rng.integers(facts)
            asked = self._tokens(self._question.format(city=cities[which]))
            number, end = self._tokens(f" {numbers[which]}"), self._tokens(".")
            if len(row) + len(asked) + len(number) + len(end) > self.length:
                return row, answers
            start = len(row) + len(asked)
            answers.append((start, start + len(number)))
            row += asked + number + end

    def _tokens(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = encode(self.tokenizer, text).tolist()
        return self._known[text]
