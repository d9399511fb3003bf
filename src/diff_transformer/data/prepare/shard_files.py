"""The two files of a shard: its tokens, and where in them documents begin."""

import hashlib
from pathlib import Path

import numpy as np

from diff_transformer.data.prepare.encoder import Encoder
from diff_transformer.data.prepare.units import Unit
from diff_transformer.durable import replacing

TOKENS, DOCUMENTS = ".tokens", ".documents"
DOCUMENT_DTYPE = "<i8"
_READ_BYTES = 1 << 24


def write_shard(folder: Path, unit: Unit, encoder: Encoder, end_of_text: int) -> dict:
    """Tokenise ``unit`` into ``folder``; each document is followed by ``end_of_text``. The record of the shard:
    sizes, checksums, and the hash of its text. Each file is written beside its place, flushed and renamed."""
    end = np.array([end_of_text], encoder.dtype).tobytes()
    parts, starts, done = [], [], 0
    for text, first, last in unit.pieces:
        if first:
            starts.append(done // encoder.dtype.itemsize)
        encoded = encoder.encode(text.decode()) + (end if last else b"")
        parts.append(encoded)
        done += len(encoded)
    documents = np.array(starts, DOCUMENT_DTYPE).tobytes()
    return {
        "name": unit.name,
        "tokens": done // encoder.dtype.itemsize,
        "documents": len(starts),
        "text_bytes": unit.text_bytes,
        "text_hash": unit.text_hash(),
        "checksums": {
            TOKENS: _write(folder / (unit.name + TOKENS), parts),
            DOCUMENTS: _write(folder / (unit.name + DOCUMENTS), [documents]),
        },
    }


def expected_sizes(record: dict, dtype: str) -> dict[str, int]:
    """Bytes of each file of a shard, by its ending."""
    return {
        TOKENS: record["tokens"] * np.dtype(dtype).itemsize,
        DOCUMENTS: record["documents"] * np.dtype(DOCUMENT_DTYPE).itemsize,
    }


def wrong_size(folder: Path, record: dict, dtype: str) -> str | None:
    """What is wrong with the sizes of a shard's files, or None."""
    for ending, expected in expected_sizes(record, dtype).items():
        path = folder / (record["name"] + ending)
        found = path.stat().st_size if path.exists() else None
        if found is None:
            return f"{path} is missing; {expected:,} bytes expected"
        if found != expected:
            return f"{path} has {found:,} bytes, {expected:,} expected: it is cut off or not the file that was written"
    return None


def wrong_content(folder: Path, record: dict, dtype: str) -> str | None:
    """What is wrong with a shard's files, read wholly, or None."""
    problem = wrong_size(folder, record, dtype)
    if problem:
        return problem
    for ending, expected in record["checksums"].items():
        path, digest = folder / (record["name"] + ending), _digest()
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        if digest.hexdigest() != expected:
            return f"{path} has checksum {digest.hexdigest()}, {expected} expected: its content has changed"
    return None


def _digest():
    return hashlib.blake2b(digest_size=16)


def _write(path: Path, parts: list[bytes]) -> str:
    digest = _digest()
    with replacing(path) as partial, partial.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
    return digest.hexdigest()
