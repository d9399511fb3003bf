"""Tokenise text of any size, once, into files that training maps into memory (``tokens.py`` describes the folder).

The files of the sources are divided among tasks: task i of n reads files i, i + n, ... and writes one shard for each
side. This process runs one task after another; datatrove (``pipeline.py``) runs them in several processes or on a
cluster, with its filters and its deduplication.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from diff_transformer.checks import differences, require_known, require_positive
from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.sources import SPLITS, Reader, Source, find_sources
from diff_transformer.data.tokenizer import encode_all, ids_of, load_tokenizer, tokenizer_hash, train_tokenizer
from diff_transformer.data.tokens import (
    DOCUMENT_DTYPE,
    DOCUMENTS,
    PLAN,
    SHARDS,
    TOKENIZER,
    TOKENS,
    is_prepared,
    new_digest,
    read_plan,
    read_records,
    wrong_content,
    wrong_size,
)
from diff_transformer.durable import PARTIAL, remove, replacing, require_writable, write_whole
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    pass

FILTERS = {  # classes of datatrove, by the name of the work that published the rules
    "gopher": ("GopherRepetitionFilter", "GopherQualityFilter"),
    "c4": ("C4QualityFilter",),
    "fineweb": ("FineWebQualityFilter",),
}
MAX_TASKS = 64  # by default
_BATCH = 1 << 20  # characters
_MIN_SAMPLE = 65_536  # characters of each file in the sample


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of ``prepare``. They and the sources determine the folder to the byte."""

    sources: tuple[str, ...]  # texts to read, in this order (``sources.find_sources``)
    # "bpe" (byte-level, trained on a sample of the sources), "bytes", "cl100k", a folder written by save_pretrained, or
    # a name on the Hugging Face hub
    tokenizer: str = "bpe"
    vocab_size: int = 32_768  # of "bpe", special tokens included
    sample_characters: int = 10_000_000  # that "bpe" is trained on: an equal share from the beginning of each file
    field: str = "text"  # field of JSON lines, or column of parquet, that holds the text
    validation: float = 0.01  # share of the documents that is held out, by a hash
    skip_invalid: bool = False  # count and leave out rows without a text, instead of stopping
    tasks: int | None = None  # one a file by default, at most MAX_TASKS
    filters: tuple[str, ...] = ()  # with an engine: names of ``FILTERS``, in this order
    dedup: str | None = None  # with an engine: "minhash" drops documents that are nearly equal to another

    def validate(self) -> None:
        """Raise UserError for sizes not above 0, a share outside 0 to 1, and unknown names."""
        require_positive(vocab_size=self.vocab_size, sample_characters=self.sample_characters, tasks=self.tasks)
        for name in self.filters:
            require_known("filter", name, FILTERS)
        if self.dedup is not None:
            require_known("deduplication", self.dedup, ("minhash",))
        if not 0 < self.validation < 1:
            raise UserError(f"validation is {self.validation}; give a share between 0 and 1, such as 0.01")


class Engine(Protocol):
    """Runs tasks elsewhere (``pipeline.Engine``)."""

    def check(self, config: PrepareConfig) -> None:
        """Raise UserError if it cannot run tasks of ``config``."""

    def run(self, out: Path, plan: dict[str, Any], todo: Sequence[int]) -> None:
        """Run these tasks, or submit them."""


def prepare(
    config: PrepareConfig,
    out: Path | str,
    *,
    resume: bool = False,
    progress: Callable[[int, int], object] = lambda read, total: None,
    engine: Engine | None = None,
) -> Path:
    """Tokenise the sources of ``config`` into the folder ``out``, and return it.

    The process may be killed at any moment: with ``resume``, finished tasks are kept and the others run, also those
    whose shards are missing or have another size; in a complete folder, also those whose shards have changed.

    Args:
        progress: called with the bytes of input that were read, and all of them; 0 if unknown.
        engine: runs the tasks elsewhere; Slurm does so after this function returns.

    Raises:
        UserError: for sources or a tokenizer that cannot be loaded, text that cannot be read, and an ``out`` that holds
            something else, was prepared with other settings, or is not writable.
    """
    out = Path(out).absolute()
    config.validate()
    require_writable(out)
    begun = is_prepared(out)
    if out.exists() and {path.name for path in out.iterdir()} - {TOKENIZER, SHARDS} and not (begun and resume):
        kind = "a preparation; continue or repair it (--resume), or" if begun else "something else;"
        raise UserError(f"{out} holds {kind} choose another folder")
    sources = find_sources(config.sources, config.validation)
    if engine is not None:
        engine.check(config)
    elif config.filters or config.dedup:
        raise UserError("filters and deduplication need datatrove; give --engine local, slurm or ray")
    plan = _begin(config, out, sources)
    records, dtype = read_records(out), plan["dtype"]
    todo = [task for task, record in enumerate(records) if not record or wrong_size(out, task, record, dtype)]
    if not todo:  # a complete folder: perhaps its content has changed
        todo = [task for task, record in enumerate(records) if record and wrong_content(out, task, record)]
    for unfinished in out.rglob(f"*{PARTIAL}"):  # of a killed process
        unfinished.unlink()
    if engine is not None:
        engine.run(out, plan, todo)
        return out
    tasks, done = len(records), 0
    total = sum(source.size for task in todo for source in sources[task::tasks])

    def advance(read: int) -> None:
        nonlocal done
        done += read
        progress(done, total)

    for task in todo:
        reader = reader_of(plan, task, advance)
        write_task(out, plan, task, texts_of(plan, task, reader), reader.left_out)
    return out


