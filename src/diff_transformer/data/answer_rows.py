"""The common part of sources of questions and answers: padded rows, a loss on all tokens or on the answers alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.mixture import IGNORED
from diff_transformer.data.tokenizer import ids_in_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Made = tuple["list[int] | np.ndarray", list[tuple[int, int]]]  # the tokens of a row, and the span of each answer


class AnswerRows(ABC):
    """Rows of ``length`` tokens; row i is a pure function of (seed, i). Tokens without a loss fill a row.

    Args:
        length: tokens a row.
        answer_loss_only: only the answers carry a loss.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, length: int, seed: int, answer_loss_only: bool):
        self.tokenizer, self.length, self.seed, self.answer_loss_only = tokenizer, length, seed, answer_loss_only
        pad = tokenizer.pad_token_id  # which a model need not embed, if it lies beyond all ids of text
        self._pad = pad if pad is not None and pad < ids_in_rows(tokenizer) else tokenizer.eos_token_id or 0

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of rows ``first`` to ``first + count``, int64 [count, length]."""
        ids = np.full((count, self.length), self._pad, dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row in range(count):
            made, answers = self._row(first + row)
            ids[row, : len(made)] = made
            for start, end in answers if self.answer_loss_only else [(0, len(made))]:
                labels[row, start:end] = ids[row, start:end]
        return ids, labels

    @abstractmethod
    def _row(self, index: int) -> Made:
        """Row ``index``: ``length`` tokens or fewer."""
