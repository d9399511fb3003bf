"""Tokenise text of any size, once, into files that training maps into memory (``tokens.py`` describes the folder).

The files of the sources are divided among tasks: task i of n reads files i, i + n, ... and writes one shard for each
side. ``prepare`` runs one task after another; ``pipeline.py`` has them as steps of a datatrove pipeline, for many
processes or machines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from diff_transformer.checks import differences
from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.sources import SPLITS, Reader, Source, find_sources
from diff_transformer.data.tokenizer import encode_each, ids_of, load_tokenizer, tokenizer_hash, train_tokenizer
from diff_transformer.data.tokens import (
    PLAN,
    SHARDS,
    TOKENIZER,
    checksum,
    damage,
    is_prepared,
    load_prepared_tokenizer,
    read_plan,
    read_records,
    shard,
)
from diff_transformer.durable import PARTIAL, remove, replacing, require_writable, write_whole
from diff_transformer.errors import UserError
from diff_transformer.settings import STRICT, PositiveInt

MAX_TASKS = 64  # by default
SAMPLE = 10_000_000  # characters that "bpe" is trained on
_MIN_SAMPLE = 65_536  # of each file
_SHOWN = 8  # differences in a message, at most


@dataclass(config=STRICT, frozen=True)
class PrepareConfig:
    """Settings of ``prepare``. They and the sources determine the folder to the byte."""

    sources: tuple[str, ...]  # texts to read, in this order (``sources.find_sources``)
    # "bpe" (byte-level, trained on a sample of the sources), "bytes", a folder written by save_pretrained, or a name on
    # the Hugging Face hub
    tokenizer: str = "bpe"
    vocab_size: PositiveInt = 32_768  # of "bpe", special tokens included
    field: str = "text"  # field of JSON lines, or column of parquet, that holds the text
    # share of the documents that is held out, by a hash
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.01
    skip_invalid: bool = False  # count and leave out rows without a text, instead of stopping
    tasks: PositiveInt | None = None  # one a file by default, at most MAX_TASKS


def prepare(
    config: PrepareConfig,
    out: Path | str,
    *,
    resume: bool = False,
    progress: Callable[[int, int], object] = lambda read, total: None,
) -> Path:
    """Tokenise the sources of ``config`` into the folder ``out``, and return it.

    The process may be killed at any moment: with ``resume``, finished tasks are kept and the others run, also those
    whose shards are missing or have another size; in a complete folder, also those whose shards have changed.

    Args:
        progress: called with the bytes of input that were read, and all of them; 0 if unknown.

    Raises:
        UserError: as ``begin``, and for text that cannot be read.
    """
    out = Path(out).absolute()
    plan = begin(config, out, resume=resume)
    todo, done = unfinished(out), 0
    sizes = [sum(file["size"] for file in plan["files"][task :: plan["settings"]["tasks"]]) for task in todo]

    def advance(read: int) -> None:
        nonlocal done
        done += read
        progress(done, sum(sizes))

    for task in todo:
        reader = reader_of(plan, task, advance)
        write_task(out, plan, task, texts_of(plan, task, reader), reader.left_out)
    return out


def begin(config: PrepareConfig, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """The plan of the folder ``out``, which is written with its tokenizer if there is none.

    Raises:
        UserError: for sources or a tokenizer that cannot be loaded, and an ``out`` that holds something else, was
            prepared with other settings, or is not writable.
    """
    require_writable(out)
    begun = is_prepared(out)
    there = {path.name for path in out.iterdir() if not path.name.endswith(PARTIAL)} if out.exists() else set()
    if there - {TOKENIZER, SHARDS} and not (begun and resume):
        kind = "a preparation; continue or repair it (--resume), or" if begun else "something else;"
        raise UserError(f"{out} holds {kind} choose another folder")
    sources = find_sources(config.sources, config.validation)
    files = len(sources) if all(source.kind != "hub" for source in sources) else None
    tasks = config.tasks or min(files or 1, MAX_TASKS)
    if files is not None and tasks > files:
        raise UserError(f"tasks is {tasks}, and the sources have {files} files, which are not divided; give fewer")
    settings = json.loads(json.dumps({**asdict(config), "tasks": tasks}))
    plan: dict[str, Any] = {"settings": settings, "files": [asdict(source) for source in sources]}
    if begun:
        before = read_plan(out)
        before["settings"]["skip_invalid"] = config.skip_invalid  # finished tasks are the same with and without
        old, new = ({file["path"]: file for file in of["files"]} for of in (before, plan))
        if different := differences(before["settings"], settings, "settings.") + differences(old, new, "file "):
            listed = "\n  ".join(different[:_SHOWN])
            raise UserError(
                f"{out} was prepared with other settings or files (there against here):\n  {listed}\n"
                "give the same, or choose another folder"
            )
        load_prepared_tokenizer(out)  # which is not made again
        write_whole(out / PLAN, json.dumps(before, indent=1) + "\n")
        return before
    if config.tokenizer == "bpe":
        tokenizer = train_tokenizer(_sample(config, sources), config.vocab_size)
    else:
        tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token to put between documents; set tokenizer.eos_token")
    size = ids_of(tokenizer)
    plan["tokenizer"] = {"hash": tokenizer_hash(tokenizer), "size": size, "end_of_text": tokenizer.eos_token_id}
    plan["dtype"] = "<u2" if size <= 1 << 16 else "<u4"
    (out / SHARDS).mkdir(parents=True, exist_ok=True)
    remove(out / TOKENIZER)
    with replacing(out / TOKENIZER) as partial:  # a full disk is an OSError here, which it is not in tokenizers
        tokenizer.save_pretrained(partial)
    write_whole(out / PLAN, json.dumps(plan, indent=1) + "\n")
    return plan


def unfinished(out: Path) -> list[int]:
    """The tasks of a prepared folder that are to run; removes files that a killed process left unfinished."""
    for partial in out.rglob(f"*{PARTIAL}"):
        remove(partial)
    records, dtype = read_records(out), read_plan(out)["dtype"]
    todo = [task for task, record in enumerate(records) if not record or damage(out, task, record, dtype)]
    if not todo:  # a complete folder: perhaps its content has changed
        todo = [i for i, record in enumerate(records) if record and damage(out, i, record, dtype, content=True)]
    return todo


def totals(folder: Path | str) -> dict[str, Counter[str]]:
    """Sums over the tasks: for each side ``tokens``, ``documents`` and ``text_bytes``; and the counts ``left_out``."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in (*SPLITS, "left_out")}
    for record in filter(None, read_records(folder)):
        for name, counts in sums.items():
            counts.update({key: value for key, value in record[name].items() if key != "checksum"})
    return sums


