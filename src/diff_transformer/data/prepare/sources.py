"""What a user may name as a source of text, and the files and documents in it, before any of it is read."""

import hashlib
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qsl

from diff_transformer.data.documents import (
    ARCHIVE_SUFFIXES,
    JSON_SUFFIXES,
    TEXT_SUFFIXES,
    VALIDATION_FOLDERS,
    Document,
    held_out_split,
    without_common_folders,
)

ACCEPTED = (
    "'python', a text file, JSON lines (.jsonl, .jsonl.gz, .jsonl.zst), a .parquet file, a folder of these, "
    "a tar archive of text files, or hub:NAME[?config=...&split=...&revision=...]"
)
HUB_OPTIONS = ("config", "split", "revision")
TAIL = "tail"  # the side of a text that is all there is: its end is the validation side


@dataclass(frozen=True)
class SourceFile:
    """A file. ``side``: "train" or "validation" where the name decides, "tail", or None where each row decides."""

    name: str
    kind: str  # "text", "lines", "parquet"
    size: int
    side: str | None = None


@dataclass(frozen=True)
class TextSource:
    """``name``: as given, a path made absolute; ``kind``: "files", "tar", "python", "hub"; ``size``: bytes to read, 0
    where nobody knows."""

    name: str
    kind: str
    items: tuple[SourceFile, ...] = ()
    size: int = 0

    def description(self) -> dict:
        """What must be the same when an interrupted preparation goes on: names and sizes, by their hash."""
        listed = json.dumps([[item.name, item.size] for item in self.items])
        return {
            "source": self.name,
            "files": len(self.items),
            "bytes": self.size,
            "fingerprint": hashlib.blake2b(listed.encode(), digest_size=8).hexdigest(),
        }


def find_sources(names: Sequence[str], share: float) -> list[TextSource]:
    """The sources of these names, with the side of every file that has one.

    Where a source has folders ``train/`` and ``val/`` (or ``valid/``, ``validation/``), they are the split and nothing
    beside them is read; else about ``share`` of its text files, where it has several, is held out by a hash of their
    names, at least one. Rows of files are held out one by one. Where that holds out nothing, as with text files that
    are given one by one, the text files of all sources are divided together, by their paths without the folders that
    all begin with. The end of a text is held out where there is nothing else.

    Raises:
        FileNotFoundError: for a path that is not there.
        ValueError: for no source, one that holds nothing to read, another kind of file, or a side that would be empty.
    """
    if not names:
        raise ValueError(f"no source of text; give {ACCEPTED}")
    found = [_find(name) for name in names]
    if len(found) == 1 and [item.kind for item in found[0].items] == ["text"]:
        return [replace(found[0], items=(replace(found[0].items[0], side=TAIL),))]
    sided = [_with_sides(source, share) for source in found]
    items = [item for source in sided for item in source.items]
    rows = any(source.kind == "hub" for source in sided) or any(item.side is None for item in items)
    empty = {"train", "validation"} - {item.side for item in items if item.size}
    if rows or not empty:
        return sided
    if any(_own_sides(source) for source in found):
        raise ValueError(f"no file of the {min(empty)} side holds text; put text into folders train/ and val/")
    return _divided_together(sided, share)


def hub_query(name: str) -> tuple[str, dict[str, str]]:
    """Repository and options of ``hub:NAME?config=...``."""
    repository, _, query = name.removeprefix("hub:").partition("?")
    options = dict(parse_qsl(query))
    unknown = sorted(set(options) - set(HUB_OPTIONS))
    if unknown or not repository:
        raise ValueError(f"source {name!r}: {', '.join(unknown) or 'no name'}; accepted: {', '.join(HUB_OPTIONS)}")
    return repository, options


def _find(name: str) -> TextSource:
    if name == "python":
        from diff_transformer.data.python_library import load_python_library

        corpus = load_python_library()
        items = [
            SourceFile(document.name, "text", document.num_bytes, side)
            for side, documents in (("train", corpus.train), ("validation", corpus.validation))
            for document in documents
        ]
        return TextSource(name, "python", tuple(items), sum(item.size for item in items))
    if name.startswith("hub:"):
        hub_query(name)
        return TextSource(name, "hub")
    path = Path(name).absolute()
    if not path.exists():
        raise FileNotFoundError(f"source {name!r} does not exist; give {ACCEPTED}")
    if path.is_dir():
        items = list(_folder(path))
    elif path.name.lower().endswith(ARCHIVE_SUFFIXES):
        return TextSource(str(path), "tar", tuple(_archive(path)), path.stat().st_size)
    else:
        kind = _kind(path.name) or ("text" if not path.suffix else None)
        items = [SourceFile(path.name, kind, path.stat().st_size)] if kind else []
    if not items:
        raise ValueError(f"source {name!r} holds nothing that is read; give {ACCEPTED}")
    return TextSource(str(path), "files", tuple(items), sum(item.size for item in items))


