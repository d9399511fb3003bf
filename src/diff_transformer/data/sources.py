"""The texts of files, folders, data sets and the Python library, one after another, each on its side of the split."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

from diff_transformer.checks import first_line, require_regular
from diff_transformer.data.documents import (
    ARCHIVE_SUFFIXES,
    TEXT_SUFFIXES,
    VALIDATION_FOLDERS,
    Document,
    decoded,
    hash_of_name,
    held_out_split,
    without_common_folders,
)
from diff_transformer.errors import UserError

SPLITS = ("train", "validation")
PACKED = ("", ".gz", ".zst", ".bz2", ".xz")
JSON_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".ndjson") for packed in PACKED)
HUB_OPTIONS = ("config", "split", "revision")
ACCEPTED = (
    "'python', a text file, JSON lines (.jsonl, also .gz, .zst, .bz2, .xz), a .parquet file, a folder of these, or "
    "hub:NAME[?config=...&split=...&revision=...]"
)
_PARQUET_ROWS = 256


@dataclass(frozen=True)
class Source:
    """One file, one data set of the hub, or the Python library."""

    path: str  # absolute; or hub:NAME, or "python"
    kind: str  # "text", "lines" (JSON lines), "parquet", "hub", "python"
    size: int = 0  # bytes; 0 if unknown
    split: str | None = None  # "train", "validation", "tail" (its end is held out), or None: each row decides

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_sources(names: Sequence[str], share: float) -> list[Source]:
    """The files below these names, each with its side of the split into training and validation.

    Folders ``train/`` and ``val/`` (``valid/``, ``validation/``) are the split, and other files beside them are not
    read. Otherwise about ``share`` of the text files, at least one of several, is held out by a hash of their names; of
    a single text, the end. Rows of JSON lines, parquet and data sets are held out one by one, by a hash of their text.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for no source, or one that holds nothing that is read.
    """
    if not names:
        raise UserError(f"no source of text; give {ACCEPTED}")
    found = [source for name in names for source in _find(name)]
    undecided = [i for i, source in enumerate(found) if source.kind == "text" and source.split is None]
    if len(found) == len(undecided) == 1:
        return [replace(found[0], split="tail")]
    paths = without_common_folders([found[i].path for i in undecided])
    documents = [Document(path, "") for path, i in zip(paths, undecided, strict=True) if found[i].size]
    held_out = {x.name for x in held_out_split(documents, share)[1]} if len({x.name for x in documents}) > 1 else set()
    for path, i in zip(paths, undecided, strict=True):
        found[i] = replace(found[i], split="validation" if path in held_out else "train")
    return found


def _find(name: str) -> list[Source]:
    if name == "python":
        return [Source(name, "python")]
    if name.startswith("hub:"):
        hub_query(name)
        return [Source(name, "hub")]
    path = Path(name).absolute()
    if not path.exists():
        raise UserError(f"source {name!r} does not exist; give {ACCEPTED}")
    require_regular(path)
    if path.name.lower().endswith(ARCHIVE_SUFFIXES):
        raise UserError(f"source {name!r} is an archive; unpack it (tar xf {name}) and give the folder")
    if path.is_dir():
        found = with_folder_splits(path, [(p, kind) for p in files_of(path) if (kind := kind_of(p.name))])
    else:
        kind = kind_of(path.name) or ("text" if not path.suffix else None)
        found = [Source(str(path), kind, path.stat().st_size)] if kind else []
    if not found:
        raise UserError(f"source {name!r} holds nothing that is read; give {ACCEPTED}")
    return found


def files_of(root: Path) -> Iterator[Path]:
    """The files below a folder in the order of their names, without hidden ones.

    Raises:
        ValueError: for a pipe or a device among them.
    """
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(folder) / name
                if kind_of(name):
                    require_regular(path)
                yield path


def kind_of(name: str) -> str | None:
    """How a file with this name is read, or None if it is not."""
    name = name.lower()
    if name.endswith(JSON_SUFFIXES):
        return "lines"
    if name.endswith(".parquet"):
        return "parquet"
    return "text" if PurePosixPath(name).suffix in TEXT_SUFFIXES else None


def with_folder_splits(root: Path, files: Sequence[tuple[Path, str]]) -> list[Source]:
    """The sources of a folder; those in ``train/`` and ``val/`` know their split."""
    names = without_common_folders([path.relative_to(root).as_posix() for path, _ in files])
    tops = [name.split("/")[0] if "/" in name else "" for name in names]
    held_out = min(VALIDATION_FOLDERS & {*tops}, default=None)
    splits = {"train": "train", held_out: "validation"} if held_out and "train" in tops else None
    return [
        Source(str(path), kind, path.stat().st_size, None if splits is None else splits[top])
        for (path, kind), top in zip(files, tops, strict=True)
        if splits is None or top in splits
    ]


def hub_query(name: str) -> tuple[str, dict[str, str]]:
    """Repository and options of ``hub:NAME?config=...``."""
    repository, _, query = name.removeprefix("hub:").partition("?")
    options = dict(parse_qsl(query))
    unknown = sorted(set(options) - set(HUB_OPTIONS))
    if unknown or not repository:
        raise UserError(f"source {name!r}: {', '.join(unknown) or 'no name'}; accepted: {', '.join(HUB_OPTIONS)}")
    return repository, options


class Reader:
    """Reads sources as (split, text), and counts what is left out.

    Args:
        field: field of JSON lines, or column, that holds the text.
        share: of the rows, or of the end of a single text, that is held out.
        skip_invalid: count rows without a text instead of stopping.
        part: (part, number of parts) of the rows of a data set of the hub.
        progress: called with the bytes of input that were read since the call before.
    """

    def __init__(
        self,
        field: str,
        share: float,
        skip_invalid: bool,
        part: tuple[int, int] = (0, 1),
        progress: Callable[[int], object] = lambda read: None,
    ):
        self.field, self.share, self.skip_invalid, self.part, self.progress = field, share, skip_invalid, part, progress
        self.left_out: Counter[str] = Counter(blank=0, invalid=0)

    def texts(self, source: Source) -> Iterator[tuple[str, str]]:
        """The texts of a source, with their sides.

        Raises:
            ValueError: for a file that cannot be read or a row without a text; the message names it.
        """
        if source.kind == "python":
            from diff_transformer.data.python_library import load_python_library

            corpus = load_python_library()
            pairs = [(split, d.text) for split in SPLITS for d in getattr(corpus, split)]
        elif source.kind == "text":
            pairs = self._file(source)
            self.progress(source.size)
        else:
            pairs = self._rows(source)
        for split, text in pairs:
            if text.strip():
                yield split, text
            else:
                self.left_out["blank"] += 1

    def _file(self, source: Source) -> list[tuple[str, str]]:
        text = decoded(source.path, Path(source.path).read_bytes())
        if source.split != "tail":
            return [(source.split or "train", text)]
        wanted = round(len(text) * (1 - self.share))
        cut = text.rfind("\n", 0, wanted) + 1 or wanted
        return [("train", text[:cut]), ("validation", text[cut:])]

    def _rows(self, source: Source) -> Iterator[tuple[str, str]]:
        rows = {"lines": self._lines, "parquet": self._parquet, "hub": self._hub}[source.kind](source.path)
        done = 0
        for number, (row, position) in enumerate(rows, start=1):
            reason = self._invalid(row)
            if reason is None:
                text = row[self.field]
                yield source.split or ("validation" if hash_of_name(text) < self.share else "train"), text
            elif self.skip_invalid:
                self.left_out["invalid"] += 1
            else:
                raise UserError(f"{source.path}, row {number} {reason}; or leave such rows out (--skip-invalid)")
            self.progress(position - done)
            done = position

    def _invalid(self, row: Any) -> str | None:
        """The reason why a row is no text, or None."""
        if isinstance(row, ValueError):
            return f"is not JSON in UTF-8 ({row})"
        if not isinstance(row, dict):
            return f"holds a {type(row).__name__}, not an object"
        if self.field not in row:
            return f"has no field {self.field!r} but {', '.join(map(repr, row)) or 'none'}; give --field"
        text = row[self.field]
        if not isinstance(text, str):
            return f"has a {type(text).__name__} in {self.field!r}, not a text; give --field"
        return None if text.isascii() or _is_unicode(text) else "holds half of a surrogate pair"

    def _lines(self, path: str) -> Iterator[tuple[Any, int]]:
        with open(path, "rb") as raw:
            lines, number = iter(_unpacked(raw, Path(path).suffix.lower())), 0
            while True:
                try:
                    line = next(lines, None)
                except Exception as error:  # each compression library raises its own errors
                    raise UserError(f"{path} cannot be unpacked after line {number} ({error})") from error
                if line is None:
                    return
                number += 1
                if line.strip():
                    yield _parsed(line), raw.tell()

    def _parquet(self, path: str) -> Iterator[tuple[Any, int]]:
        try:
            import pyarrow
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise UserError("reading .parquet needs pyarrow; pip install 'diff-transformer[data]'") from None
        size, done = os.path.getsize(path), 0
        try:
            with ParquetFile(path) as file:
                columns = [self.field] if self.field in file.schema_arrow.names else None
                for batch in file.iter_batches(_PARQUET_ROWS, columns=columns):
                    for row in batch.to_pylist():
                        done += 1
                        yield row, size * done // file.metadata.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path} cannot be read as parquet after row {done} ({error})") from error

    def _hub(self, name: str) -> Iterator[tuple[Any, int]]:
        repository, options = hub_query(name)
        try:
            import datasets
        except ImportError:
            raise UserError(f"reading {name} needs datasets; pip install 'diff-transformer[hub]'") from None
        number = 0
        try:
            rows: Any = datasets.load_dataset(
                repository, options.get("config"), split=options.get("split", "train"), streaming=True,
                revision=options.get("revision"),
            )  # fmt: skip
            for number, row in enumerate(rows):
                if number % self.part[1] == self.part[0]:
                    yield row, 0
        except Exception as error:  # the type depends on the library's version and on where it fails
            raise UserError(
                f"{name} cannot be streamed after row {number} ({type(error).__name__}: {first_line(error)}); connect "
                "this machine and continue with --resume, or give the text as local files"
            ) from error


def _unpacked(raw: BinaryIO, suffix: str) -> Any:
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UserError("reading .zst needs zstandard; pip install 'diff-transformer[data]'") from None
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), 1 << 20)
    opened = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix)
    return raw if opened is None else opened(raw)


def _parsed(line: bytes) -> Any:
    """The value of a line of JSON, or the error."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return ValueError(first_line(error))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
