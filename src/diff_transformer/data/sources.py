"""Texts of files, folders, data sets of the hub and the Python library, each on its side of the split."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeGuard
from urllib.parse import parse_qsl

from diff_transformer.checks import first_line, require_extra
from diff_transformer.data.documents import hash_of_name, held_out_groups
from diff_transformer.errors import UserError

SPLITS = ("train", "validation")
TEXT_SUFFIXES = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".py", ".pyi", ".c", ".h", ".cc", ".cpp",
    ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh", ".sql",
)  # fmt: skip
KINDS = {**dict.fromkeys(TEXT_SUFFIXES, "text"), ".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
PACKED_SUFFIXES = (".gz", ".zst")
ARCHIVE = re.compile(r"\.(tar(\.\w+)?|tgz|txz|zip|7z)$")  # ends of names
VALIDATION_FOLDERS = frozenset({"val", "valid", "validation"})
_SHOWN = 80  # characters of a bad row
HUB_OPTIONS = ("config", "split", "revision")
ACCEPTED = (
    "'python', a text file, JSON lines (.jsonl), a .parquet file, a folder of these, or "
    "hub:NAME[?config=...&split=...&revision=...]; text and JSON lines may be compressed (.gz, .zst)"
)


@dataclass(frozen=True)
class Source:
    """One file, one data set of the hub, or the Python library."""

    path: str  # absolute; or hub:NAME, or "python"
    kind: str  # "text", "lines" (JSON lines), "parquet", "hub", "python"
    size: int = 0  # bytes; 0 if unknown
    split: str | None = None  # "train", "validation", "tail" (its end is held out), or None: each row decides


def find_sources(names: Sequence[str], share: float) -> list[Source]:
    """The files below these names, each with its side of the split into training and validation.

    Folders ``train/`` and ``val/`` (``valid/``, ``validation/``) are the split, and other files beside them are not
    read. Otherwise about ``share`` of the text files, at least one of several, is held out by a hash of their names; of
    a single text, the end. Rows of JSON lines, parquet and data sets are held out one by one, by a hash of their text.

    Raises:
        UserError: for no source, a path that does not exist, or one that holds nothing that is read.
    """
    if not names:
        raise UserError(f"no source of text; give {ACCEPTED}")
    sources = [source for name in names for source in _find(name)]
    undecided = [i for i, source in enumerate(sources) if source.kind == "text" and source.split is None]
    paths = without_common_folders([sources[i].path for i in undecided])
    filled = {path for path, i in zip(paths, undecided, strict=True) if sources[i].size}
    if len(sources) == len(undecided) and len(filled) < 2:
        return [replace(source, split="tail") for source in sources]
    held_out = held_out_groups(filled, share) if len(filled) > 1 else set()
    for path, i in zip(paths, undecided, strict=True):
        sources[i] = replace(sources[i], split="validation" if path in held_out else "train")
    return sources


def _find(name: str) -> list[Source]:
    if name == "python":
        return [Source(name, "python")]
    if name.startswith("hub:"):
        hub_query(name)
        return [Source(name, "hub")]
    path = Path(name).expanduser().absolute()
    if not path.exists():
        advice = "a URL: download it, and give the file" if "://" in name else f"no file or folder; give {ACCEPTED}"
        raise UserError(f"source {name!r} is {advice}")
    if path.is_dir():
        sources = _files_below(path)
    elif ARCHIVE.search(path.name.lower()):
        raise UserError(f"source {name!r} is an archive; unpack it and give the folder")
    else:
        kind = KINDS.get(suffix_of(path)) or (None if suffix_of(path) else "text")
        sources = [Source(str(path), kind, path.stat().st_size)] if kind and path.is_file() else []
    if not sources:
        raise UserError(f"source {name!r} has no file that can be read; give {ACCEPTED}")
    return sources


def suffix_of(path: Path) -> str:
    """The suffix of a file's name in lower case, without that of its compression."""
    packed = path.suffix.lower() in PACKED_SUFFIXES
    return (Path(path.stem) if packed else path).suffix.lower()


def _files_below(root: Path) -> list[Source]:
    """The files below a folder in the order of their names, without hidden ones; those in ``train/`` and ``val/`` know
    their split. A link to a folder is followed, unless that folder holds it."""
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root, followlinks=True):
        here = Path(folder).resolve()
        inside = (name for name in subfolders if not here.is_relative_to(Path(folder, name).resolve()))
        subfolders[:] = sorted(name for name in inside if not name.startswith("."))
        paths += (Path(folder, name) for name in sorted(names) if not name.startswith("."))
    paths = [path for path in paths if suffix_of(path) in KINDS and path.is_file()]
    names = without_common_folders([path.relative_to(root).as_posix() for path in paths])
    tops = [name.split("/")[0] if "/" in name else "" for name in names]
    held_out = min(VALIDATION_FOLDERS & {*tops}, default=None)
    splits = {"train": "train", held_out: "validation"} if held_out and "train" in tops else None
    return [
        Source(str(path), KINDS[suffix_of(path)], path.stat().st_size, None if splits is None else splits[top])
        for path, top in zip(paths, tops, strict=True)
        if splits is None or top in splits
    ]


