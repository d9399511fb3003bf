"""From sources to the stream of pieces that is tokenised: always the same, in the same order."""

import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.prepare.pieces import Piece, decoded, document_pieces, tail_pieces
from diff_transformer.data.prepare.records import Invalid, Records, json_lines, parquet, text_of
from diff_transformer.data.prepare.sources import TAIL, Item, Source, hub_query


@dataclass
class Tally:
    """What the stream held so far."""

    train: int = 0
    validation: int = 0
    blank: int = 0
    invalid: int = 0


def read_pieces(
    sources: Sequence[Source], *, field: str, share: float, skip_invalid: bool = False, tally: Tally | None = None
) -> Iterator[Piece]:
    """All pieces of all sources.

    A row of a file without a side of its own is held out where the hash of its text falls below ``share``, so that
    equal texts share a side; the very last row of the last source goes to a side that is empty until then.

    Raises:
        ValueError: for text that cannot be read, naming the file and the line; with ``skip_invalid`` rows that hold no
            text are counted and left out instead.
    """
    tally = Tally() if tally is None else tally
    for source in sources:
        for piece in _source_pieces(source, field, share, skip_invalid, tally, source is sources[-1]):
            if piece.first:
                setattr(tally, piece.side, getattr(tally, piece.side) + 1)
            yield piece


def _source_pieces(source: Source, field: str, share: float, skip: bool, tally: Tally, final: bool) -> Iterator[Piece]:
    if source.kind == "python":
        from diff_transformer.data.python_library import load_python_library

        corpus = load_python_library()
        for side, documents in (("train", corpus.train), ("validation", corpus.validation)):
            for document in documents:
                yield from _counted(document_pieces([document.text], side), document.num_bytes, tally)
    elif source.kind == "hub":
        yield from _row_pieces(hub_rows(source.name, field), None, share, skip, tally, final)
    elif source.kind == "tar":
        yield from _tar_pieces(source, share, tally)
    else:
        root = Path(source.name)
        for item in source.items:
            path = root / item.name if root.is_dir() else root
            last = final and item is source.items[-1]
            if item.kind == "text":
                with path.open("rb") as stream:
                    yield from _text_pieces(stream, item, str(path), share, tally)
            else:
                rows = json_lines(path, field) if item.kind == "lines" else parquet(path, field)
                yield from _row_pieces(rows, item.side, share, skip, tally, last)


def _text_pieces(stream: BinaryIO, item: Item, name: str, share: float, tally: Tally) -> Iterator[Piece]:
    parts = decoded(stream, name)
    pieces = tail_pieces(parts, item.size, share) if item.side == TAIL else document_pieces(parts, item.side or "train")
    yield from _counted(pieces, item.size, tally)


def _counted(pieces: Iterable[Piece], size: int, tally: Tally) -> Iterator[Piece]:
    """The pieces of a document of ``size`` bytes, with what was read for them; a document without one is blank."""
    done, empty = 0, True
    for piece in pieces:
        empty, now = False, min(size, done + len(piece.text.encode()))
        yield piece._replace(read=now - done)
        done = now
    tally.blank += empty


def _tar_pieces(source: Source, share: float, tally: Tally) -> Iterator[Piece]:
    """The members as they come. Nothing is written to the disk, and links are not followed."""
    wanted, done = {item.name: item for item in source.items}, 0
    with open(source.name, "rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as archive:
        for member in archive:
            item = wanted.get(member.name)
            stream = archive.extractfile(member) if item is not None and member.isfile() else None
            if item is None or stream is None:
                continue
            for piece in _text_pieces(cast(BinaryIO, stream), item, f"{member.name} in {source.name}", share, tally):
                now = raw.tell()
                yield piece._replace(read=now - done)
                done = now


def _row_pieces(
    rows: Records, side: str | None, share: float, skip: bool, tally: Tally, final: bool
) -> Iterator[Piece]:
    done = 0
    for (text, position), last in _with_last(_texts(rows, skip, tally)):
        chosen = side or ("validation" if hash_of_name(text) < share else "train")
        if side is None and final and last and tally.train + tally.validation:
            chosen = "validation" if not tally.validation else "train" if not tally.train else chosen
        for piece in document_pieces([text], chosen):
            yield piece._replace(read=position - done)
            done = position


def _texts(rows: Records, skip: bool, tally: Tally) -> Iterator[tuple[str, int]]:
    for text, position in rows:
        if isinstance(text, Invalid):
            if not skip:
                raise ValueError(f"{text}; or leave such rows out (--skip-invalid)")
            tally.invalid += 1
        elif str(text).strip():
            yield str(text), position
        else:
            tally.blank += 1


def _with_last(items: Iterable) -> Iterator[tuple[Any, bool]]:
    iterator = iter(items)
    for previous in iterator:
        for item in iterator:
            yield (previous, False)
            previous = item
        yield (previous, True)


def hub_rows(name: str, field: str) -> Records:
    """The texts of a data set on the Hugging Face hub, streamed: never as a whole on this machine.

    Raises:
        ValueError: without ``datasets``, or where the set cannot be reached.
    """
    repository, options = hub_query(name)
    try:
        import datasets
    except ImportError:
        raise ValueError(f"reading {name} needs `pip install datasets`; or give the text as local files") from None
    number = 0
    try:
        rows = cast(Any, datasets).load_dataset(
            repository,
            options.get("config"),
            split=options.get("split", "train"),
            revision=options.get("revision"),
            streaming=True,
        )
        for number, row in enumerate(rows, start=1):
            yield text_of(row, field, f"{name}, row {number}"), 0
    except Exception as error:  # what it raises without a network depends on its version and on where it fails
        reason = (str(error) or "no reason given").splitlines()[0]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ValueError(
            f"{name} cannot be streamed after row {number}{offline} ({type(error).__name__}: {reason}); connect this "
            "machine and go on with --resume, or give the text as local files"
        ) from error
