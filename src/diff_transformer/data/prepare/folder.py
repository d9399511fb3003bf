"""A prepared folder on the disk: its plan, shards, tokenizer and manifest, and whether they are what was written.

plan.json        the settings; there from the start, replaced by the manifest at the end
finished.jsonl   a line for each finished shard; removed at the end
tokenizer/       as save_pretrained writes it
shards/          two files a shard: NAME.tokens and NAME.documents (where documents begin)
manifest.json    written last: a folder with it is complete

With an engine, in place of finished.jsonl, and they stay:

tasks/           NUMBER.jsonl of each task: a line for each of its shards, and one at its end
logs/            logs, statistics and completion markers of datatrove
dedup/           what deduplication found
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash
from diff_transformer.durable import read_lines, remove, replacing, write_whole

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from transformers import PreTrainedTokenizerFast

TOKENS, DOCUMENTS = ".tokens", ".documents"
DOCUMENT_DTYPE = "<i8"
_READ_BYTES = 1 << 24
MANIFEST, PLAN, JOURNAL, SHARDS, TOKENIZER = "manifest.json", "plan.json", "finished.jsonl", "shards", "tokenizer"
TASKS, LOGS, DUPLICATES = "tasks", "logs", "dedup"
ERROR = ".error"  # ending of the message of a task that failed
WORKING = ("signatures", "buckets")  # folders of deduplication that are removed at the end
LAST_STAGE = "shards"  # name of the stage that writes them, in logs/
LOCK = ".lock"
_BEFORE_THE_PLAN = {LOCK, TOKENIZER, TOKENIZER + ".partial", PLAN + ".partial"}
FORMAT, VERSION = "diff-transformer shards", 1
SPLITS = ("train", "validation")


def read_manifest(folder: Path | str) -> dict:
    """The manifest of a prepared folder.

    Raises:
        FileNotFoundError: if the folder has no manifest.
        ValueError: if the folder is not complete, or has another format, or the manifest is damaged.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.exists():
        if (folder / PLAN).exists():
            raise ValueError(f"{folder} is not complete; continue with `{repair_command(folder)}`")
        raise FileNotFoundError(
            f"{folder} is not a prepared folder: it has no {MANIFEST}; see `diff-transformer prepare`"
        )
    try:
        manifest = json.loads(path.read_text())
        named, checksum = (manifest["format"], manifest["version"]), manifest.pop("checksum", None)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the manifest of a prepared folder ({type(error).__name__}: {error})") from None
    if named != (FORMAT, VERSION):
        raise ValueError(f"{path} is of format {named}, this version reads {(FORMAT, VERSION)}; prepare the text again")
    if checksum not in (None, _own_checksum(manifest)):  # None: written by an earlier version
        raise ValueError(f"{path} is damaged (its checksum differs); copy it again, or prepare the text again")
    return manifest


def _own_checksum(manifest: dict) -> str:
    digest = new_digest()
    digest.update(json.dumps(manifest, sort_keys=True).encode())
    return digest.hexdigest()


def repair_command(folder: Path | str) -> str:
    """The command that rebuilds missing and damaged shards."""
    return f"diff-transformer prepare --out {folder} --resume"


def load_prepared_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer that a folder was prepared with.

    Raises:
        ValueError: if it is missing or has changed.
    """
    tokenizer, expected = load_tokenizer(Path(folder) / TOKENIZER), read_manifest(folder)["tokenizer"]["hash"]
    found = tokenizer_hash(tokenizer)
    if found != expected:
        raise ValueError(f"{Path(folder) / TOKENIZER} has hash {found}, the shards were made with {expected}")
    return tokenizer


def write_json(path: Path, values: dict) -> None:
    """Write JSON atomically and flush it to the disk."""
    write_whole(path, json.dumps(values, indent=1) + "\n")


def is_prepared(path: Path | str) -> bool:
    """Whether ``path`` is a folder of ``diff-transformer prepare``, finished or not."""
    return any((Path(path) / name).is_file() for name in (MANIFEST, PLAN))


def is_new(out: Path) -> bool:
    """Whether ``out`` may be started anew: it does not exist, or holds a preparation without a finished shard."""
    if not out.exists():
        return True
    names = {entry.name for entry in out.iterdir()}
    begun = {PLAN, SHARDS, TASKS, LOGS, DUPLICATES, JOURNAL, JOURNAL + ".partial"} if PLAN in names else set()
    journals = [out / JOURNAL, *(out / TASKS).glob("*.jsonl")]
    return names <= _BEFORE_THE_PLAN | begun and not any(path.exists() and path.stat().st_size for path in journals)


def begin(out: Path, plan: dict, tokenizer) -> None:
    """Start a preparation in ``out``: remove an earlier one, write the tokenizer, then the plan."""
    for name in (SHARDS, TASKS, LOGS, DUPLICATES, JOURNAL, PLAN, TOKENIZER):
        remove(out / name)
    with replacing(out / TOKENIZER) as partial:
        tokenizer.save_pretrained(partial)
    write_json(out / PLAN, plan)


def finish(out: Path, manifest: dict) -> None:
    """Write the manifest, then remove plan and journal. A process killed in between leaves a complete folder."""
    write_json(out / MANIFEST, {**manifest, "checksum": _own_checksum(manifest)})
    for name in (PLAN, JOURNAL):
        (out / name).unlink(missing_ok=True)


def journal_path(out: Path, rank: int) -> Path:
    """The journal of a task."""
    return out / TASKS / f"{rank:05d}.jsonl"


def finished_mark(rank: int) -> str:
    """The name of the last record in the journal of a finished task."""
    return f"task-{rank:05d}"


def read_journal(path: Path) -> dict[str, dict]:
    """The records in a journal, by name; none if there is no such file."""
    return {record["name"]: record for record in read_lines(path)}


def changed(out: Path, name: str) -> str:
    """The message where the text of a shard is not what it was."""
    return (
        f"the text of {name} is not what {out} was prepared from: a source has changed though its name and size have "
        "not; restore the source, or prepare into another folder"
    )


def expected_sizes(record: dict, dtype: DTypeLike) -> dict[str, int]:
    """The size in bytes of each file of a shard, by its ending."""
    return {
        TOKENS: record["tokens"] * np.dtype(dtype).itemsize,
        DOCUMENTS: record["documents"] * np.dtype(DOCUMENT_DTYPE).itemsize,
    }


def wrong_size(folder: Path, record: dict, dtype: DTypeLike) -> str | None:
    """The first file of a shard that is missing or has the wrong size, as a message; None if there is none."""
    for ending, expected in expected_sizes(record, dtype).items():
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


def verify(folder: Path | str, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Check sizes and checksums of all shards and the hash of the tokenizer; return a message for each problem.

    Args:
        progress: called with the number of checked shards and of all shards.

    Raises:
        FileNotFoundError, ValueError: for a folder that is not prepared.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    records = [record for split in ("train", "validation") for record in manifest[split]["shards"]]
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
