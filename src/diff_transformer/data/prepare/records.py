"""Texts that come as the rows of a file: JSON lines, plain or compressed, and parquet."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

MAX_RECORD_BYTES = 1 << 28
JSON_LINES = (".jsonl", ".ndjson")
_PARQUET_ROWS = 256

Records = Iterator[tuple[object, int]]  # (the row's text, bytes of input read so far)


class Invalid(ValueError):
    """A row that holds no text: it may be left out, if the user says so."""


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
JSON_SUFFIXES = tuple(kind + packed for kind in JSON_LINES for packed in ("", *UNPACK))


def json_lines(path: Path, field: str) -> Records:
    """The text of each line. A line that is no object with a text under ``field`` gives an ``Invalid`` in its place.

    Raises:
        ValueError: for a file that is not what its name says, or a line of more than 256 MiB.
    """
    import io

    with path.open("rb") as raw:
        unpack = UNPACK.get(path.suffix.lower())
        stream = io.BufferedReader(unpack(raw), 1 << 20) if unpack else raw
        number = 0
        while True:
            try:
                line = stream.readline(MAX_RECORD_BYTES + 1)
            except Exception as error:  # each library of compression has errors of its own
                raise ValueError(f"{path} cannot be unpacked after line {number} ({error})") from error
            if not line:
                return
            number += 1
            if len(line) > MAX_RECORD_BYTES:
                raise ValueError(f"{path}, line {number} has more than {MAX_RECORD_BYTES >> 20} MiB; divide it")
            if line.strip():
                yield _text_of_line(line, field, f"{path}, line {number}"), raw.tell()


def _text_of_line(line: bytes, field: str, place: str) -> object:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return Invalid(f"{place} is not JSON in UTF-8 ({error})")
    if not isinstance(row, dict):
        return Invalid(f"{place} holds a {type(row).__name__}, not an object")
    return text_of(row, field, place)


def text_of(row: dict, field: str, place: str) -> object:
    """The text under ``field``, or an ``Invalid`` that says what is there instead."""
    if field not in row:
        return Invalid(f"{place} has no field {field!r} but {', '.join(map(repr, row)) or 'none'}; give --field")
    if not isinstance(row[field], str):
        return Invalid(f"{place}: {field!r} holds a {type(row[field]).__name__}, not a text; give --field")
    try:
        row[field].encode()
    except UnicodeEncodeError:
        return Invalid(f"{place}: {field!r} holds half of a surrogate pair, which is no Unicode text")
    return row[field]


def parquet(path: Path, field: str) -> Records:
    """The text of each row of the column ``field``, read a few hundred rows at a time.

    Raises:
        ValueError: without ``pyarrow``, or for a file that cannot be read or has no such column.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError("reading .parquet files needs `pip install pyarrow`; or convert them to JSON lines") from None
    size, done = path.stat().st_size, 0
    try:
        with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            if field not in names:
                raise ValueError(f"{path} has no column {field!r} but {', '.join(map(repr, names))}; give --field")
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[field], use_threads=False):
                for value in batch.column(0):
                    done += 1
                    yield text_of({field: value.as_py()}, field, f"{path}, row {done}"), size * done // rows
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet after row {done} ({error})") from error
