"""Tokenise text of any size, once, into files that training maps into memory.

The files of the sources are divided among tasks: task i of n reads files i, i + n, ... and writes one shard for each
side. This process runs one task after another; an engine (``datatrove_tasks.py``) runs them on a cluster.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from filelock import FileLock, Timeout

from diff_transformer.checks import differences, read_json, require_known, require_positive
from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.prepared_folder import (
    DOCUMENT_DTYPE,
    DOCUMENTS,
    FORMAT,
    MANIFEST,
    PLAN,
    SHARDS,
    TASKS,
    TOKENIZER,
    TOKENS,
    VERSION,
    is_prepared,
    new_digest,
    read_manifest,
    read_plan,
    write_json,
    wrong_content,
    wrong_size,
)
from diff_transformer.data.sources import SPLITS, Reader, Source, find_sources
from diff_transformer.data.tokenizer import encode_all, ids_of, load_tokenizer, tokenizer_hash, train_tokenizer
from diff_transformer.durable import remove, replacing, require_writable
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILTERS = {  # classes of datatrove, by the name of the work that published the rules
    "gopher": ("GopherRepetitionFilter", "GopherQualityFilter"),
    "c4": ("C4QualityFilter",),
    "fineweb": ("FineWebQualityFilter",),
}
MAX_TASKS = 64  # by default
_LOCK = ".lock"
_PIECE = 1 << 18  # characters that are tokenised at a time: a longer document is cut between a letter and white space
_BATCH = 1 << 20  # characters
_MIN_SAMPLE = 65_536  # characters of each file in the sample


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of ``prepare``. They and the sources determine the folder to the byte."""

    sources: tuple[str, ...]  # texts to read, in this order (``sources.find_sources``)
    # "bpe" (byte-level, trained on a sample of the sources), "bytes", "cl100k", a file of tiktoken ranks (.tiktoken), a
    # folder written by save_pretrained, or a name on the Hugging Face hub
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
        """Raise ValueError for sizes not above 0, a share outside 0 to 1, and unknown names."""
        sizes = {"vocab_size": self.vocab_size, "sample_characters": self.sample_characters, "tasks": self.tasks}
        require_positive(**sizes)
        for name in self.filters:
            require_known("filter", name, FILTERS)
        if self.dedup not in (None, "minhash"):
            raise UserError(f"dedup is {self.dedup!r}; give minhash")
        if not 0 < self.validation < 1:
            raise UserError(f"validation is {self.validation}; give a share between 0 and 1, such as 0.01")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrepareConfig:
        """The config of a plan or manifest."""
        named: dict[str, Any] = {each.name: values[each.name] for each in fields(cls)}
        named |= {name: tuple(named[name]) for name in ("sources", "filters")}
        return cls(**named)


class Engine(Protocol):
    """Runs tasks elsewhere (``datatrove_tasks.Engine``)."""

    def check(self, config: PrepareConfig) -> None:
        """Raise an error if it cannot run tasks of ``config``."""

    def run(self, out: Path, plan: dict[str, Any], todo: Sequence[int]) -> bool:
        """Run these tasks; True if they run later."""
        ...


def prepare(
    config: PrepareConfig,
    out: Path | str,
    *,
    resume: bool = False,
    progress: Callable[[int, int], object] = lambda read, total: None,
    engine: Engine | None = None,
) -> dict[str, Any] | None:
    """Tokenise the sources of ``config`` into the folder ``out``; return its manifest.

    The process may be killed at any moment: with ``resume``, finished tasks are kept and the others run. In a complete
    folder, ``resume`` makes missing and damaged shards again.

    Args:
        progress: called with the bytes of input that were read, and all of them; 0 if unknown.
        engine: runs the tasks elsewhere.

    Returns:
        The manifest; None where Slurm runs the tasks, whose last job writes it.

    Raises:
        FileExistsError: ``out`` holds something, and ``resume`` is False or it is no preparation.
        FileNotFoundError, ValueError: for sources or a tokenizer that cannot be loaded, text that cannot be read, a
            side without a document, or an ``out`` of other settings, naming the differences.
        DiskError: ``out`` is a file or is not writable.
        RuntimeError: another process uses ``out``, or the engine cannot be used.
    """
    out = Path(out).absolute()
    config.validate()
    require_writable(out)
    begun = is_prepared(out)
    if out.exists() and {path.name for path in out.iterdir()} - {_LOCK, TOKENIZER} and not (begun and resume):
        kind = "a preparation; continue or repair it (--resume), or" if begun else "something else;"
        raise UserError(f"{out} holds {kind} choose another folder")
    sources = find_sources(config.sources, config.validation)
    if engine is not None:
        engine.check(config)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / _LOCK, timeout=0):
            plan = _begin(config, out, sources)
            if engine is None:
                _run_tasks(out, plan, progress)
            elif engine.run(out, plan, unfinished(out, plan)):
                return None
            return _finish(out, plan)
    except Timeout:
        raise UserError(f"another process is preparing {out}; wait for it, or choose another folder") from None


