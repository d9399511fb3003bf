"""A prepared folder on the disk: its plan, shards, tokenizer and manifest, and whether they are what was written.

plan.json        the settings; there from the start, replaced by the manifest at the end
finished.jsonl   a line for each finished shard; removed at the end
tokenizer/       as save_pretrained writes it
shards/          two files a shard: NAME.tokens and NAME.documents (where documents begin)
manifest.json    written last: a folder with it is complete
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash
from diff_transformer.durable import remove, replacing, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENS, DOCUMENTS = ".tokens", ".documents"
DOCUMENT_DTYPE = "<i8"
_READ_BYTES = 1 << 24
MANIFEST, PLAN, JOURNAL, SHARDS, TOKENIZER = "manifest.json", "plan.json", "finished.jsonl", "shards", "tokenizer"
LOCK = ".lock"
_BEFORE_THE_PLAN = {LOCK, TOKENIZER, TOKENIZER + ".partial", PLAN + ".partial"}
FORMAT, VERSION = "diff-transformer shards", 1
SIDES = ("train", "validation")


def read_manifest(folder: Path | str) -> dict:
    """The manifest of a prepared folder.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if the folder is not complete, or of another format.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.exists():
        if (folder / PLAN).exists():
            raise ValueError(f"{folder} is not complete; go on with `{mending(folder)}`")
        raise FileNotFoundError(f"{folder} is no prepared folder: it has no {MANIFEST}; see `diff-transformer prepare`")
    try:
        manifest = json.loads(path.read_text())
        named = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no manifest of a prepared folder ({type(error).__name__}: {error})") from None
    if named != (FORMAT, VERSION):
        raise ValueError(f"{path} is of format {named}, this version reads {(FORMAT, VERSION)}; prepare the text again")
    return manifest


def mending(folder: Path | str) -> str:
    """The command that makes missing and damaged shards again."""
    return f"diff-transformer prepare --out {folder} --resume"


def load_prepared_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer that a folder was prepared with.

    Raises:
        ValueError: if it is not there, or has changed.
    """
    tokenizer, expected = load_tokenizer(Path(folder) / TOKENIZER), read_manifest(folder)["tokenizer"]["hash"]
    found = tokenizer_hash(tokenizer)
    if found != expected:
        raise ValueError(f"{Path(folder) / TOKENIZER} has hash {found}, the shards were made with {expected}")
    return tokenizer


def write_json(path: Path, values: dict) -> None:
    """Whole or not at all, and on the disk when this returns."""
    write_whole(path, json.dumps(values, indent=1) + "\n")


def is_prepared(path: Path | str) -> bool:
    """Whether ``path`` is a folder that ``diff-transformer prepare`` made, or is making."""
    return any((Path(path) / name).is_file() for name in (MANIFEST, PLAN))


def is_new(out: Path) -> bool:
    """Whether nothing of value is in ``out``: it is not there, or holds a preparation without a finished shard."""
    if not out.exists():
        return True
    names = {entry.name for entry in out.iterdir()}
    begun = {PLAN, SHARDS, JOURNAL, JOURNAL + ".partial"} if PLAN in names else set()
    return names <= _BEFORE_THE_PLAN | begun and not (JOURNAL in names and (out / JOURNAL).stat().st_size)


def begin(out: Path, plan: dict, tokenizer) -> None:
    """Make a new folder for ``plan``; the plan itself comes last."""
    for name in (SHARDS, JOURNAL, PLAN, TOKENIZER):  # what is there without the plan must be new
        remove(out / name)
    with replacing(out / TOKENIZER) as partial:
        tokenizer.save_pretrained(partial)
    write_json(out / PLAN, plan)


def finish(out: Path, manifest: dict) -> None:
    """Turn the plan into the manifest; a kill in between leaves a folder that is complete."""
    write_json(out / MANIFEST, manifest)
    for name in (PLAN, JOURNAL):
        (out / name).unlink(missing_ok=True)


class Journal:
    """The records of finished shards, kept in a file of JSON lines of which a last line that was cut off is ignored."""

    def __init__(self, path: Path):
        self.path = path
        self.records: dict[str, dict] = {}
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                self.records[record["name"]] = record
            self._rewrite()

    def add(self, record: dict) -> None:
        self.records[record["name"]] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _rewrite(self) -> None:
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in self.records.values()))


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
        path, digest = folder / (record["name"] + ending), new_digest()
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        if digest.hexdigest() != expected:
            return f"{path} has checksum {digest.hexdigest()}, {expected} expected: its content has changed"
    return None


def new_digest():
    return hashlib.blake2b(digest_size=16)


def verify(folder: Path | str, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """What is wrong with a prepared folder, a line each: sizes and checksums of every file of the shards, and the hash
    of its tokenizer. ``progress`` is called with (shards done, shards).

    Raises:
        FileNotFoundError, ValueError: for a folder that is not prepared.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    records = [record for side in ("train", "validation") for record in manifest[side]["shards"]]
    problems = []
    for number, record in enumerate(records, start=1):
        problem = wrong_content(folder / SHARDS, record, manifest["dtype"])
        if problem:
            problems.append(problem)
        if progress is not None:
            progress(number, len(records))
    expected = manifest["tokenizer"]["hash"]
    try:
        found = tokenizer_hash(load_tokenizer(folder / TOKENIZER))
    except ValueError as error:
        problems.append(str(error))
    else:
        if found != expected:
            problems.append(f"{folder / TOKENIZER} has hash {found}, {expected} expected: it has changed")
    return problems
