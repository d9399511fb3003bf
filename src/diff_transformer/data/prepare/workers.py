"""From units of text to shards of tokens, in several processes.

Natural language repeats its words, so the encoder tokenises each distinct word once and looks up its tokens, which is
several times faster than one tokenizer call for each text. This is exact where the pre-tokenizer splits the text
between words: the tokens of a word then do not depend on its neighbours. The text is cut only where the pre-tokenizers
that are known here always split; with any other tokenizer nothing is looked up.
"""

import json
import os
import re
import signal
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from diff_transformer.data.prepare.folder import DOCUMENT_DTYPE, DOCUMENTS, TOKENS, new_digest
from diff_transformer.data.prepare.pieces import TextHash, Unit
from diff_transformer.data.tiktoken_ranks import PIECES as CL100K
from diff_transformer.data.tokenizer import LONGEST_WORD
from diff_transformer.data.tokenizer import PIECES as OURS
from diff_transformer.durable import replacing

Item = TypeVar("Item")
Made = TypeVar("Made")
KILLED = (
    "a process that tokenised was killed, perhaps because memory ran out; finished shards are kept: continue with "
    "--resume and fewer --jobs"
)
MAX_WORDS = 200_000  # in each of two generations; about 60 MB together. Words above LONGEST_WORD are not kept

# A cut lies between a character that is no white space and a space, tab or line end; not between punctuation and a
# line end, which cl100k joins.
_WORDS = re.compile(r"\s*\S+(?:(?:(?=[^\S \t\r\n])|(?<![A-Za-z0-9])(?=[\r\n]))\s+\S*)*|\s+")

_KNOWN_SPLITS = frozenset({OURS, CL100K, CL100K.replace(r"|\s+\z", "")})


class Encoder:
    """Tokenises texts into the bytes of their ids: the tokenizer's own ids, without special tokens.

    Args:
        state: the tokenizer as JSON.
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
    """A cache of the tokens of words, in two generations of at most ``MAX_WORDS`` words.

    When the younger generation is full, it becomes the older one; a word of the older one that is asked for moves back.
    """

    def __init__(self, make: Callable[[str], bytes]):
        super().__init__()
        self._make = make
        self._older: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        tokens = self._older.get(word)
        if tokens is None:
            tokens = self._make(word)
        if len(word) > LONGEST_WORD:
            return tokens
        if len(self) >= MAX_WORDS:
            self._older = dict(self)
            self.clear()
        self[word] = tokens
        return tokens


def splits_at_spaces(state: str) -> bool:
    """Whether the tokens of a tokenizer, given as JSON, never cross the cuts between words.

    True for BPE without a normaliser, without added tokens other than special ones, and with a known pre-tokenizer.
    """
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


class ShardWriter:
    """The two files of a shard in ``folder``, written piece by piece; each document is followed by ``end_of_text``.

    The files appear with ``finish``; ``abort`` removes what was written.
    """

    def __init__(self, folder: Path, name: str, encoder: Encoder, end_of_text: int):
        self.text = TextHash()
        self._folder, self._name, self._encoder = folder, name, encoder
        self._end = np.array([end_of_text], encoder.dtype).tobytes()
        self._digest, self._tokens, self._starts = new_digest(), 0, array("q")
        self._stack = ExitStack()
        self._file = self._stack.enter_context(
            self._stack.enter_context(replacing(folder / (name + TOKENS))).open("wb")
        )

    def add(self, text: bytes, first: bool, last: bool) -> None:
        """Tokenise and write a piece: UTF-8, and whether it begins and ends its document."""
        self.text.add(text, first, last)
        if first:
            self._starts.append(self._tokens)
        encoded = self._encoder.encode(text.decode()) + (self._end if last else b"")
        self._file.write(encoded)
        self._digest.update(encoded)
        self._tokens += len(encoded) // self._encoder.dtype.itemsize

    def finish(self) -> dict:
        """Bring the files to the disk; return the record of the shard: sizes, checksums, and the hash of its text."""
        self._stack.close()
        documents, digest = np.array(self._starts, DOCUMENT_DTYPE).tobytes(), new_digest()
        digest.update(documents)
        with replacing(self._folder / (self._name + DOCUMENTS)) as partial:
            partial.write_bytes(documents)
        return {
            "name": self._name,
            "tokens": self._tokens,
            "documents": len(self._starts),
            "text_bytes": self.text.text_bytes,
            "text_hash": self.text.hexdigest(),
            "checksums": {TOKENS: self._digest.hexdigest(), DOCUMENTS: digest.hexdigest()},
        }

    def abort(self) -> None:
        """Remove what was written. To be called where an exception is handled."""
        self._stack.__exit__(*sys.exc_info())


def write_shard(folder: Path, unit: Unit, encoder: Encoder, end_of_text: int) -> dict:
    """Tokenise ``unit`` into a shard in ``folder``; return its record, as ``ShardWriter.finish``."""
    writer = ShardWriter(folder, unit.name, encoder, end_of_text)
    try:
        for piece in unit.pieces:
            writer.add(*piece)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


@dataclass(frozen=True)
class Task:
    """The settings that all shards share."""

    folder: Path
    state: str  # the tokenizer as JSON
    dtype: str  # of the tokens, "<u2" or "<u4"
    end_of_text: int  # id


def shards(units: Iterable[Unit], task: Task, jobs: int) -> Iterator[tuple[dict, Unit]]:
    """Tokenise ``units`` in ``jobs`` processes; yield the record of each shard with its unit, as they finish.

    At most ``jobs`` + 1 units are in memory.

    Raises:
        RuntimeError: if a process is killed, for example because memory ran out.
    """
    if jobs == 1:
        encoder = Encoder(task.state, task.dtype)
        for unit in units:
            yield write_shard(task.folder, unit, encoder, task.end_of_text), unit
        return
    yield from in_processes(_work, units, jobs, _begin, task)


def in_processes(
    work: Callable[[Item], Made], items: Iterable[Item], jobs: int, begin: Callable[..., None], *arguments: Any
) -> Iterator[tuple[Made, Item]]:
    """Yield ``work`` of each item, made in ``jobs`` processes, with its item, as they finish.

    At most ``jobs`` + 1 items are in memory. No process survives, however the caller ends. ``begin`` sets up a process
    with ``arguments``.

    Raises:
        RuntimeError: if a process is killed, for example because memory ran out.
    """
    before, waiting = set(active_children()), {}
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=begin, initargs=arguments)
    try:
        for item in items:
            waiting[pool.submit(work, item)] = item
            if len(waiting) > jobs:
                yield from _finished(waiting)
        while waiting:
            yield from _finished(waiting)
        pool.shutdown()
    except BaseException as error:
        for child in set(active_children()) - before:
            child.kill()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(KILLED) from error
        raise


def _finished(waiting: dict[Future, Any]) -> Iterator[tuple[Any, Any]]:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        yield future.result(), waiting.pop(future)


_own: tuple[Task, Encoder] | None = None


def _begin(task: Task) -> None:
    global _own
    begin_worker()
    _own = task, Encoder(task.state, task.dtype)


def begin_worker() -> None:
    """Set up a worker process: one tokenizer thread, Ctrl-C handled by the parent, exit when the parent exits."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(unit: Unit) -> dict:
    assert _own is not None
    task, encoder = _own
    return write_shard(task.folder, unit, encoder, task.end_of_text)
