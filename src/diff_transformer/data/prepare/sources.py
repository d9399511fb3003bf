"""The sources of text that a user may name, and the files in them, before any text is read."""

import hashlib
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qsl

from diff_transformer.checks import first_line, require_regular
from diff_transformer.data.documents import (
    ARCHIVE_SUFFIXES,
    JSON_SUFFIXES,
    TEXT_SUFFIXES,
    VALIDATION_FOLDERS,
    WARC_SUFFIXES,
    Document,
    archive_members,
    held_out_split,
    without_common_folders,
)

ACCEPTED = (
    "'python', a text file, JSON lines (.jsonl, .jsonl.gz, .jsonl.zst), a .parquet or .warc[.gz] file, a folder of "
    "these, a URL of one (s3://...), a tar archive of text files, or hub:NAME[?config=...&split=...&revision=...]"
)
HUB_OPTIONS = ("config", "split", "revision")
TAIL = "tail"  # the split of a file that is the only text: its end is held out


@dataclass(frozen=True)
class SourceFile:
    """A file of a source."""

    name: str
    kind: str  # "text", "lines" (JSON lines), "parquet", "warc"
    size: int  # bytes
    split: str | None = None  # "train", "validation", "tail", or None if each row decides
    member: int = 0  # its place among the members of a tar archive


@dataclass(frozen=True)
class TextSource:
    """A source of text for a preparation."""

    name: str  # as given, with an absolute path
    kind: str  # "files", "tar", "python", "hub"
    items: tuple[SourceFile, ...] = ()
    size: int = 0  # bytes to read; 0 if unknown
    part: tuple[int, int] | None = None  # of a "hub" source, (part, number of parts); None for all of it

    def location(self, item: SourceFile) -> str:
        """The path or URL of a file of a source of kind "files"."""
        if is_url(self.name):
            whole = self.name.endswith("/" + item.name)
            return self.name if whole else f"{self.name.rstrip('/')}/{item.name}"
        return str(Path(self.name) / item.name if Path(self.name).is_dir() else self.name)

    def description(self) -> dict:
        """Names and sizes (as a hash), which must be the same when an interrupted preparation resumes."""
        listed = json.dumps([[item.name, item.size] for item in self.items])
        return {
            "source": self.name,
            "files": len(self.items),
            "bytes": self.size,
            "fingerprint": hashlib.blake2b(listed.encode(), digest_size=8).hexdigest(),
        }


def find_sources(names: Sequence[str], share: float) -> list[TextSource]:
    """The sources with these names, with a split for every file that is held out, or not, as a whole.

    The split of a source into a training and a validation side:

    - If it has the folders ``train/`` and ``val/`` (or ``valid/``, ``validation/``), they are the split, and other
      files are not read.
    - Otherwise about ``share`` of its text files, at least one of several, is held out by a hash of their names. Rows
      of JSON lines and parquet are held out one by one.
    - If that holds out nothing, for example for text files that are named one by one, the text files of all sources are
      divided together, by their paths without common leading folders.
    - If there is only one text, its end is held out.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for no source, a source without anything to read, another kind of file, or a side that would be
            empty.
    """
    if not names:
        raise ValueError(f"no source of text; give {ACCEPTED}")
    found = [_find(name) for name in names]
    if len(found) == 1 and [item.kind for item in found[0].items] == ["text"]:
        return [replace(found[0], items=(replace(found[0].items[0], split=TAIL),))]
    divided = [_with_splits(source, share) for source in found]
    items = [item for source in divided for item in source.items]
    rows = any(source.kind == "hub" for source in divided) or any(item.split is None for item in items)
    empty = {"train", "validation"} - {item.split for item in items if item.size}
    if rows or not empty:
        return divided
    if any(_own_splits(source) for source in found):
        raise ValueError(f"no file of the {min(empty)} side holds text; put text into folders train/ and val/")
    return _divided_together(divided, share)


