"""A corpus as one long array of tokens, cut into windows: the rows of language modelling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from diff_transformer.data.documents import Document
from diff_transformer.data.seeding import training_rng
from diff_transformer.data.tokenizer import encode_each, ids_of
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def pack_documents(documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """All documents as one array of token ids [N], each followed by the end-of-text token.

    The dtype is uint16 if the ids fit, else uint32.

    Raises:
        UserError: if the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError("the tokenizer has no eos_token to put between documents; set tokenizer.eos_token")
    dtype = np.uint16 if ids_of(tokenizer) <= 1 << 16 else np.uint32
    texts = ((document.name, document.text) for document in documents)
    pieces = [np.append(ids, end).astype(dtype) for _, ids in encode_each(tokenizer, texts)]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


class PackedCorpus:
    """Rows that are windows of ``length`` tokens of a corpus. Each token occurs at most once an epoch.

    Row i is a pure function of (seed, i), so that resuming needs only the row's index. The corpus is treated as a ring:
    each epoch cuts it into windows from a random offset and visits them in a random order. With ``shuffle=False``, for
    evaluation, every epoch is the corpus in order from its first token.

    Raises:
        UserError: for a length below 2, or fewer tokens than one window; the message calls the corpus ``name``.
    """

    def __init__(self, tokens: Any, length: int, *, seed: int = 0, shuffle: bool = True, name: str = "the corpus"):
        if length < 2:
            raise UserError(f"length must be at least 2 (a token and the one it predicts), got {length}")
        if len(tokens) < length:
            raise UserError(
                f"{name} has {len(tokens)} tokens, less than one window of {length}; give more text or a smaller length"
            )
        self.tokens = tokens  # [N], an array in memory or ``tokens.Shards``
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self.num_windows = len(tokens) // length  # rows in an epoch
        self._order: tuple[int, int, np.ndarray] | None = None  # of an epoch: its number, offset and permutation

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows ``first`` to ``first + count``: (input_ids, labels), int64 [count, length].

        The labels are the input ids; the model shifts them.
        """
        indices = np.arange(first, first + count)
        positions = np.empty((count, self.length), np.int64)
        epochs = indices // self.num_windows
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            positions[mine] = self._positions(int(epoch), indices[mine] % self.num_windows)
        input_ids = self.tokens[positions].astype(np.int64)
        return input_ids, input_ids.copy()

    def spread(self, count: int) -> np.ndarray:
        """At most ``count`` rows, spread evenly over the corpus: int64 [count, length]."""
        count = min(count, self.num_windows)
        return np.concatenate([self.rows(self.num_windows * i // count, 1)[0] for i in range(count)])

    def _positions(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Positions of the tokens of the rows at ``places`` of an epoch: int64 [places, length]."""
        offset = 0
        if self.shuffle:
            if self._order is None or self._order[0] != epoch:
                rng = training_rng(self.seed, "packing", epoch)
                self._order = epoch, int(rng.integers(len(self.tokens))), rng.permutation(self.num_windows)
            _, offset, order = self._order
            places = order[places]
        return (offset + places[:, None] * self.length + np.arange(self.length)) % len(self.tokens)
