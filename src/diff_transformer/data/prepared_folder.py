"""A prepared folder on the disk.

plan.json        settings, files and tokenizer; there from the start, replaced by the manifest at the end
tokenizer/       as save_pretrained writes it
tasks/           NUMBER.json for each finished task; removed at the end
shards/          for each task and side NAME.tokens and NAME.documents (where documents begin)
manifest.json    written last: a folder with it is complete
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diff_transformer.checks import read_json
from diff_transformer.data.sources import SPLITS
from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash
from diff_transformer.durable import write_whole
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENS, DOCUMENTS = ".tokens", ".documents"
DOCUMENT_DTYPE = "<i8"
MANIFEST, PLAN, SHARDS, TOKENIZER, TASKS = "manifest.json", "plan.json", "shards", "tokenizer", "tasks"
FORMAT, VERSION = "diff-transformer shards", 2
_READ_BYTES = 1 << 24


def is_prepared(path: Path | str) -> bool:
    """True if ``path`` is a folder of ``diff-transformer prepare``, finished or not."""
    return any((Path(path) / name).is_file() for name in (MANIFEST, PLAN))


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """The manifest of a prepared folder.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ValueError: the folder is not complete, of another format, or damaged.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.exists() and (folder / PLAN).exists():
        raise UserError(f"{folder} is not complete; continue with `{repair_command(folder)}`")
    if not path.exists():
        raise UserError(f"{folder} is not a prepared folder: it has no {MANIFEST}; see `diff-transformer prepare`")
    manifest = read_json(path, "copy the folder again, or prepare the text again")
    if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise UserError(f"{path} is not the manifest of {FORMAT!r}, version {VERSION}; prepare the text again")
    return manifest


def read_plan(folder: Path | str) -> dict[str, Any] | None:
    """The manifest of a complete folder, the plan of another; None if nothing was prepared there."""
    folder = Path(folder)
    if (folder / MANIFEST).exists():
        return read_manifest(folder)
    return read_json(folder / PLAN) if (folder / PLAN).exists() else None


def repair_command(folder: Path | str) -> str:
    """The command that makes missing and damaged shards again."""
    return f"diff-transformer prepare --out {folder} --resume"


def load_prepared_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer of a prepared folder.

    Raises:
        ValueError: if it is missing or has changed.
    """
    tokenizer, expected = load_tokenizer(Path(folder) / TOKENIZER), read_manifest(folder)["tokenizer"]["hash"]
    if (found := tokenizer_hash(tokenizer)) != expected:
        raise UserError(f"{Path(folder) / TOKENIZER} has hash {found}, the shards were made with {expected}")
    return tokenizer


def write_json(path: Path, values: dict) -> None:
    """Write JSON atomically and flush it to the disk."""
    write_whole(path, json.dumps(values, indent=1) + "\n")


def wrong_size(folder: Path, record: dict, dtype: str) -> str | None:
    """The first file of a shard that is missing or has the wrong size, as a message; None if there is none."""
    sizes = {
        TOKENS: record["tokens"] * np.dtype(dtype).itemsize,
        DOCUMENTS: record["documents"] * np.dtype(DOCUMENT_DTYPE).itemsize,
    }
    for ending, expected in sizes.items():
        path = folder / (record["name"] + ending)
        found = path.stat().st_size if path.exists() else None
        if found is None:
            return f"{path} is missing; {expected:,} bytes expected"
        if found != expected:
            return f"{path} has {found:,} bytes, {expected:,} expected: it is truncated or has been replaced"
    return None


def wrong_content(folder: Path, record: dict, dtype: str) -> str | None:
    """As ``wrong_size``, and the checksums too, for which the files are read."""
    problem = wrong_size(folder, record, dtype)
    if problem:
        return problem
    for ending, expected in record["checksums"].items():
        path, digest = folder / (record["name"] + ending), new_digest()
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        if digest.hexdigest() != expected:
            return f"{path} has checksum {digest.hexdigest()}, {expected} expected: its content has changed"
    return None


def new_digest():
    return hashlib.blake2b(digest_size=16)


def verify(folder: Path | str, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Check sizes and checksums of all shards and the hash of the tokenizer; return a message for each problem.

    Args:
        progress: called with the number of checked shards and of all shards.

    Raises:
        FileNotFoundError, ValueError: for a folder that is not prepared.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    records = [record for split in SPLITS for record in manifest[split]["shards"]]
    problems = []
    for number, record in enumerate(records, start=1):
        problems += filter(None, [wrong_content(folder / SHARDS, record, manifest["dtype"])])
        progress(number, len(records))
    try:
        load_prepared_tokenizer(folder)
    except ValueError as error:
        problems.append(str(error))
    return problems