def _sample(config: PrepareConfig, sources: Sequence[Source]) -> Iterator[str]:
    """Training text: an equal share from the beginning of each file, in the order of a hash of their names."""
    reader = Reader(config.field, config.validation, config.skip_invalid)
    room = SAMPLE
    share = max(_MIN_SAMPLE, room // len(sources))
    for source in sorted(sources, key=lambda source: hash_of_name(source.path)):
        quota = min(share, room)
        for split, text in reader.texts(source):
            if split == "train":
                yield text[:quota]
                used = min(len(text), quota)
                quota, room = quota - used, room - used
            if quota <= 0:
                break
        if room <= 0:
            return


def reader_of(plan: dict[str, Any], task: int, progress: Callable[[int], object] = lambda read: None) -> Reader:
    """The reader of a task."""
    settings = plan["settings"]
    part = (task, settings["tasks"])
    return Reader(settings["field"], settings["validation"], settings["skip_invalid"], part, progress)


def texts_of(plan: dict[str, Any], task: int, reader: Reader) -> Iterator[tuple[str, str]]:
    """(split, text) of the files of a task; every task reads its share of a data set of the hub."""
    for number, values in enumerate(plan["files"]):
        source = Source(**values)
        if source.kind == "hub" or number % plan["settings"]["tasks"] == task:
            yield from reader.texts(source)


def write_task(
    out: Path, plan: dict[str, Any], task: int, texts: Iterable[tuple[str, str]], left_out: Counter[str]
) -> None:
    """Tokenise the texts of a task into its shards, then write its record.

    Args:
        texts: (split, text), in order.
        left_out: counts that the reader of ``texts`` fills.
    """
    tokenizer, end, dtype = load_tokenizer(out / TOKENIZER), plan["tokenizer"]["end_of_text"], plan["dtype"]
    record: dict[str, Any] = {split: {"tokens": 0, "documents": 0, "text_bytes": 0} for split in SPLITS}
    with ExitStack() as stack:
        partial = {split: stack.enter_context(replacing(shard(out, split, task))) for split in SPLITS}
        files = {split: stack.enter_context(partial[split].open("wb")) for split in SPLITS}
        sized = (((split, len(text.encode())), text) for split, text in texts)
        for (split, size), ids in encode_each(tokenizer, sized):
            side, tokens = record[split], np.append(ids, end).astype(dtype)
            files[split].write(tokens.data)
            side["tokens"] += len(tokens)
            side["documents"] += 1
            side["text_bytes"] += size
    for split in SPLITS:
        record[split]["checksum"] = checksum(shard(out, split, task))
    write_whole(out / SHARDS / f"{task:05d}.json", json.dumps({**record, "left_out": left_out}, indent=1) + "\n")
