"""The steps of ours in a pipeline of datatrove: from sources to documents, and from documents to shards."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from diff_transformer.checks import first_line
from diff_transformer.data.prepare.config import PrepareConfig
from diff_transformer.data.prepare.folder import (
    ERROR,
    SPLITS,
    TASKS,
    changed,
    finished_mark,
    journal_path,
    read_journal,
    wrong_content,
)
from diff_transformer.data.prepare.pieces import Piece, TextHash, document_pieces
from diff_transformer.data.prepare.readers import Reader, Tally
from diff_transformer.data.prepare.sources import TextSource
from diff_transformer.data.prepare.workers import Encoder, ShardWriter, Task
from diff_transformer.durable import append_lines

_SPLIT, _FIRST, _LAST = "split", "first", "last"  # metadata of a document


@contextmanager
def _reported(out: Path, rank: int) -> Generator[None]:
    """Leave the message of an exception in the folder: on a cluster, no exception comes back."""
    report = out / TASKS / f"{rank:05d}{ERROR}"
    report.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        report.write_text(first_line(error))
        raise


class ReadTexts(PipelineStep):
    """The documents of a task: parts i, i + n, ... of the sources, in their order.

    Args:
        out: the prepared folder.
        parts: sources of one file each, or that cannot be divided; "hub" sources, of which every task reads its share.
        whole: whether each document comes whole, as filters need it, or in pieces, so that it need not fit in memory.
        tally: counts what was read.
    """

    type, name = "READER", "texts"

    def __init__(self, out: Path, parts: Sequence[TextSource], config: PrepareConfig, tally: Tally, *, whole: bool):
        super().__init__()
        self.out, self.parts, self.config, self.tally, self.whole = out, parts, config, tally, whole

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        with _reported(self.out, rank):
            yield from self._documents(rank, world_size)

    def _documents(self, rank: int, world_size: int) -> Iterator[Document]:
        reader = Reader(self.config.field, self.config.validation, self.config.skip_invalid, self.tally)
        number, texts = 0, []
        for part in self._mine(rank, world_size):
            for piece in reader.pieces(part):
                texts.append(piece.text)
                if piece.last or not self.whole:
                    metadata = {_SPLIT: piece.split, _FIRST: piece.first or self.whole, _LAST: piece.last}
                    yield Document("".join(texts), f"{rank}/{number}", metadata=metadata)
                    number, texts = number + 1, []

    def _mine(self, rank: int, world_size: int) -> Iterator[TextSource]:
        for number, part in enumerate(self.parts):
            if part.kind == "hub":
                yield replace(part, part=(rank, world_size))
            elif number % world_size == rank:
                yield part


class WriteShards(PipelineStep):
    """Writes the documents of a task into shards of its own, and a journal of them.

    Shards that the journal knows and that are intact are kept if their text is the same.

    Args:
        out: the prepared folder.
        tally: of the reader, for the counts of what was left out.
    """

    type, name = "WRITER", "shards"

    def __init__(self, out: Path, task: Task, shard_bytes: int, tally: Tally, *, whole: bool):
        super().__init__()
        self.out, self.task, self.shard_bytes, self.tally, self.whole = out, task, shard_bytes, tally, whole

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        splits = {split: _Split(self, split, rank) for split in SPLITS}
        try:
            with _reported(self.out, rank):
                self._write(data, splits, rank)
        except BaseException:
            for split in splits.values():
                split.abort()
            raise

    def _write(self, data: Any, splits: dict[str, _Split], rank: int) -> None:
        encoder = Encoder(self.task.state, self.task.dtype)
        for document in data:
            for piece in self._pieces(document):
                splits[piece.split].add(piece, encoder)
        for split in splits.values():
            split.end()
        known = read_journal(journal_path(self.out, rank)).keys()
        stale = known - {name for split in splits.values() for name in split.names} - {finished_mark(rank)}
        if stale:
            raise ValueError(changed(self.out, min(stale)))
        written = {split.split: split.documents for split in splits.values()}
        filtered = self.tally.train + self.tally.validation - sum(written.values())
        left_out = {"blank": self.tally.blank, "invalid": self.tally.invalid, "filtered": filtered}
        mark = {"name": finished_mark(rank), "documents": written, "left_out": left_out}
        append_lines(journal_path(self.out, rank), [mark])

    def _pieces(self, document: Document) -> Iterator[Piece]:
        about = document.metadata
        if self.whole:
            return document_pieces([document.text], about[_SPLIT])
        return iter([Piece(document.text, about[_SPLIT], about[_FIRST], about[_LAST])])


class _Split:
    """The shard of one split of a task that is being filled."""

    def __init__(self, step: WriteShards, split: str, rank: int):
        self.split, self.documents, self.names = split, 0, []
        self._step, self._rank, self._journal = step, rank, journal_path(step.out, rank)
        self._known = read_journal(self._journal)
        self._text: TextHash | None = None  # None between shards
        self._writer: ShardWriter | None = None  # None for a shard that is kept

    def add(self, piece: Piece, encoder: Encoder) -> None:
        if self._text is None:
            self._begin(encoder)
        assert self._text is not None
        (self._writer or self._text).add(piece.text.encode(), piece.first, piece.last)
        self.documents += piece.first
        if self._text.text_bytes >= self._step.shard_bytes:
            self.end()

    def _begin(self, encoder: Encoder) -> None:
        task = self._step.task
        self.names.append(f"{self.split}-{self._rank:05d}-{len(self.names):06d}")
        known = self._known.get(self.names[-1])
        if known is not None and wrong_content(task.folder, known, task.dtype) is None:
            self._text, self._writer = TextHash(), None
        else:
            self._writer = ShardWriter(task.folder, self.names[-1], encoder, task.end_of_text)
            self._text = self._writer.text

    def end(self) -> None:
        """Finish the shard that is being filled, if there is one; raise ValueError if its text has changed."""
        if self._text is None:
            return
        name = self.names[-1]
        known = self._known.get(name)
        if known is not None and known["text_hash"] != self._text.hexdigest():
            raise ValueError(changed(self._step.out, name))
        if self._writer is not None:
            append_lines(self._journal, [self._writer.finish()])
        self._text = self._writer = None

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
