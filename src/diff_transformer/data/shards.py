"""Prepared folders, as they are read: one side of the split as one array of tokens that stays on the disk."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.prepare.shard_files import DOCUMENT_DTYPE, DOCUMENTS, TOKENS, wrong_size
from diff_transformer.data.prepare.state import MANIFEST, PLAN, SHARDS, TOKENIZER
from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT, VERSION = "diff-transformer shards", 1
SIDES = ("train", "validation")
_OPEN_AT_ONCE = 128  # memory maps hold a file open each


def read_manifest(folder: Path | str) -> dict:
    """The manifest of a prepared folder.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if the folder is not complete, or of another format.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.exists():
        if (folder / PLAN).exists():
            raise ValueError(f"{folder} is not complete; go on with `{mending(folder)}`")
        raise FileNotFoundError(f"{folder} is no prepared folder: it has no {MANIFEST}; see `diff-transformer prepare`")
    try:
        manifest = json.loads(path.read_text())
        named = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no manifest of a prepared folder ({type(error).__name__}: {error})") from None
    if named != (FORMAT, VERSION):
        raise ValueError(f"{path} is of format {named}, this version reads {(FORMAT, VERSION)}; prepare the text again")
    return manifest


def mending(folder: Path | str) -> str:
    """The command that makes missing and damaged shards again."""
    return f"diff-transformer prepare --out {folder} --resume"


def load_prepared_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer that a folder was prepared with.

    Raises:
        ValueError: if it is not there, or has changed.
    """
    tokenizer, expected = load_tokenizer(Path(folder) / TOKENIZER), read_manifest(folder)["tokenizer"]["hash"]
    found = tokenizer_hash(tokenizer)
    if found != expected:
        raise ValueError(f"{Path(folder) / TOKENIZER} has hash {found}, the shards were made with {expected}")
    return tokenizer


class Shards:
    """One side of a prepared folder as a read-only array of N tokens, each document followed by the end of text.

    ``len(shards)``, ``shards.dtype``, ``shards[a:b]`` and ``shards[positions]`` with an integer array are as for an
    array in memory and copy what they return, no more: the files are mapped into memory, at most 128 at a time.

    Raises:
        FileNotFoundError, ValueError: if the folder is not prepared, not complete, or a file of it is missing or has
            another size than the manifest says.
    """

    def __init__(self, folder: Path | str, side: str):
        if side not in SIDES:
            raise ValueError(f"side is {side!r}; accepted: {', '.join(SIDES)}")
        self.folder, self.side = Path(folder), side
        manifest = read_manifest(folder)
        self.dtype = np.dtype(manifest["dtype"])
        self.num_documents = manifest[side]["documents"]
        self._files = self.folder / SHARDS
        self._records = manifest[side]["shards"]
        for record in self._records:
            problem = wrong_size(self._files, record, manifest["dtype"])
            if problem:
                raise ValueError(f"{problem}. Mend the folder with `{mending(folder)}`")
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
        """Tokens of a slice without a step, or at each of an integer array of positions: ``dtype``, its shape."""
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

    def _map(self, number: int, ending: str, dtype: np.dtype) -> np.ndarray:
        name = self._records[number]["name"] + ending
        with self._lock:
            if name not in self._maps:
                self._maps[name] = np.memmap(self._files / name, dtype, mode="r")
                if len(self._maps) > _OPEN_AT_ONCE:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(name)
            return self._maps[name]