def is_url(name: str) -> bool:
    """Whether a source is a file or folder that fsspec opens, such as s3://bucket/folder."""
    return "://" in name


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
            SourceFile(document.name, "text", document.num_bytes, split)
            for split, documents in (("train", corpus.train), ("validation", corpus.validation))
            for document in documents
        ]
        return TextSource(name, "python", tuple(items), sum(item.size for item in items))
    if name.startswith("hub:"):
        hub_query(name)
        return TextSource(name, "hub")
    if is_url(name):
        return _remote(name)
    path = Path(name).absolute()
    if not path.exists():
        raise FileNotFoundError(f"source {name!r} does not exist; give {ACCEPTED}")
    require_regular(path)
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


def _remote(url: str) -> TextSource:
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(url)
        found = {root: system.info(root)} if system.isfile(root) else system.find(root, detail=True)
    except Exception as error:  # each file system raises its own errors
        raise ValueError(f"source {url!r} cannot be listed ({first_line(error)}); check the URL and access") from error
    items = []
    for path, info in sorted(found.items()):
        name = path.removeprefix(root).lstrip("/") or PurePosixPath(path).name
        kind = None if any(part.startswith(".") for part in name.split("/")) else _kind(name)
        if kind:
            items.append(SourceFile(name, kind, info["size"]))
    if not items:
        raise ValueError(f"source {url!r} does not exist or holds nothing that is read; give {ACCEPTED}")
    return TextSource(url, "files", tuple(items), sum(item.size for item in items))


def _kind(name: str) -> str | None:
    name = name.lower()
    if name.endswith(JSON_SUFFIXES):
        return "lines"
    if name.endswith(WARC_SUFFIXES):
        return "warc"
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
                require_regular(path)
                yield SourceFile(path.relative_to(root).as_posix(), kind, path.stat().st_size)


def _archive(path: Path):
    """The regular text members of an archive, of each name the last; this reads the archive to its end."""
    found = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for place, member in enumerate(archive_members(archive)):
                hidden = any(part.startswith(".") and part not in (".", "..") for part in member.name.split("/"))
                if member.isfile() and not hidden and _kind(member.name) == "text":
                    found[member.name] = SourceFile(member.name, "text", member.size, member=place)
    except Exception as error:  # tarfile and each compression library raise their own errors
        raise ValueError(f"{path} cannot be read as a tar archive ({error})") from error
    return found.values()


def _with_splits(source: TextSource, share: float) -> TextSource:
    if source.kind in ("python", "hub"):
        return source
    if not source.items:
        raise ValueError(f"source {source.name!r} holds nothing that is read; give {ACCEPTED}")
    own = _own_splits(source)
    if own:
        return replace(source, items=tuple(replace(item, split=split) for item, split in own if split))
    inner = without_common_folders([item.name for item in source.items])
    names = [name for item, name in zip(source.items, inner, strict=True) if item.kind == "text"]
    documents = [Document(name, "") for name in names]
    held_out = {document.name for document in held_out_split(documents, share)[1]} if len(names) > 1 else set()
    splits = {True: "validation", False: "train"}
    items = [
        replace(item, split=splits[name in held_out]) if item.kind == "text" else item
        for item, name in zip(source.items, inner, strict=True)
    ]
    return replace(source, items=tuple(items))


def _own_splits(source: TextSource) -> list[tuple[SourceFile, str | None]]:
    """The files with the split that a folder train/ or val/ gives them, None for others; [] without such folders."""
    inner = without_common_folders([item.name for item in source.items])
    tops = {name.split("/")[0] for name in inner if "/" in name}
    if source.kind == "python" or "train" not in tops or not tops & VALIDATION_FOLDERS:
        return []
    folders = {"train": "train", min(tops & VALIDATION_FOLDERS): "validation"}
    return [(item, folders.get(name.split("/")[0])) for item, name in zip(source.items, inner, strict=True)]


def _divided_together(sources: Sequence[TextSource], share: float) -> list[TextSource]:
    """The sources with about ``share`` of all their text files held out, at least one a side; empty files are ignored.

    Raises:
        ValueError: for fewer than two files.
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
        items[number].append(replace(item, split="validation" if chosen else "train"))
    return [replace(source, items=tuple(mine)) for source, mine in zip(sources, items, strict=True)]


def _path(source: TextSource, item: SourceFile) -> str:
    return source.location(item) if source.kind == "files" else f"{source.name}/{item.name}"
