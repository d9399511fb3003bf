"""Documents, the files that hold them, and their division into a training and a validation side."""

import hashlib
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from diff_transformer.errors import UserError

TEXT_SUFFIXES = frozenset(
    [
        ".txt",
        ".text",
        ".md",
        ".markdown",
        ".rst",
        ".tex",
        ".org",
        ".html",
        ".py",
        ".pyi",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".java",
        ".js",
        ".ts",
        ".go",
        ".rs",
        ".rb",
        ".sh",
        ".sql",
    ]
)
ARCHIVE_SUFFIXES = (".tar", ".tar.xz", ".txz", ".tar.gz", ".tgz", ".tar.bz2")
VALIDATION_FOLDERS = frozenset({"val", "valid", "validation"})
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Document:
    """A named text."""

    name: str
    text: str
    group: str = ""  # decides the split (default: the name); documents that quote each other share a group

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents to validate on. ``split`` describes how they were divided."""

    name: str
    train: list[Document]
    validation: list[Document]
    split: str

    def description(self) -> str:
        """One line: the number of documents and bytes of each side, and how they were divided."""
        splits = []
        for label, documents in (("train", self.train), ("validation", self.validation)):
            size = sum(document.num_bytes for document in documents)
            splits.append(f"{label} {len(documents)} document{'s' * (len(documents) != 1)}, {size:,} bytes")
        return f"{self.name}: {'; '.join(splits)}; split: {self.split}"


def stable_order(documents: Iterable[Document]) -> list[Document]:
    """The documents in the order of a hash of their names, which is the same on every machine."""
    return sorted(documents, key=lambda document: (hash_of_name(document.name), document.name))


def held_out_split(
    documents: Sequence[Document], share: float = VALIDATION_SHARE
) -> tuple[list[Document], list[Document]]:
    """(train, validation) by a hash of each document's group: about ``share`` is held out, at least one group a side.

    A document stays on its side when others are added, unless a side was empty.

    Raises:
        ValueError: for fewer than two groups.
    """
    groups = sorted({document.group or document.name for document in documents}, key=hash_of_name)
    if len(groups) < 2:
        raise UserError(f"a held-out split needs at least 2 documents, got {len(groups)}")
    held_out = {group for group in groups if hash_of_name(group) < share} or {groups[0]}
    if len(held_out) == len(groups):
        held_out.discard(groups[-1])
    splits: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        splits[(document.group or document.name) in held_out].append(document)
    return splits


def tail_split(document: Document) -> tuple[Document, Document]:
    """(train, validation) of one document: its last 10 % is validation, cut at a line end if it has several lines.

    Raises:
        ValueError: if a side would be blank.
    """
    text = document.text
    wanted = round(len(text) * (1 - VALIDATION_SHARE))
    cut = text.rfind("\n", 0, wanted) + 1 or text.find("\n", wanted) + 1
    if not 0 < cut < len(text):
        cut = wanted
    if not text[:cut].strip() or not text[cut:].strip():
        raise UserError(f"{document.name} is too short to split: {len(text)} characters; give a longer text")
    return Document(f"{document.name}[:{cut}]", text[:cut]), Document(f"{document.name}[{cut}:]", text[cut:])


def take_bytes(documents: Sequence[Document], max_bytes: int) -> list[Document]:
    """Whole documents in their order up to ``max_bytes`` of UTF-8; the last is cut at a line end if it does not fit."""
    if max_bytes < 1:
        raise UserError(f"max_bytes must be at least 1, got {max_bytes}")
    taken: list[Document] = []
    left = max_bytes
    for document in documents:
        size = document.num_bytes
        if size > left:
            head = document.text.encode()[:left].decode(errors="ignore")
            head = head[: head.rfind("\n") + 1] or head
            if head.strip() or not taken:
                taken.append(Document(document.name, head, document.group))
            break
        taken.append(document)
        left -= size
        if left == 0:
            break
    return taken


def hash_of_name(name: str) -> float:
    """A number in [0, 1), a hash of the name."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def common_folders(names: Sequence[str]) -> int:
    """The number of leading folders that all ``names`` share (``./``, ``novels/``); ``train/`` and ``val/`` stay."""
    split = [PurePosixPath(name).parts for name in names]
    depth = 0
    while all(len(parts) > depth + 1 for parts in split) and len({parts[depth] for parts in split}) == 1:
        if split[0][depth] == "train" or split[0][depth] in VALIDATION_FOLDERS:
            break
        depth += 1
    return depth


def without_common_folders(names: Sequence[str]) -> list[str]:
    """``names`` without their common leading folders."""
    depth = common_folders(names)
    return ["/".join(PurePosixPath(name).parts[depth:]) for name in names]


def archive_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an archive that was opened as a stream (``mode="r|*"``).

    Raises:
        tarfile.ReadError: where the data of a member ends early. tarfile itself goes on in blocks to the promised end:
            for hours, where a header promises terabytes.
    """
    stream: Any = archive.fileobj
    for member in archive:
        yield member
        while (missing := archive.offset - stream.tell()) > 0:
            if not stream.read(min(missing, 1 << 16)):
                raise tarfile.ReadError(f"{member.name} ends {missing:,} bytes early")


def decoded(name: str, data: bytes) -> str:
    """UTF-8 text, with or without a BOM; ValueError, which calls it ``name``, for any other."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 (byte {error.start}: {data[error.start]:#04x}); convert it with "
            "`iconv -f ITS-ENCODING -t utf-8`, or take it out"
        ) from None