def totals(folder: Path | str) -> dict[str, Counter[str]]:
    """Sums over the tasks: for each side ``tokens``, ``documents`` and ``text_bytes``; and the counts ``left_out``."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in (*SPLITS, "left_out")}
    for record in filter(None, read_records(folder)):
        for name, counts in sums.items():
            counts.update({key: value for key, value in record[name].items() if key != "checksums"})
    return sums


def _begin(config: PrepareConfig, out: Path, sources: Sequence[Source]) -> dict[str, Any]:
    """The plan of the folder, which is written if there is none; raises UserError if it has another one."""
    files = len(sources) if all(source.kind != "hub" for source in sources) else None
    tasks = config.tasks or min(files or 1, MAX_TASKS)
    if files is not None and tasks > files:
        raise UserError(f"tasks is {tasks}, and the sources have {files} files, which are not divided; give fewer")
    settings = json.loads(json.dumps({**asdict(config), "tasks": tasks}))
    plan: dict[str, Any] = {"settings": settings, "files": [source.to_dict() for source in sources]}
    if is_prepared(out):
        there = read_plan(out)
        if different := differences({key: there.get(key) for key in plan}, plan):
            listed = "\n  ".join(different)
            raise UserError(
                f"{out} was prepared with other settings or files (there against here):\n  {listed}\n"
                "give the same, or choose another folder"
            )
        return there
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


def _sample(config: PrepareConfig, sources: Sequence[Source]) -> Iterator[str]:
    """Training text: an equal share from the beginning of each file, in the order of a hash of their names."""
    reader = Reader(config.field, config.validation, config.skip_invalid)
    left = config.sample_characters
    share = max(_MIN_SAMPLE, left // len(sources))
    for source in sorted(sources, key=lambda source: hash_of_name(source.path)):
        quota = min(share, left)
        for split, text in reader.texts(source):
            if split == "train":
                yield text[:quota]
                used = min(len(text), quota)
                quota, left = quota - used, left - used
            if quota <= 0:
                break
        if left <= 0:
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
    tokenizer = load_tokenizer(out / TOKENIZER)
    with ExitStack() as stack:
        shards = {split: stack.enter_context(_Shard(out / SHARDS / f"{split}-{task:05d}", plan)) for split in SPLITS}
        for batch in _batches(texts):
            for (split, text), ids in zip(batch, encode_all(tokenizer, [text for _, text in batch]), strict=True):
                shards[split].add(text, ids)
    record = {**{split: shard.record for split, shard in shards.items()}, "left_out": dict(left_out)}
    write_whole(out / SHARDS / f"{task:05d}.json", json.dumps(record, indent=1) + "\n")


def _batches(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Lists of (split, text), of about ``_BATCH`` characters."""
    batch, size = [], 0
    for pair in texts:
        batch.append(pair)
        size += len(pair[1])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Shard:
    """The two files of a shard. They appear when the context ends without an error, and ``record`` describes them."""

    def __init__(self, path: Path, plan: dict[str, Any]):
        self.path = path
        self.dtype, self.end = np.dtype(plan["dtype"]), plan["tokenizer"]["end_of_text"]
        self.tokens = self.text_bytes = 0
        self.digest, self.starts = new_digest(), array("q")
        self.record: dict[str, Any] = {}

    def __enter__(self) -> _Shard:
        self._stack = ExitStack()
        partial = self._stack.enter_context(replacing(self.path.with_suffix(TOKENS)))
        self._file = self._stack.enter_context(partial.open("wb"))
        return self

    def add(self, text: str, ids: np.ndarray) -> None:
        """Append a document, followed by the end of text."""
        self.starts.append(self.tokens)
        data = np.append(ids, self.end).astype(self.dtype)
        self._file.write(data.data)
        self.digest.update(data.data)
        self.tokens += len(data)
        self.text_bytes += len(text.encode())

    def __exit__(self, *error) -> None:
        self._stack.__exit__(*error)
        if error[0] is not None:
            return
        documents, digest = np.array(self.starts, DOCUMENT_DTYPE).tobytes(), new_digest()
        digest.update(documents)
        with replacing(self.path.with_suffix(DOCUMENTS)) as partial:
            partial.write_bytes(documents)
        self.record = {
            "tokens": self.tokens,
            "documents": len(self.starts),
            "text_bytes": self.text_bytes,
            "checksums": {TOKENS: self.digest.hexdigest(), DOCUMENTS: digest.hexdigest()},
        }