def _begin(config: PrepareConfig, out: Path, sources: Sequence[Source]) -> dict[str, Any]:
    """The plan of the folder, which is written if there is none; raises ValueError if it has another one."""
    there = read_plan(out)
    files = len(sources) if all(source.kind != "hub" for source in sources) else None
    tasks = config.tasks or min(files or 1, MAX_TASKS)
    if files is not None and tasks > files:
        raise UserError(f"tasks is {tasks}, and the sources have {files} files, which are not divided; give fewer")
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "settings": {
            **asdict(config),
            "tasks": tasks,
            "sources": list(config.sources),
            "filters": list(config.filters),
        },
        "files": [source.to_dict() for source in sources],
    }
    if there is not None:
        if different := differences({key: there.get(key) for key in plan}, plan):
            listed = "\n  ".join(different)
            raise UserError(
                f"{out} was prepared with other settings or files (there against here):\n  {listed}\n"
                "give the same, or choose another folder"
            )
        return there
    tokenizer = _tokenizer(config, sources)
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token to put between documents; set tokenizer.eos_token")
    size = ids_of(tokenizer)
    plan["tokenizer"] = {"hash": tokenizer_hash(tokenizer), "size": size, "end_of_text": tokenizer.eos_token_id}
    plan["dtype"] = "<u2" if size <= 1 << 16 else "<u4"
    remove(out / TOKENIZER)
    tokenizer.save_pretrained(out / TOKENIZER)
    write_json(out / PLAN, plan)
    return plan


def _tokenizer(config: PrepareConfig, sources: Sequence[Source]) -> PreTrainedTokenizerFast:
    if config.tokenizer != "bpe":
        return load_tokenizer(config.tokenizer)
    return train_tokenizer(_sample(config, sources), config.vocab_size)


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


def unfinished(out: Path, plan: dict[str, Any]) -> list[int]:
    """The tasks that have to run: without a record, or with a shard that is not as its record says."""
    manifest = read_manifest(out) if (out / MANIFEST).exists() else None
    wrong = wrong_size if manifest is None else wrong_content
    todo = []
    for rank in range(plan["settings"]["tasks"]):
        records = _records_of(out, manifest, rank)
        if not records or any(wrong(out / SHARDS, record, plan["dtype"]) for record in records):
            todo.append(rank)
    return todo


def _records_of(out: Path, manifest: dict[str, Any] | None, rank: int) -> list[dict[str, Any]]:
    """The records of the shards of a task, one for each side; empty if it has not finished."""
    if manifest is not None:
        return [manifest[split]["shards"][rank] for split in SPLITS]
    path = out / TASKS / f"{rank}.json"
    record = read_json(path) if path.exists() else {}
    return [record[split] for split in SPLITS if split in record]


def _run_tasks(out: Path, plan: dict[str, Any], progress: Callable[[int, int], object]) -> None:
    todo = unfinished(out, plan)
    if todo and (plan["settings"]["filters"] or plan["settings"]["dedup"]):
        raise UserError("filters and deduplication need an engine; give --engine local, slurm or ray")
    tasks, files = plan["settings"]["tasks"], [Source(**values) for values in plan["files"]]
    total = sum(source.size for rank in todo for source in files[rank::tasks])
    done = [0]

    def advance(read: int) -> None:
        done[0] += read
        progress(done[0], total)

    for rank in todo:
        reader = reader_of(plan, rank, advance)
        write_task(out, plan, rank, texts_of(plan, rank, reader), reader.left_out)


def reader_of(plan: dict[str, Any], rank: int, progress: Callable[[int], object] = lambda read: None) -> Reader:
    """The reader of a task."""
    settings = plan["settings"]
    part = (rank, settings["tasks"])
    return Reader(settings["field"], settings["validation"], settings["skip_invalid"], part, progress)


def texts_of(plan: dict[str, Any], rank: int, reader: Reader) -> Iterator[tuple[str, str]]:
    """(split, text) of the files of a task; every task reads its share of a data set of the hub."""
    for number, values in enumerate(plan["files"]):
        source = Source(**values)
        if source.kind == "hub" or number % plan["settings"]["tasks"] == rank:
            yield from reader.texts(source)


def write_task(
    out: Path, plan: dict[str, Any], rank: int, texts: Iterable[tuple[str, str]], left_out: Counter[str]
) -> None:
    """Tokenise the texts of a task into its shards, then write its record.

    Args:
        texts: (split, text), in order.
        left_out: counts that the reader of ``texts`` fills.
    """
    tokenizer = load_tokenizer(out / TOKENIZER)
    for folder in (SHARDS, TASKS):
        (out / folder).mkdir(exist_ok=True)
    with ExitStack() as stack:
        shards = {split: stack.enter_context(_Shard(out / SHARDS, f"{split}-{rank:05d}", plan)) for split in SPLITS}
        for batch in _batches(texts):
            encoded = encode_all(tokenizer, [piece for _, piece, _, _ in batch])
            for (split, piece, first, last), ids in zip(batch, encoded, strict=True):
                shards[split].add(piece, ids, first, last)
    records = {split: shard.record for split, shard in shards.items()}
    write_json(out / TASKS / f"{rank}.json", {**records, "left_out": dict(left_out)})


