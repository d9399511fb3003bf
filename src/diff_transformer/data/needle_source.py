"""Training rows for multi-needle retrieval, in exactly the format that is evaluated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.filler import Filler
from diff_transformer.data.mixture import IGNORED
from diff_transformer.data.needles import completion, draw_facts, needle, question
from diff_transformer.data.seeding import evaluation_rng, training_rng
from diff_transformer.data.tokenizer import encode, ids_in_rows
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MIN_FILLER_SHARE = 0.25  # a question after the first is asked only where this share of the row remains filler
_ROWS_CHECKED, _ROWS_ENCODED = 32, 4
_DRAWS = 64


class NeedleSource:
    """Rows that are documents with needles, questions about them, and answers. Row i is a pure function of (seed, i).

    Each city is asked for at most once, so that every answer has to come from its needle. The filler is chosen so that
    a row has exactly ``length`` tokens; if no stretch of words fits, a few pad tokens without loss follow the end.

    Needles, words and questions are tokenised separately and spliced. The constructor verifies on a few rows that the
    tokenizer gives the same tokens for the whole text.

    Args:
        filler: the text between the needles.
        length: tokens a row.
        needles: numbers of needles in a document, drawn with equal probability.
        queries: numbers of cities that a question asks for, drawn with equal probability.
        digits: digits of a magic number.
        questions_per_document: questions at the end of a document, at most.
        answer_loss_only: only the answers (" 17, Paris is 42.") carry a loss.
        held_out: rows that no source for training has.

    Raises:
        UserError: for a tokenizer whose tokens cross the places where needles are inserted, for a ``length`` that is
            too short, and for numbers that do not fit together.
    """

    def __init__(
        self,
        filler: Filler,
        tokenizer: PreTrainedTokenizerFast,
        *,
        length: int,
        seed: int = 0,
        needles: tuple[int, ...] = (1, 2, 4),
        queries: tuple[int, ...] = (1, 2),
        digits: int = 2,
        questions_per_document: int = 4,
        answer_loss_only: bool = False,
        held_out: bool = False,
    ):
        if not needles or not queries or min(queries) < 1 or min(queries) > min(needles):
            raise UserError(
                f"needles {needles} and queries {queries}: every document needs a question of 1 to N cities"
            )
        self.tokenizer, self.length, self.seed, self.answer_loss_only = tokenizer, length, seed, answer_loss_only
        pad = tokenizer.pad_token_id  # which a model need not embed, if it lies beyond all ids of text
        self._pad = pad if pad is not None and pad < ids_in_rows(tokenizer) else tokenizer.eos_token_id
        self.filler, self.needles, self.queries, self.digits = filler, needles, queries, digits
        self.questions_per_document = questions_per_document
        self._rng = evaluation_rng if held_out else training_rng
        self._end = tokenizer.eos_token_id
        self._pieces: dict[str, list[int]] = {}
        self._check_rows()

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]."""
        ids = np.full((count, self.length), self._pad, dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row in range(count):
            tokens, answers = self._row(first + row)
            ids[row, : len(tokens)] = tokens
            for start, end in answers if self.answer_loss_only else [(0, len(tokens))]:
                labels[row, start:end] = ids[row, start:end]
        return ids, labels

    def _row(self, index: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The tokens of a row, ``length`` or a few less, and the span of each answer."""
        rng = self._rng(self.seed, "needles", index)
        count = self.needles[rng.integers(len(self.needles))]
        for _ in range(_DRAWS):
            cities, numbers = draw_facts(rng, count, self.digits)
            sentences = [self._ids(needle(city, number)) for city, number in zip(cities, numbers, strict=True)]
            needle_tokens = sum(map(len, sentences))
            exchanges = self._exchanges(rng, cities, numbers, self.length - needle_tokens - 1)
            budget = self.length - needle_tokens - 1 - sum(len(asked) + len(answer) for asked, answer in exchanges)
            if budget >= 0:
                break
        else:
            raise UserError(
                f"length {self.length} is too short for {count} needles and a question with this tokenizer; give a "
                "larger length, fewer needles or a larger vocabulary"
            )

        first, last = self.filler.window(rng, self.tokenizer, budget)
        table = self.filler.tokens(self.tokenizer)
        starts = table.starts[first : last + 1]
        pieces, done = [], starts[0]
        gaps = np.sort(rng.choice(starts, len(sentences)))
        for gap, which in zip(gaps, rng.permutation(len(sentences)), strict=True):
            pieces += [table.ids[done:gap], sentences[which]]
            done = gap
        pieces.append(table.ids[done : starts[-1]])

        answers, position = [], needle_tokens + int(starts[-1] - starts[0])
        for asked, answer in exchanges:
            pieces += [asked, answer]
            position += len(asked) + len(answer)
            answers.append((position - len(answer), position))
        pieces.append([self._end])
        return np.concatenate(pieces), answers

    def _exchanges(
        self, rng: np.random.Generator, cities: list[str], numbers: list[str], room: int
    ) -> list[tuple[list[int], list[int]]]:
        """Questions and answers as tokens: at least one pair, and more while enough room for filler is left."""
        exchanges: list[tuple[list[int], list[int]]] = []
        next_city = 0  # the cities are in random order already
        while len(exchanges) < self.questions_per_document:
            possible = [count for count in self.queries if next_city + count <= len(cities)]
            if not possible:
                break
            count = possible[rng.integers(len(possible))]
            asked = slice(next_city, next_city + count)
            exchange = self._ids(question(cities[asked])), self._ids(completion(cities[asked], numbers[asked]))
            room -= len(exchange[0]) + len(exchange[1])
            if exchanges and room < _MIN_FILLER_SHARE * self.length:
                break
            exchanges.append(exchange)
            next_city += count
        return exchanges

    def _ids(self, text: str) -> list[int]:
        """The tokens of ``text``, joined from its words; each distinct word is tokenised once."""
        ids = []
        for part in text.replace(" ", "\0 ").split("\0"):
            if part not in self._pieces:
                self._pieces[part] = encode(self.tokenizer, part).tolist()
            ids += self._pieces[part]
        return ids

    def _check_rows(self) -> None:
        """Check on some rows that the length suffices, and that the tokens are those of the whole text."""
        for index in range(_ROWS_CHECKED):
            ids = np.asarray(self._row(index)[0])[:-1]
            if index >= _ROWS_ENCODED:
                continue
            text = self.tokenizer.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            if not np.array_equal(encode(self.tokenizer, text), ids):
                raise UserError(
                    "this tokenizer joins tokens across the places where needles are put in, so that training rows "
                    "would not have the tokens of the evaluation; use one that splits before spaces and newlines "
                    "(train_tokenizer, byte_tokenizer, GPT-2's)"
                )
