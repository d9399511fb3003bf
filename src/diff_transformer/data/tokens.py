"""A prepared folder: tokens that stay on the disk.

plan.json        settings, files, tokenizer and dtype; written first
tokenizer/       as save_pretrained writes it
shards/          for each task NUMBER.json, its record, written last; for each side SIDE-NUMBER.tokens, in which an end
                 of text follows every document

A folder is complete when every task has its record.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diff_transformer.checks import read_json
from diff_transformer.data.documents import Corpus, Document
from diff_transformer.data.sources import SPLITS
from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PLAN, SHARDS, TOKENIZER = "plan.json", "shards", "tokenizer"
_DECODED_BYTES = 8_000_000
_OPEN_AT_ONCE = 128  # each memory map holds a file open


def is_prepared(folder: Path | str) -> bool:
    """True if ``folder`` is one of ``diff-transformer prepare``, finished or not."""
    return (Path(folder) / PLAN).is_file() and (Path(folder) / SHARDS).is_dir()


def read_plan(folder: Path | str) -> dict[str, Any]:
    """The plan of a prepared folder: ``settings``, ``files``, ``tokenizer`` (hash, size, end_of_text) and ``dtype``.

    Raises:
        UserError: for another folder.
    """
    if not is_prepared(folder):
        raise UserError(f"{folder} is not a folder of `diff-transformer prepare`: it has no {PLAN} or no {SHARDS}")
    return read_json(Path(folder) / PLAN, "prepare the text again")


def read_records(folder: Path | str) -> list[dict[str, Any] | None]:
    """The record of each task, None for one that has not finished.

    Its fields: for each side ``tokens``, ``documents``, ``text_bytes`` and ``checksum``; and the counts ``left_out``.
    """
    tasks = read_plan(folder)["settings"]["tasks"]
    paths = [Path(folder) / SHARDS / f"{task:05d}.json" for task in range(tasks)]
    return [read_json(path) if path.exists() else None for path in paths]


def repair_command(folder: Path | str) -> str:
    """The command that makes missing and damaged shards again."""
    return f"diff-transformer prepare --out {shlex.quote(str(folder))} --resume"


def load_prepared_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer of a prepared folder.

    Raises:
        UserError: if it is missing or has changed.
    """
    tokenizer, expected = load_tokenizer(Path(folder) / TOKENIZER), read_plan(folder)["tokenizer"]["hash"]
    if (actual := tokenizer_hash(tokenizer)) != expected:
        raise UserError(
            f"{Path(folder) / TOKENIZER} has hash {actual}, the shards were written with {expected}; restore it from a "
            "copy"
        )
    return tokenizer


def shard(folder: Path | str, split: str, task: int) -> Path:
    """The tokens of a side of a task."""
    return Path(folder) / SHARDS / f"{split}-{task:05d}.tokens"


def checksum(path: Path) -> str:
    """BLAKE2b of a file's content, 32 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def damage(folder: Path | str, task: int, record: dict[str, Any], dtype: Any, *, content: bool = False) -> str | None:
    """The first file of a task that is missing or has another size than its record says, or with ``content`` another
    checksum, as a message; None if there is none. ``dtype`` is that of the plan."""
    for split in SPLITS:
        path, expected = shard(folder, split, task), np.dtype(dtype).itemsize * record[split]["tokens"]
        size = path.stat().st_size if path.exists() else None
        if size != expected:
            actual = "is missing" if size is None else f"has {size:,} bytes"
            return f"{path} {actual}, {expected:,} bytes expected"
        if content and checksum(path) != record[split]["checksum"]:
            return f"{path} has another checksum than when it was written: its content has changed"
    return None


def verify(folder: Path | str) -> list[str]:
    """Check sizes and checksums of all shards and the hash of the tokenizer; return a message for each problem.

    Raises:
        UserError: for a folder that is not prepared.
    """
    problems, dtype = [], read_plan(folder)["dtype"]
    for task, record in enumerate(read_records(folder)):
        unfinished = f"task {task} has not finished"
        problem = unfinished if record is None else damage(folder, task, record, dtype, content=True)
        problems += [problem] if problem else []
    try:
        load_prepared_tokenizer(folder)
    except UserError as error:
        problems.append(str(error))
    return problems


class Shards:
    """One side of a prepared folder as a read-only array of N tokens, each document followed by the end of text.

    ``len(shards)``, ``shards.dtype``, ``shards[a:b]`` and ``shards[positions]`` with an integer array are as for an
    array in memory. They copy only what they return: the files are mapped into memory, at most 128 at a time.

    Raises:
        UserError: if the folder is not prepared or not complete, or a file of it is missing or has another size than
            its record says.
    """

    def __init__(self, folder: Path | str, split: str):
        self.folder, self.split, self.dtype = Path(folder), split, np.dtype(read_plan(folder)["dtype"])
        self._records: list[dict[str, Any]] = []
        for task, record in enumerate(read_records(folder)):
            if record is None:
                raise UserError(f"{folder} is not complete; continue with `{repair_command(folder)}`")
            if problem := damage(folder, task, record, self.dtype):
                raise UserError(f"{problem}. Repair the folder with `{repair_command(folder)}`")
            self._records.append(record[split])
        self._ends = np.cumsum([record["tokens"] for record in self._records])  # int64 [shards]
        self._starts = self._ends - [record["tokens"] for record in self._records]
        self._map = lru_cache(_OPEN_AT_ONCE)(self._open)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        """The tokens of a slice without a step, or at each position of an integer array: ``dtype``, its shape."""
        positions = np.arange(*index.indices(len(self))) if isinstance(index, slice) else np.asarray(index)
        tokens = np.empty(positions.shape, self.dtype)
        owner = np.searchsorted(self._ends, positions, side="right")
        for number in np.unique(owner):
            mine = owner == number
            tokens[mine] = self._map(number)[positions[mine] - self._starts[number]]
        return tokens

    def _open(self, number: int) -> np.ndarray:
        path = shard(self.folder, self.split, number)
        return np.memmap(path, self.dtype, mode="r")


def decoded_corpus(folder: Path | str, max_bytes: int | None = None) -> Corpus:
    """The first documents of both sides, decoded to text: about ``max_bytes`` of each side (default: 8 MB).

    With a byte-level tokenizer, the text is the one that was prepared.
    """
    tokenizer, limit = load_prepared_tokenizer(folder), max_bytes or _DECODED_BYTES
    sides = {split: list(_decoded(Shards(folder, split), tokenizer, limit)) for split in SPLITS}
    return Corpus(sides["train"], sides["validation"])


def _decoded(tokens: Shards, tokenizer: PreTrainedTokenizerFast, limit: int) -> Iterator[Document]:
    """Whole documents, up to about ``limit`` bytes; the last one is cut if it is too long."""
    ids, start, done = tokens[: 2 * limit], 0, 0
    ends = np.flatnonzero(ids == tokenizer.eos_token_id).tolist()
    for number, end in enumerate(ends if len(ids) == len(tokens) else [*ends, len(ids)]):
        text = tokenizer.backend_tokenizer.decode(
            ids[start : min(end, start + limit - done)].tolist(), skip_special_tokens=False
        )
        if text.strip():
            yield Document(f"{tokens.split}/{number}", text)
        done, start = done + len(text.encode()), end + 1
        if done >= limit:
            return
