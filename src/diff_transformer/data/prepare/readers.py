"""From sources to the stream of pieces that is tokenised: the same pieces in the same order every time.

Texts come from text files, tar archives, the Python library, or the rows of JSON lines, parquet and hub data sets.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from diff_transformer.checks import first_line, require_extra
from diff_transformer.data.documents import archive_members, hash_of_name
from diff_transformer.data.prepare.pieces import Piece, decoded, document_pieces, tail_pieces, with_unix_lines
from diff_transformer.data.prepare.sources import TAIL, SourceFile, TextSource, hub_query, is_url

MAX_RECORD_BYTES = 1 << 28
_PARQUET_ROWS = 256

TextRows = Iterator[tuple[object, int]]  # (the row's text, bytes of input read so far)


class Invalid(ValueError):
    """The error of a row without a text, yielded in place of the text. The user may choose to skip such rows."""


@dataclass
class Tally:
    """The number of documents that the stream held so far, by split, and of rows that were left out."""

    train: int = 0
    validation: int = 0
    blank: int = 0
    invalid: int = 0


def read_pieces(
    sources: Sequence[TextSource], *, field: str, share: float, skip_invalid: bool = False, tally: Tally | None = None
) -> Iterator[Piece]:
    """All pieces of all sources.

    A row of a file without a split is held out if the hash of its text is below ``share``, so that equal texts are on
    the same split. The last row of the last source goes to a split that is still empty.

    Args:
        field: the field or column that holds the text of a row.
        skip_invalid: count rows without a text in ``tally`` instead of raising.
        tally: counts what the stream holds.

    Raises:
        ValueError: for text that cannot be read, naming the file and the line.
    """
    reader = Reader(field, share, skip_invalid, Tally() if tally is None else tally)
    for source in sources:
        yield from reader.pieces(source, final=source is sources[-1])


@dataclass
class Reader:
    """The pieces of one source after the other; the fields are the arguments of ``read_pieces``."""

    field: str
    share: float
    skip_invalid: bool
    tally: Tally

    def pieces(self, source: TextSource, *, final: bool = False) -> Iterator[Piece]:
        """The pieces of ``source``; if it is ``final``, its last row goes to a split that is still empty."""
        for piece in self._pieces(source, final=final):
            if piece.first:
                setattr(self.tally, piece.split, getattr(self.tally, piece.split) + 1)
            yield piece

    def _pieces(self, source: TextSource, *, final: bool) -> Iterator[Piece]:
        if source.kind == "python":
            from diff_transformer.data.python_library import load_python_library

            corpus = load_python_library()
            for split, documents in (("train", corpus.train), ("validation", corpus.validation)):
                for document in documents:
                    yield from self._counted(document_pieces([document.text], split), document.num_bytes)
        elif source.kind == "hub":
            part = () if source.part is None else (source.part,)
            yield from self._rows(streamed_rows(source.name, self.field, *part), None, final=final)
        elif source.kind == "tar":
            yield from self._archive(source)
        else:
            for item in source.items:
                place = source.location(item)
                with opened(place) as stream:
                    if item.kind == "text":
                        yield from self._text(stream, item, place)
                    else:
                        rows = _ROWS[item.kind](stream, place, self.field)
                        yield from self._rows(rows, item.split, final=final and item is source.items[-1])

    def _archive(self, source: TextSource) -> Iterator[Piece]:
        """The members of a tar archive in their order. Nothing is written to the disk; links are not followed."""
        wanted, done = {item.member: item for item in source.items}, 0
        with open(source.name, "rb") as raw, tarfile.open(fileobj=raw, mode="r|*") as archive:
            for place, member in enumerate(archive_members(archive)):
                item = wanted.get(place)
                stream = archive.extractfile(member) if item is not None and member.isfile() else None
                if item is None or stream is None:
                    continue
                for piece in self._text(cast(BinaryIO, stream), item, f"{member.name} in {source.name}"):
                    now = raw.tell()
                    yield piece._replace(read=now - done)
                    done = now

    def _text(self, stream: BinaryIO, item: SourceFile, name: str) -> Iterator[Piece]:
        parts = decoded(stream, name)
        if item.split == TAIL:
            pieces = tail_pieces(parts, item.size, self.share)
        else:
            pieces = document_pieces(with_unix_lines(parts), item.split or "train")
        yield from self._counted(pieces, item.size)

    def _counted(self, pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
        """Set ``read`` of the pieces of a document of ``size`` bytes; count a document without pieces as blank."""
        done, empty = 0, True
        for piece in pieces:
            empty, now = False, min(size, done + len(piece.text.encode()))
            yield piece._replace(read=now - done)
            done = now
        self.tally.blank += empty

    def _rows(self, rows: TextRows, split: str | None, *, final: bool) -> Iterator[Piece]:
        done, tally = 0, self.tally
        for (text, position), last in _with_last(self._texts(rows)):
            chosen = split or ("validation" if hash_of_name(text) < self.share else "train")
            if split is None and final and last and tally.train + tally.validation:
                chosen = "validation" if not tally.validation else "train" if not tally.train else chosen
            for piece in document_pieces([text], chosen):
                yield piece._replace(read=position - done)
                done = position

    def _texts(self, rows: TextRows) -> Iterator[tuple[str, int]]:
        for text, position in rows:
            if isinstance(text, Invalid):
                if not self.skip_invalid:
                    raise ValueError(f"{text}; or leave such rows out (--skip-invalid)")
                self.tally.invalid += 1
            elif str(text).strip():
                yield str(text), position
            else:
                self.tally.blank += 1


def _with_last(items: Iterable) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether it is the last one."""
    iterator = iter(items)
    for previous in iterator:
        for item in iterator:
            yield (previous, False)
            previous = item
        yield (previous, True)


