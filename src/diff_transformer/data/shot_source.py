"""Rows of labelled examples, as the many-shot experiment shows them; what a label names changes from row to row.

    Question: Who wrote Emma ?       Question: Where is Oslo ?       Question: Who was Cicero ?
    Type: number                     Type: entity                    Type: number

In this row "number" stands for the class of persons. The names are dealt anew in each row, so the row's examples alone
tell what they mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diff_transformer.data.answer_rows import AnswerRows, Made
from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.seeding import training_rng
from diff_transformer.data.tasks.types import LabelledSet
from diff_transformer.data.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT = 0.2  # share of the training texts


class ShotSource(AnswerRows):
    """Rows of as many examples as fit, of some of a set's classes, whose names are dealt anew in each row.

    Only training texts of the set are used, and none that is a test text too, or of which two do not fit a row. A fifth
    of them, by a hash of the text, is held out.

    Args:
        length: tokens a row.
        classes: numbers of classes in a row, drawn with equal probability.
        answer_loss_only: only labels carry a loss, and of each class only those after its first example.
        held_out: rows of the held-out texts.

    Raises:
        ValueError: for fewer than 1 class, or more than have texts that fit.
    """

    def __init__(
        self,
        labelled: LabelledSet,
        tokenizer: PreTrainedTokenizerFast,
        *,
        length: int,
        seed: int = 0,
        classes: tuple[int, ...] = (2, 3),
        answer_loss_only: bool = False,
        held_out: bool = False,
    ):
        super().__init__(tokenizer, length=length, seed=seed, answer_loss_only=answer_loss_only)
        self.classes, self._stream = tuple(classes), "shots held out" if held_out else "shots"
        asked = {example.text.casefold() for example in labelled.test}
        self._names = [encode(tokenizer, f" {label}").tolist() for label in labelled.labels]
        self._end = encode(tokenizer, "\n").tolist()
        room = length // 2 - max(map(len, self._names)) - len(self._end)
        by_label: dict[str, list[list[int]]] = {}
        for example in labelled.train:
            if example.text.casefold() in asked or held_out != (hash_of_name(f"shots {example.text}") < HELD_OUT):
                continue
            text = encode(tokenizer, labelled.ask(example.text)).tolist()
            if len(text) <= room:
                by_label.setdefault(example.label, []).append(text)
        self._texts = [by_label[label] for label in sorted(by_label)]
        if min(self.classes, default=0) < 1 or max(self.classes) > len(self._texts):
            raise ValueError(
                f"data.shots.classes is {list(self.classes)}; in rows of {length} tokens {labelled.name} has "
                f"{len(self._texts)} classes with texts that take at most half of a row; give numbers from 1 to that, "
                "or a larger data.length"
            )

    def _row(self, index: int) -> Made:
        """The answers are the labels whose class had an example before."""
        rng = training_rng(self.seed, self._stream, index)
        count = self.classes[rng.integers(len(self.classes))]
        classes, names = rng.permutation(len(self._texts))[:count], rng.permutation(len(self._names))[:count]
        row: list[int] = []
        answers: list[tuple[int, int]] = []
        seen: set[int] = set()
        while True:
            which = int(rng.integers(count))
            texts, name = self._texts[classes[which]], self._names[names[which]]
            text = texts[rng.integers(len(texts))]
            start, end = len(row) + len(text), len(row) + len(text) + len(name)
            if end + len(self._end) > self.length:
                return row, answers
            if which in seen:
                answers.append((start, end))
            seen.add(which)
            row += [*text, *name, *self._end]
