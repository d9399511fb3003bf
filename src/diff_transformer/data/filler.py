"""Real text to hide needles in, as words with known tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.documents import Document
from diff_transformer.data.tokenizer import encode_inside
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_WORD = 40  # characters; longer runs without a space are data
_MAGIC_NUMBER = re.compile(r"\bmagic\W{1,3}numbers?\b", re.IGNORECASE)
_SENTENCE_GAP = re.compile(r"(?<=[.!?]) ")
_ENDS_TRIED = 64
_COMPARED = 4096  # words, to compare their tokens with those of their text


@dataclass(frozen=True)
class FillerTokens:
    """Word i of the filler is ``ids[starts[i] : starts[i + 1]]``.

    ``joined`` is the number of tokens of running text by the tokens of its words: 1 where no token crosses the border
    between two words.
    """

    ids: np.ndarray  # int64 [N]
    starts: np.ndarray  # int64 [words + 1]
    joined: float

    @property
    def size(self) -> int:
        """Tokens of the whole filler as text (an estimate unless ``joined`` is 1)."""
        return int(self.starts[-1] * self.joined)


class Filler:
    """The words of ``documents``, each with one space before it, whatever white space the document has there.

    Left out are sentences about magic numbers, words of more than 40 characters, and words with ``<|``, which special
    tokens have. Above ``max_bytes``, the same share of every document is used, from its start.

    Raises:
        UserError: if no word is left.
    """

    def __init__(self, documents: Iterable[Document], *, max_bytes: int = 4_000_000):
        documents = list(documents)
        share = min(1.0, max_bytes / max(1, sum(document.num_bytes for document in documents)))
        self.words: list[str] = []
        for document in documents:
            text = " ".join(document.text[: int(len(document.text) * share)].split())
            if _MAGIC_NUMBER.search(text):
                text = " ".join(part for part in _SENTENCE_GAP.split(text) if not _MAGIC_NUMBER.search(part))
            self.words += [f" {word}" for word in text.split() if len(word) <= MAX_WORD and "<|" not in word]
        if not self.words:
            raise UserError(f"{len(documents)} documents hold no words to use as filler; give text with spaces")
        self._tokens: dict[int, tuple[PreTrainedTokenizerFast, FillerTokens]] = {}

    def without(self, spellings: Iterable[str]) -> Filler:
        """The same filler, without the words that hold one of ``spellings``."""
        other, spellings = copy(self), tuple(spellings)
        other.words = [word for word in self.words if not any(spelling in word for spelling in spellings)]
        other._tokens = {}
        return other

    def tokens(self, tokenizer: PreTrainedTokenizerFast) -> FillerTokens:
        """The tokens of the words, computed once for each tokenizer.

        Each word is tokenised separately, as inside a text. This is exact for tokenizers whose tokens never cross the
        border between two words.
        """
        if id(tokenizer) not in self._tokens:
            self._tokens[id(tokenizer)] = tokenizer, _tokenise(self.words, tokenizer)
        return self._tokens[id(tokenizer)][1]

    def window(self, rng: np.random.Generator, tokenizer: PreTrainedTokenizerFast, size: int) -> tuple[int, int]:
        """Words [first, last) at a random place that have ``size`` tokens together, counted word by word.

        If none of 64 neighbouring places gives exactly ``size`` tokens, there are fewer, by less than a word.

        Raises:
            UserError: if the filler has fewer than ``size`` tokens.
        """
        starts = self.tokens(tokenizer).starts
        words = len(starts) - 1
        if size > starts[-1]:
            raise UserError(
                f"{size} tokens of filler are needed and the documents have {starts[-1]}; "
                "give more text or a smaller length"
            )
        lowest = int(np.searchsorted(starts, size))
        end = int(rng.integers(lowest, words + 1))
        last = np.arange(end, min(end + _ENDS_TRIED, words + 1))
        wanted = starts[last] - size
        first = np.searchsorted(starts, wanted)
        best = int(np.argmin(starts[first] - wanted))
        return int(first[best]), int(last[best])


def _tokenise(words: list[str], tokenizer: PreTrainedTokenizerFast) -> FillerTokens:
    """Tokenise each distinct word once."""
    distinct: dict[str, int] = {}
    which = np.array([distinct.setdefault(word, len(distinct)) for word in words])
    encoded = encode_inside(tokenizer, list(distinct))
    bounds = np.cumsum([0] + [len(ids) for ids in encoded])  # of each distinct word in ``joined``
    joined = np.concatenate(encoded)
    sizes = np.diff(bounds)[which]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    first = max(0, len(words) - _COMPARED) // 2
    last = min(len(words), first + _COMPARED)
    (running,) = encode_inside(tokenizer, ["".join(words[first:last])])
    ids = joined[np.repeat(bounds[which] - starts[:-1], sizes) + np.arange(starts[-1])]
    return FillerTokens(ids, starts, len(running) / max(1, int(starts[last] - starts[first])))