def without_common_folders(names: Sequence[str]) -> list[str]:
    """``names`` without the leading folders that all of them share; ``train/`` and ``val/`` stay."""
    split = [PurePosixPath(name).parts for name in names]
    depth = 0
    while all(len(parts) > depth + 1 for parts in split) and len({parts[depth] for parts in split}) == 1:
        if split[0][depth] in {"train", *VALIDATION_FOLDERS}:
            break
        depth += 1
    return ["/".join(parts[depth:]) for parts in split]


def hub_query(name: str) -> tuple[str, dict[str, str]]:
    """Repository and options of ``hub:NAME?config=...``."""
    repository, _, query = name.removeprefix("hub:").partition("?")
    options = dict(parse_qsl(query))
    unknown = sorted(set(options) - set(HUB_OPTIONS))
    if unknown or not repository:
        raise UserError(f"source {name!r}: {', '.join(unknown) or 'no name'}; accepted: {', '.join(HUB_OPTIONS)}")
    return repository, options


class Reader:
    """Reads sources as (split, text), and counts the texts that it leaves out.

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
        skip_invalid: bool = False,
        part: tuple[int, int] = (0, 1),
        progress: Callable[[int], object] = lambda read: None,
    ):
        self.field, self.share, self.skip_invalid, self.part, self.progress = field, share, skip_invalid, part, progress
        self.left_out: Counter[str] = Counter(blank=0, invalid=0)

    def texts(self, source: Source) -> Iterator[tuple[str, str]]:
        """The texts of a source, with their sides.

        Raises:
            UserError: for a file that cannot be read or a row without a text; the message names it.
        """
        if source.kind == "python":
            from diff_transformer.data.python_library import load_python_library

            corpus = load_python_library()
            pairs = ((split, d.text) for split in SPLITS for d in getattr(corpus, split))
        else:
            pairs = self._file(source) if source.kind == "text" else self._rows(source)
        for split, text in pairs:
            if text.strip():
                yield split, text
            else:
                self.left_out["blank"] += 1

    def _file(self, source: Source) -> Iterator[tuple[str, str]]:
        text = read_text(Path(source.path))
        self.progress(source.size)
        if source.split != "tail":
            yield source.split or "train", text
            return
        wanted = round(len(text) * (1 - self.share))
        cut = text.rfind("\n", wanted // 2, wanted) + 1 or wanted  # of a long line, not where it begins
        yield from (("train", text[:cut]), ("validation", text[cut:]))

    def _rows(self, source: Source) -> Iterator[tuple[str, str]]:
        rows = self._lines(source.path) if source.kind == "lines" else self._dataset(source)
        number = done = 0
        try:
            for number, (row, position) in enumerate(rows, start=1):
                text = row.get(self.field) if isinstance(row, dict) else None
                if _is_text(text):
                    yield source.split or ("validation" if hash_of_name(text) < self.share else "train"), text
                elif self.skip_invalid:
                    self.left_out["invalid"] += 1
                else:
                    raise UserError(
                        f"{source.path}, row {number} has no text in {self.field!r}: {repr(row)[:_SHOWN]}; "
                        "`diff-transformer prepare` takes another field (--field) or skips such rows (--skip-invalid)"
                    )
                self.progress(position - done)
                done = position
        except UserError:
            raise
        except Exception as error:  # each library that decompresses or reads has its own
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{source.path} cannot be read after row {number} ({reason})") from error
        self.progress(source.size - done)

    def _lines(self, path: str) -> Iterator[tuple[Any, int]]:
        """The value of each line of JSON, or its error, and the bytes of the file that were read."""
        with open(path, "rb") as raw:
            for line in unpacked(raw, path):
                if line.strip():
                    try:
                        yield json.loads(line.decode("utf-8-sig")), raw.tell()
                    except (ValueError, RecursionError) as error:
                        yield error, raw.tell()

    def _dataset(self, source: Source) -> Iterator[tuple[Any, int]]:
        """The rows of a parquet file or of a data set of the hub, streamed."""
        require_extra("data", f"reading {source.path}", "datasets")
        import datasets
        from datasets.distributed import split_dataset_by_node

        if source.kind == "parquet":
            rows: Any = datasets.load_dataset("parquet", data_files=source.path, split="train", streaming=True)
        else:
            repository, options = hub_query(source.path)
            rows = datasets.load_dataset(
                repository, options.get("config"), split=options.get("split", "train"),
                revision=options.get("revision"), streaming=True,
            )  # fmt: skip
            rows = split_dataset_by_node(rows, *self.part)
        for row in rows:
            yield row, 0


def read_text(path: Path) -> str:
    """The text of a file, decompressed, without a byte order mark, CRLF replaced by LF.

    Raises:
        UserError: for a file that cannot be read or is not UTF-8.
    """
    try:
        with path.open("rb") as raw:
            data = unpacked(raw, str(path)).read()
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.start}: {error.object[error.start]:#04x}); convert it with "
            "`iconv -f ITS-ENCODING -t utf-8`, or take it out"
        ) from None
    except Exception as error:  # each compression library raises its own errors
        raise UserError(f"{path} cannot be read ({first_line(error)})") from error


def unpacked(raw: BinaryIO, path: str) -> Any:
    """The content of a file, decompressed by the ending of its name."""
    suffix = Path(path).suffix.lower()
    if suffix == ".zst":
        require_extra("data", f"reading {path}", "zstandard")
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), 1 << 20)
    return gzip.open(raw) if suffix == ".gz" else raw


def _is_text(value: Any) -> TypeGuard[str]:
    """True for a string that UTF-8 can encode: one without half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