def _kind(name: str) -> str | None:
    name = name.lower()
    if name.endswith(JSON_SUFFIXES):
        return "lines"
    if name.endswith(".parquet"):
        return "parquet"
    return "text" if PurePosixPath(name).suffix in TEXT_SUFFIXES else None


def _folder(root: Path):
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            kind = None if name.startswith(".") else _kind(name)
            if kind:
                yield SourceFile(path.relative_to(root).as_posix(), kind, path.stat().st_size)


def _archive(path: Path):
    """Regular text members of an archive, whose names are read to the end of it."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                hidden = any(part.startswith(".") and part not in (".", "..") for part in member.name.split("/"))
                if member.isfile() and not hidden and _kind(member.name) == "text":
                    yield SourceFile(member.name, "text", member.size)
    except Exception as error:  # tarfile and each library of compression have errors of their own
        raise ValueError(f"{path} cannot be read as a tar archive ({error})") from error


def _with_sides(source: TextSource, share: float) -> TextSource:
    if source.kind in ("python", "hub"):
        return source
    if not source.items:
        raise ValueError(f"source {source.name!r} holds nothing that is read; give {ACCEPTED}")
    own = _own_sides(source)
    if own:
        return replace(source, items=tuple(replace(item, side=side) for item, side in own if side))
    inner = without_common_folders([item.name for item in source.items])
    names = [name for item, name in zip(source.items, inner, strict=True) if item.kind == "text"]
    documents = [Document(name, "") for name in names]
    held_out = {document.name for document in held_out_split(documents, share)[1]} if len(names) > 1 else set()
    sides = {True: "validation", False: "train"}
    items = [
        replace(item, side=sides[name in held_out]) if item.kind == "text" else item
        for item, name in zip(source.items, inner, strict=True)
    ]
    return replace(source, items=tuple(items))


def _own_sides(source: TextSource) -> list[tuple[SourceFile, str | None]]:
    """The items with the sides that folders train/ and val/ give them, None beside these; nothing without such."""
    inner = without_common_folders([item.name for item in source.items])
    tops = {name.split("/")[0] for name in inner if "/" in name}
    if source.kind == "python" or "train" not in tops or not tops & VALIDATION_FOLDERS:
        return []
    folders = {"train": "train", min(tops & VALIDATION_FOLDERS): "validation"}
    return [(item, folders.get(name.split("/")[0])) for item, name in zip(source.items, inner, strict=True)]


def _divided_together(sources: Sequence[TextSource], share: float) -> list[TextSource]:
    """The sources with about ``share`` of all their text files held out, one or more a side; empty files play no part.

    Raises:
        ValueError: for less than two files.
    """
    every = [(number, item) for number, source in enumerate(sources) for item in source.items]
    paths = [_path(sources[number], item) for number, item in every]
    documents = {
        place: Document(name, "") for place, name in enumerate(without_common_folders(paths)) if every[place][1].size
    }
    if len({document.name for document in documents.values()}) < 2:
        raise ValueError(
            f"{len(documents)} of {len(every)} text files hold text, too few for a training and a validation side; "
            "give two different ones or more, or a single one alone, of which the end is held out"
        )
    held_out = {document.name for document in held_out_split(list(documents.values()), share)[1]}
    items: list[list[SourceFile]] = [[] for _ in sources]
    for place, (number, item) in enumerate(every):
        chosen = place in documents and documents[place].name in held_out
        items[number].append(replace(item, side="validation" if chosen else "train"))
    return [replace(source, items=tuple(mine)) for source, mine in zip(sources, items, strict=True)]


def _path(source: TextSource, item: SourceFile) -> str:
    path = Path(source.name)
    return (path if source.kind == "files" and path.is_file() else path / item.name).as_posix()
