"""Text to tokens, several times faster than one call a text: natural language repeats its words.

What a tokenizer gives for a word does not depend on the words around it where its pre-tokenizer splits between them.
So the text is cut into words, each distinct word is tokenised once by the library, and the tokens are looked up. The
cuts are places where the pre-tokenizers that are known here always split; with any other nothing is looked up.
"""

import json
import re
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

from diff_transformer.data.tiktoken_ranks import PIECES as CL100K
from diff_transformer.data.tokenizer import PIECES as OURS

MAX_WORDS = 200_000  # in each of two generations; about 60 MB together

# A cut lies between a character that is no white space and a space, tab or line end; not between punctuation and a
# line end, which cl100k joins.
_WORDS = re.compile(r"\s*\S+(?:(?:(?=[^\S \t\r\n])|(?<![A-Za-z0-9])(?=[\r\n]))\s+\S*)*|\s+")

_KNOWN_SPLITS = frozenset({OURS, CL100K, CL100K.replace(r"|\s+\z", "")})


class Encoder:
    """Token ids of texts as raw integers, exactly what the tokenizer gives without special tokens.

    Args:
        state: the tokenizer, as its JSON.
        dtype: of the ids, "<u2" or "<u4".
    """

    def __init__(self, state: str, dtype: str):
        self.backend = Tokenizer.from_str(state)
        self.backend.encode_special_tokens = True
        self.backend.no_padding()
        self.backend.no_truncation()
        self.dtype = np.dtype(dtype)
        self.by_word = splits_at_spaces(state)
        self._words = _Words(self._call)

    def encode(self, text: str) -> bytes:
        """The ids of ``text``, in the order of the text."""
        if not self.by_word:
            return self._call(text)
        return b"".join(map(self._words.__getitem__, _WORDS.findall(text)))

    def _call(self, text: str) -> bytes:
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, self.dtype).tobytes()


class _Words(dict):
    """The tokens of words, made when first asked for. When there are too many, those of the latest ``MAX_WORDS`` that
    are asked for again stay."""

    def __init__(self, make: Callable[[str], bytes]):
        super().__init__()
        self._make = make
        self._older: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        tokens = self._older.get(word)
        if tokens is None:
            tokens = self._make(word)
        if len(self) >= MAX_WORDS:
            self._older = dict(self)
            self.clear()
        self[word] = tokens
        return tokens


def splits_at_spaces(state: str) -> bool:
    """Whether a tokenizer, given as its JSON, is one of those whose tokens never cross the cuts: no normaliser, no
    tokens beside special ones to be found in the text, and a pre-tokenizer known to split there."""
    tokenizer = json.loads(state)
    model, before = tokenizer["model"], tokenizer["pre_tokenizer"] or {}
    if tokenizer["normalizer"] or model["type"] != "BPE" or model.get("dropout"):
        return False
    if any(not token["special"] for token in tokenizer["added_tokens"]):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if before.get("type") == "ByteLevel":
        return not before["add_prefix_space"] and (before["use_regex"] or not model["merges"])
    steps = before.get("pretokenizers", []) if before.get("type") == "Sequence" else []
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, bytes_of = steps
    return (
        split["pattern"].get("Regex") in _KNOWN_SPLITS
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and not bytes_of["add_prefix_space"]
        and not bytes_of["use_regex"]
    )
