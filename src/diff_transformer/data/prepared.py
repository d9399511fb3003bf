"""Reading prepared folders: tokens that stay on the disk, and rows in an order that takes no memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.documents import Corpus, Document
from diff_transformer.data.packing import PackedCorpus
from diff_transformer.data.prepared_folder import (
    DOCUMENT_DTYPE,
    DOCUMENTS,
    SHARDS,
    TOKENS,
    load_prepared_tokenizer,
    read_manifest,
    repair_command,
    wrong_size,
)
from diff_transformer.data.seeding import permuted, training_rng
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DECODED_BYTES = 8_000_000
_OPEN_AT_ONCE = 128  # each memory map holds a file open


class Shards:
    """One split of a prepared folder as a read-only array of N tokens, each document followed by the end of text.

    ``len(shards)``, ``shards.dtype``, ``shards[a:b]`` and ``shards[positions]`` with an integer array are as for an
    array in memory. They copy only what they return: the files are mapped into memory, at most 128 at a time.

    Args:
        check: look at the size of every file now. A file is checked when it is first read in any case, so of many
            processes one needs to do this.

    Raises:
        FileNotFoundError, ValueError: if the folder is not prepared, not complete, or a file of it is missing or has
            another size than the manifest says.
    """

    def __init__(self, folder: Path | str, split: str, *, check: bool = True):
        if split not in ("train", "validation"):
            raise UserError(f"split is {split!r}; accepted: train, validation")
        self.folder, self.split = Path(folder), split
        manifest = read_manifest(folder)
        self.dtype = np.dtype(manifest["dtype"])
        self.num_documents = manifest[split]["documents"]
        self._files = self.folder / SHARDS
        self._records = manifest[split]["shards"]
        for record in self._records if check else ():
            self._check(record)
        self._ends = np.cumsum([record["tokens"] for record in self._records])  # int64 [shards]
        self._starts = self._ends - [record["tokens"] for record in self._records]
        self._maps: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = Lock()  # rows may be prepared in a thread

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """The tokens of a slice without a step, or at each position of an integer array: ``dtype``, its shape."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise IndexError(f"a slice of shards has no step, got {index}")
            index = np.arange(start, max(start, stop))
        positions = np.asarray(index)
        if positions.size and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"positions {positions.min()} to {positions.max()} of {len(self)} tokens")
        found = np.empty(positions.shape, self.dtype)
        owner = np.searchsorted(self._ends, positions, side="right")
        for number in np.unique(owner):
            mine = owner == number
            found[mine] = self._map(number, TOKENS, self.dtype)[positions[mine] - self._starts[number]]
        return found

    def document_starts(self) -> Iterator[np.ndarray]:
        """Position of the first token of every document, in order: int64 arrays, one a shard."""
        for number, record in enumerate(self._records):
            if record["documents"]:
                yield self._map(number, DOCUMENTS, np.dtype(DOCUMENT_DTYPE)) + self._starts[number]

    def _check(self, record: dict) -> None:
        problem = wrong_size(self._files, record, self.dtype.str)
        if problem:
            raise UserError(f"{problem}. Repair the folder with `{repair_command(self.folder)}`")

    def _map(self, number: int, ending: str, dtype: np.dtype) -> np.ndarray:
        name = self._records[number]["name"] + ending
        with self._lock:
            if name not in self._maps:
                self._check(self._records[number])
                self._maps[name] = np.memmap(self._files / name, dtype, mode="r")
                if len(self._maps) > _OPEN_AT_ONCE:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(name)
            return self._maps[name]


class PreparedCorpus(PackedCorpus):
    """Rows that are windows of ``length`` tokens of a :class:`Shards`, as those of :class:`PackedCorpus`.

    The order of an epoch is computed place by place, so that only the maps of the files are in memory.

    Raises:
        ValueError: if there are fewer tokens than a window.
    """

    tokens: Shards

    def __init__(self, tokens: Shards, length: int, *, seed: int = 0):
        super().__init__(tokens, length, seed=seed)

    def _starts(self, epoch: int, places: np.ndarray) -> np.ndarray:
        rng = training_rng(self.seed, "prepared", epoch)
        offset = rng.integers(len(self.tokens))
        return offset + permuted(places, self.num_windows, rng) * self.length