def opened(place: str) -> BinaryIO:
    """The file at a path or URL, to read; raises ValueError for a URL that cannot be opened."""
    if not is_url(place):
        return open(place, "rb")
    import fsspec

    try:
        return cast(BinaryIO, fsspec.open(place, "rb").open())
    except Exception as error:  # each file system raises its own errors
        raise ValueError(f"{place} cannot be opened ({first_line(error)}); check access to it") from error


def streamed_rows(name: str, field: str, part: tuple[int, int] | None = None) -> TextRows:
    """The texts of a data set on the Hugging Face hub, streamed: it is never stored as a whole.

    Args:
        part: (part, number of parts) to read: whole files where there are as many, else every so-many-th row.

    Raises:
        ValueError: if ``datasets`` is not installed or the set cannot be reached.
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
        if part is not None:
            rows = _part_of(rows, *part)
        for number, row in enumerate(rows, start=1):
            yield text_of(row, field, f"{name}, row {number}"), 0
    except Exception as error:  # the type depends on the library's version and on where it fails
        reason = (str(error) or "no reason given").splitlines()[0]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ValueError(
            f"{name} cannot be streamed after row {number}{offline} ({type(error).__name__}: {reason}); connect this "
            "machine and continue with --resume, or give the text as local files"
        ) from error


def _part_of(rows: Any, part: int, parts: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    if rows.num_shards >= parts:
        return rows.shard(num_shards=parts, index=part)
    return split_dataset_by_node(rows, rank=part, world_size=parts)


def _zstd(raw: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise ValueError("reading .zst files needs `pip install zstandard`; or unpack them") from None
    return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))


UNPACK: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".zst": _zstd,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


def json_lines(raw: BinaryIO, name: str, field: str) -> TextRows:
    """The text under ``field`` of each line, or an ``Invalid`` for a line that is not an object with such a text.

    Raises:
        ValueError: for a file that is not in the format of its name, or a line of more than 256 MiB.
    """
    unpack = UNPACK.get(Path(name).suffix.lower())
    stream = io.BufferedReader(unpack(raw), 1 << 20) if unpack else raw
    number = 0
    while True:
        try:
            line = stream.readline(MAX_RECORD_BYTES + 1)
        except Exception as error:  # each compression library raises its own errors
            raise ValueError(f"{name} cannot be unpacked after line {number} ({error})") from error
        if not line:
            return
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            raise ValueError(f"{name}, line {number} has more than {MAX_RECORD_BYTES >> 20} MiB; divide it")
        if line.strip():
            yield _text_of_line(line, field, f"{name}, line {number}"), raw.tell()


def _text_of_line(line: bytes, field: str, place: str) -> object:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return Invalid(f"{place} is not JSON in UTF-8 ({error})")
    if not isinstance(row, dict):
        return Invalid(f"{place} holds a {type(row).__name__}, not an object")
    return text_of(row, field, place)


def text_of(row: dict, field: str, place: str) -> object:
    """The text under ``field``, or an ``Invalid`` that says what the row holds instead."""
    if field not in row:
        return Invalid(f"{place} has no field {field!r} but {', '.join(map(repr, row)) or 'none'}; give --field")
    if not isinstance(row[field], str):
        return Invalid(f"{place}: {field!r} holds a {type(row[field]).__name__}, not a text; give --field")
    try:
        row[field].encode()
    except UnicodeEncodeError:
        return Invalid(f"{place}: {field!r} holds half of a surrogate pair, which is no Unicode text")
    return row[field]


def parquet(stream: BinaryIO, name: str, field: str) -> TextRows:
    """The text of each row in the column ``field``; reads a few hundred rows at a time.

    Raises:
        ValueError: if ``pyarrow`` is not installed, or the file cannot be read or has no such column.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError("reading .parquet files needs `pip install pyarrow`; or convert them to JSON lines") from None
    size, done = stream.seek(0, io.SEEK_END), 0
    try:
        with ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            if field not in names:
                raise ValueError(f"{name} has no column {field!r} but {', '.join(map(repr, names))}; give --field")
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[field], use_threads=False):
                for value in batch.column(0):
                    done += 1
                    yield text_of({field: value.as_py()}, field, f"{name}, row {done}"), size * done // rows
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} cannot be read as parquet after row {done} ({error})") from error


def warc(stream: BinaryIO, name: str, _field: str) -> TextRows:
    """The text of each page of a WARC file: of .warc.wet as it is, else extracted from the HTML by Trafilatura.

    Raises:
        RuntimeError: if the extra ``datatrove`` is not installed.
        ValueError: for a file that cannot be read.
    """
    require_extra("datatrove", "reading WARC files", "datatrove", "lxml_html_clean", "magic", "warcio")
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.readers.warc import process_record
    from warcio.archiveiterator import ArchiveIterator

    # deduplicate=True would drop what other files in the same process repeat
    extract = str if ".warc.wet" in name.lower() else Trafilatura(deduplicate=False).extract
    number = 0
    try:
        for record in ArchiveIterator(stream):
            page = process_record(record)
            number += 1
            if page:
                yield extract(page["text"]) or "", stream.tell()
    except Exception as error:  # warcio and the extractor raise their own errors
        raise ValueError(f"{name} cannot be read as WARC after record {number} ({first_line(error)})") from error


_ROWS = {"lines": json_lines, "parquet": parquet, "warc": warc}