def _batches(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str, bool, bool]]]:
    """Lists of (split, piece of a text, first piece?, last piece?), of about ``_BATCH`` characters."""
    batch, size = [], 0
    for split, text in texts:
        parts = pieces(text)
        for number, piece in enumerate(parts, start=1):
            batch.append((split, piece, number == 1, number == len(parts)))
            size += len(piece)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def pieces(text: str) -> list[str]:
    """A long text, cut between a letter and white space, where byte-level tokenizers begin a token anyway."""
    found, start = [], 0
    while len(text) - start > _PIECE:
        end = next(
            (i for i in range(start + _PIECE, start + _PIECE // 2, -1) if text[i] in " \n" and text[i - 1].isalpha()),
            start + _PIECE,
        )
        found.append(text[start:end])
        start = end
    return [*found, text[start:]]


class _Shard:
    """The two files of a shard. They appear when the context ends without an error."""

    def __init__(self, folder: Path, name: str, plan: dict[str, Any]):
        self.path, self.name = folder / (name + TOKENS), name
        self.dtype, self.end = np.dtype(plan["dtype"]), plan["tokenizer"]["end_of_text"]
        self.tokens = self.text_bytes = 0
        self.digest, self.starts = new_digest(), array("q")

    def __enter__(self) -> _Shard:
        self._partial = replacing(self.path)
        self._file = self._partial.__enter__().open("wb")
        return self

    def add(self, piece: str, ids: np.ndarray, first: bool, last: bool) -> None:
        """Append a piece of a document; the last one is followed by the end of text."""
        if first:
            self.starts.append(self.tokens)
        data = np.append(ids, self.end).astype(self.dtype) if last else ids.astype(self.dtype)
        self._file.write(data.data)
        self.digest.update(data.data)
        self.tokens += len(data)
        self.text_bytes += len(piece.encode())

    def __exit__(self, *error) -> None:
        self._file.close()
        self._partial.__exit__(*error)
        if error[0] is not None:
            return
        documents, digest = np.array(self.starts, DOCUMENT_DTYPE).tobytes(), new_digest()
        digest.update(documents)
        with replacing(self.path.with_suffix(DOCUMENTS)) as partial:
            partial.write_bytes(documents)
        self.record = {
            "name": self.name,
            "tokens": self.tokens,
            "documents": len(self.starts),
            "text_bytes": self.text_bytes,
            "checksums": {TOKENS: self.digest.hexdigest(), DOCUMENTS: digest.hexdigest()},
        }


def _finish(out: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Write the manifest of a folder whose tasks have all finished, and return it."""
    before = read_manifest(out) if (out / MANIFEST).exists() else None
    written = {int(path.stem): read_json(path) for path in (out / TASKS).glob("*.json")}
    ranks = range(plan["settings"]["tasks"])
    if missing := [rank for rank in ranks if rank not in written and before is None]:
        raise UserError(f"tasks {missing} of {out} have not finished; continue with --resume and the same --engine")
    manifest: dict[str, Any] = {
        key: plan[key] for key in ("format", "version", "settings", "files", "tokenizer", "dtype")
    }
    for split in SPLITS:
        shards = [
            written[rank][split] if rank in written else before[split]["shards"][rank]  # ty: ignore[not-subscriptable]
            for rank in ranks
        ]
        totals = {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents", "text_bytes")}
        manifest[split] = {**totals, "shards": shards}
    left_out: Counter[str] = Counter()
    for task in written.values():
        left_out.update(task["left_out"])
    manifest["left_out"] = dict(left_out) if before is None else before["left_out"]
    _refuse_an_empty_side(manifest)
    if before is not None and manifest != before:
        raise UserError(f"a file of {out} has changed though its name and size have not; restore it, or prepare anew")
    write_json(out / MANIFEST, manifest)
    for name in (PLAN, TASKS):
        remove(out / name)
    return manifest


def _refuse_an_empty_side(manifest: dict[str, Any]) -> None:
    for split in SPLITS:
        if not manifest[split]["documents"]:
            counts = ", ".join(f"{count:,} {kind}" for kind, count in manifest["left_out"].items())
            total = sum(manifest[side]["documents"] for side in SPLITS)
            raise UserError(
                f"the {split} side has none of the {total:,} documents ({counts} left out); give more text, a larger "
                "--validation, or folders train/ and val/"
            )