class LongDocuments(PreparedCorpus):
    """Rows of a corpus up-sampled by document length, for training at long context.

    Source: section 3.3, after Fu et al., arXiv 2402.10171: long documents are repeated within each corpus, so that the
    proportions of the corpora do not change.

    A document with at least ``threshold`` tokens, its end of text included, is long. An epoch holds

    - every row of a long document ``factor`` times. Such a row starts a whole number of rows after the beginning of
      the document. A document of m tokens has max(1, round(m / length)) rows, halves rounded up. A row that reaches
      beyond its document continues with the tokens that follow in the corpus;
    - the other documents once, joined and cut into windows as in a PreparedCorpus.

    All rows are shuffled together. Row i is a pure function of (seed, i). Only the places of the long documents are in
    memory, 32 bytes each.

    Raises:
        ValueError: if no document is long, or threshold or factor is below 1.
    """

    def __init__(self, tokens: Shards, length: int, *, threshold: int, factor: int, seed: int = 0):
        if threshold < 1 or factor < 1:
            raise UserError(f"threshold {threshold} and factor {factor} must be at least 1")
        super().__init__(tokens, length, seed=seed)
        starts, sizes = _documents_from(tokens, threshold)
        if not len(starts):
            raise UserError(
                f"no document of {tokens.folder} has {threshold} tokens or more; set data.upsample_length lower, or 0 "
                "for no up-sampling"
            )
        self.threshold, self.factor = threshold, factor
        self._long_starts = starts
        rows = np.maximum(1, (2 * sizes + length) // (2 * length))
        self._rows_before = np.concatenate(
            [[0], np.cumsum(rows)]
        )  # rows of the long documents before each, then of all
        self._long_before = np.concatenate([[0], np.cumsum(sizes)])  # the same in tokens
        self._other_before = starts - self._long_before[:-1]  # tokens of other documents before each long one
        self.num_other = len(tokens) - int(self._long_before[-1])
        self._other_windows = self.num_other // length
        self.num_windows = self._other_windows + factor * int(self._rows_before[-1])

    def rows(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.empty((count, self.length), np.int64)
        indices = np.arange(first, first + count)
        for epoch in np.unique(indices // self.num_windows):
            mine = indices // self.num_windows == epoch
            positions[mine] = self._positions(int(epoch), indices[mine] % self.num_windows)
        input_ids = self.tokens[positions].astype(np.int64)
        return input_ids, input_ids.copy()

    def _positions(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Positions of the tokens of the rows at ``places`` of an epoch: int64 [places, length]."""
        rng = training_rng(self.seed, "prepared", epoch)
        offset = rng.integers(max(1, self.num_other))
        chosen = permuted(places, self.num_windows, rng)
        other = chosen < self._other_windows
        positions = np.empty((len(places), self.length), np.int64)
        steps = np.arange(self.length)
        if other.any():
            among = (offset + chosen[other][:, None] * self.length + steps) % self.num_other
            before = np.searchsorted(self._other_before, among, side="right")  # number of long documents before
            positions[other] = among + self._long_before[before]
        row = (chosen[~other] - self._other_windows) % int(self._rows_before[-1])
        document = np.searchsorted(self._rows_before, row, side="right") - 1
        within = row - self._rows_before[document]
        starts = self._long_starts[document] + within * self.length
        positions[~other] = (starts[:, None] + steps) % len(self.tokens)
        return positions


def _documents_from(tokens: Shards, threshold: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, tokens) of each document of at least ``threshold`` tokens, in order: int64 [documents]."""
    starts, sizes, last = [], [], np.empty(0, np.int64)
    for part in [*tokens.document_starts(), np.array([len(tokens)])]:
        known = np.concatenate([last, part])
        long = np.flatnonzero(np.diff(known) >= threshold)
        starts.append(known[long])
        sizes.append(np.diff(known)[long])
        last = known[-1:]
    return np.concatenate(starts), np.concatenate(sizes)


def decoded_corpus(folder: Path | str, max_bytes: int | None = None) -> Corpus:
    """The first documents of both sides, decoded to text: about ``max_bytes`` of each side (default: 8 MB).

    With a byte-level tokenizer, the text is the one that was prepared.
    """
    tokenizer = load_prepared_tokenizer(folder)
    limit = _DECODED_BYTES if max_bytes is None else max_bytes
    splits = {
        split: list(_decoded(Shards(folder, split, check=False), tokenizer, limit)) for split in ("train", "validation")
    }
    return Corpus(str(folder), splits["train"], splits["validation"], "as prepared; the first documents of each side")


def _decoded(tokens: Shards, tokenizer: PreTrainedTokenizerFast, limit: int) -> Iterable[Document]:
    """Whole documents, up to about ``limit`` bytes; the last one is cut if it is too long."""
    done, number = 0, 0
    for start, end in _spans(tokens):
        ids = tokens[start : min(end - 1, start + limit - done)]
        text = tokenizer.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        if text.strip():
            yield Document(f"{tokens.split}/{number}", text)
        done, number = done + len(text.encode()), number + 1
        if done >= limit:
            return


def _spans(tokens: Shards) -> Iterable[tuple[int, int]]:
    previous = None
    for part in tokens.document_starts():
        for start in part.tolist():
            if previous is not None:
                yield previous, start
            previous = start
    if previous is not None:
        yield previous, len(tokens)
