"""The stream of pieces divided into the texts of shards: what one process tokenises at a time."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from diff_transformer.data.prepare.pieces import Piece


@dataclass
class Unit:
    """The text of shard ``number`` of a side, as (UTF-8, first, last) for each piece. ``read``: input bytes."""

    side: str
    number: int
    pieces: list[tuple[bytes, bool, bool]] = field(default_factory=list)
    text_bytes: int = 0
    read: int = 0

    @property
    def name(self) -> str:
        return f"{self.side}-{self.number:06d}"

    def text_hash(self) -> str:
        """32 hexadecimal digits that change with the text and with the boundaries of its documents."""
        digest = hashlib.blake2b(digest_size=16)
        for text, first, last in self.pieces:
            digest.update(f"{len(text)} {first:d}{last:d} ".encode())
            digest.update(text)
        return digest.hexdigest()


def units(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[Unit]:
    """Units of at least ``shard_bytes`` of text, by less than a piece more; the last of each side may have less.

    A function of the stream alone: the number of processes plays no part.
    """
    filling = {side: Unit(side, 0) for side in ("train", "validation")}
    for piece in pieces:
        unit, text = filling[piece.side], piece.text.encode()
        unit.pieces.append((text, piece.first, piece.last))
        unit.text_bytes += len(text)
        unit.read += piece.read
        if unit.text_bytes >= shard_bytes:
            yield unit
            filling[piece.side] = Unit(piece.side, unit.number + 1)
    yield from (unit for unit in filling.values() if unit.pieces)
