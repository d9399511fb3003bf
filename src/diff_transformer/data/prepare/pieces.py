"""Documents as a stream of pieces, and the stream divided into units, the texts of the shards.

A long document comes in several pieces, so that memory does not grow with the longest document.
"""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import BinaryIO, NamedTuple

PIECE_CHARACTERS = 1 << 20
_READ_BYTES = 1 << 20
_CUTS_TRIED = 1000


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    split: str  # "train" or "validation"
    first: bool  # whether it begins the document
    last: bool  # whether it ends the document
    read: int = 0  # bytes of input consumed since the previous piece, for progress


def cut(parts: Iterable[str], limit: int | None = None) -> Iterator[tuple[str, bool, bool]]:
    """(text, first, last) of each piece of one document, which comes in ``parts``; nothing for a blank document.

    The pieces depend on the document alone, not on its parts. A document of more than ``limit`` characters (default:
    2^20) is cut between a letter and white space, where byte-level tokenizers start a token anyway; if there is no such
    place, at ``limit``.
    """
    limit = PIECE_CHARACTERS if limit is None else limit
    buffer, first = "", True
    for part in parts:
        buffer += part
        while len(buffer) > limit:
            end = _place(buffer, limit)
            yield buffer[:end], first, False
            buffer, first = buffer[end:], False
    if not first or buffer.strip():
        yield buffer, first, True


def _place(text: str, limit: int) -> int:
    end = limit + 1
    for _ in range(_CUTS_TRIED):
        end = max(text.rfind(" ", 0, end), text.rfind("\n", 0, end))
        if end < 1:
            break
        if text[end - 1].isalpha():
            return end
    return limit


def decoded(stream: BinaryIO, name: str) -> Iterator[str]:
    """The UTF-8 text of a stream, in parts, without a byte order mark; no part ends between CR and LF.

    Raises:
        ValueError: if it is not UTF-8, naming the byte.
    """
    decoder, done, held = codecs.getincrementaldecoder("utf-8-sig")(), 0, ""
    while True:
        data = stream.read(_READ_BYTES)
        waiting = len(decoder.getstate()[0])
        try:
            text = held + decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            place = done - waiting + error.start
            raise ValueError(
                f"{name} is not UTF-8 (byte {place}: {error.object[error.start]:#04x}); convert it with "
                "`iconv -f ITS-ENCODING -t utf-8`, or take it out"
            ) from None
        done += len(data)
        held = "\r" if data and text.endswith("\r") else ""
        text = text[:-1] if held else text
        if text:
            yield text
        if not data:
            return


def with_unix_lines(parts: Iterable[str]) -> Iterator[str]:
    """``parts`` of ``decoded`` with CRLF as LF."""
    return (part.replace("\r\n", "\n") for part in parts)


def document_pieces(parts: Iterable[str], split: str) -> Iterator[Piece]:
    """The pieces of one document, whose split is known."""
    for text, first, last in cut(parts):
        yield Piece(text, split, first, last)


def tail_pieces(parts: Iterable[str], size: int, share: float) -> Iterator[Piece]:
    """The pieces of the only text of a preparation, of ``size`` bytes: its last ``share`` is a validation document.

    The cut is at a line end if possible. CRLF becomes LF.
    """
    for split, group in groupby(_divided(parts, size * (1 - share)), key=lambda pair: pair[0]):
        yield from document_pieces(with_unix_lines(part for _, part in group), split)


def _divided(parts: Iterable[str], wanted: float) -> Iterator[tuple[str, str]]:
    done, split = 0, "train"
    for part in parts:
        size = len(part.encode())
        if split == "train" and done + size > wanted:
            head = part.encode()[: max(0, int(wanted) - done)].decode(errors="ignore")
            end = head.rfind("\n") + 1 or len(head)
            yield "train", part[:end]
            split, part = "validation", part[end:]
        done += size
        if part:
            yield split, part


class TextHash:
    """The hash and the size of the text of a shard, which comes piece by piece."""

    def __init__(self):
        self.text_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, text: bytes, first: bool, last: bool) -> None:
        self.text_bytes += len(text)
        self._digest.update(f"{len(text)} {first:d}{last:d} ".encode())
        self._digest.update(text)

    def hexdigest(self) -> str:
        """32 hexadecimal digits that change with the text and with the boundaries of its documents."""
        return self._digest.hexdigest()


@dataclass
class Unit:
    """The text of one shard: what a process tokenises at a time."""

    split: str  # "train" or "validation"
    number: int  # of the shard, within its split
    pieces: list[tuple[bytes, bool, bool]] = field(default_factory=list)  # (UTF-8, first, last)
    text_bytes: int = 0
    read: int = 0  # bytes of input

    @property
    def name(self) -> str:
        """The name of the shard, such as train-000000."""
        return f"{self.split}-{self.number:06d}"

    def text_hash(self) -> str:
        """As ``TextHash.hexdigest``."""
        text_hash = TextHash()
        for piece in self.pieces:
            text_hash.add(*piece)
        return text_hash.hexdigest()


def units(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[Unit]:
    """Units of at least ``shard_bytes`` of text, and less than one piece more; the last of each split may have less.

    They depend on the stream alone, not on the number of processes.
    """
    filling = {split: Unit(split, 0) for split in ("train", "validation")}
    for piece in pieces:
        unit, text = filling[piece.split], piece.text.encode()
        unit.pieces.append((text, piece.first, piece.last))
        unit.text_bytes += len(text)
        unit.read += piece.read
        if unit.text_bytes >= shard_bytes:
            yield unit
            filling[piece.split] = Unit(piece.split, unit.number + 1)
    yield from (unit for unit in filling.values() if unit.pieces)
