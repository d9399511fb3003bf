"""From sources to a folder of shards: parallel, resumable, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from diff_transformer.checks import differences, read_json, require_positive
from diff_transformer.data.prepare.config import PrepareConfig, TokenizerFacts, choose_tokenizer, facts_of
from diff_transformer.data.prepare.engine import ENGINES, Engine
from diff_transformer.data.prepare.folder import (
    FORMAT,
    JOURNAL,
    LOCK,
    MANIFEST,
    PLAN,
    SHARDS,
    SPLITS,
    TOKENIZER,
    VERSION,
    begin,
    changed,
    finish,
    is_new,
    read_journal,
    read_manifest,
    wrong_content,
    wrong_size,
)
from diff_transformer.data.prepare.pieces import Unit, units
from diff_transformer.data.prepare.readers import Tally, read_pieces
from diff_transformer.data.prepare.sources import TextSource, find_sources
from diff_transformer.data.prepare.tasks import run_tasks, with_tasks
from diff_transformer.data.prepare.workers import Task, shards
from diff_transformer.data.tokenizer import load_tokenizer
from diff_transformer.durable import append_lines, require_writable


@dataclass
class Progress:
    """The progress of a preparation."""

    read: int = 0  # bytes of input
    total: int = 0  # bytes of input; 0 if unknown
    text_bytes: int = 0  # tokenised by this call
    tokens: int = 0  # made by this call


def prepare(
    config: PrepareConfig,
    out: Path | str,
    *,
    jobs: int | None = 1,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    engine: Engine | None = None,
) -> dict | None:
    """Tokenise the sources of ``config`` into shards in the folder ``out``; return the manifest that describes them.

    The bytes of the folder depend on the sources and on ``config`` alone, not on ``jobs`` or on interruptions. The
    process may be killed at any moment: with ``resume``, finished shards are kept and the others are made. In a
    complete folder, ``resume`` rebuilds missing and damaged shards. The input is read from its start each time, and the
    text of a shard must not have changed. A preparation without a finished shard may be started anew.

    Args:
        jobs: number of processes. Memory is about six shards of text for each. With an engine, tasks at a time; None
            for no limit.
        progress: called after every shard, without an engine.
        engine: runs the preparation as ``config.tasks`` tasks. To resume one whose tasks are all finished, None does.

    Returns:
        The manifest; None where Slurm will run the tasks, and a last job of it write the manifest.

    Raises:
        FileExistsError: if ``out`` holds a finished shard and ``resume`` is False, or holds something else.
        FileNotFoundError, ValueError: for sources or a tokenizer that cannot be loaded, text that cannot be read, a
            side of the split without a document, or an ``out`` of another plan, naming the differences.
        DiskError: if ``out`` is a file or is not writable.
        RuntimeError: if another process uses ``out``, a worker process was killed, the disk is full, or the engine
            cannot be used.
    """
    out = Path(out)
    config.validate()
    require_positive(jobs=jobs)
    require_writable(out)
    if engine is not None:
        engine.check(config)
    fresh = is_new(out)
    if not fresh and not resume:
        raise FileExistsError(f"{out} {_what_is_in(out)}")
    if not fresh and not (out / PLAN).exists() and not (out / MANIFEST).exists():
        raise FileExistsError(f"{out} is not empty and holds no preparation; choose another folder")
    sources = find_sources(config.sources, config.validation)
    if engine is not None:
        config = with_tasks(config, sources)
    elif fresh and (config.tasks or config.filters or config.dedup):
        raise ValueError(f"tasks, filters and deduplication need an engine; give --engine {'|'.join(ENGINES)}")
    tokenizer = choose_tokenizer(config, sources) if fresh or config.tokenizer != "bpe" else None
    facts = facts_of(tokenizer if tokenizer is not None else load_tokenizer(out / TOKENIZER))
    plan = _plan(config, sources, facts)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / LOCK, timeout=0):
            if is_new(out):
                begin(out, plan, tokenizer)
            elif not resume:
                raise FileExistsError(f"{out} {_what_is_in(out)}")
            if config.tasks:
                return _run_tasks(config, out, plan, sources, facts, engine, jobs)
            return _Preparation(config, out, plan, sources, progress).run(facts, jobs or 1)
    except Timeout:
        raise RuntimeError(f"another process is preparing {out}; wait for it, or choose another folder") from None
    except OSError as error:
        raise RuntimeError(f"{error}; finished shards are kept: continue with --resume") from error


def _run_tasks(config, out: Path, plan: dict, sources, facts, engine: Engine | None, jobs: int | None) -> dict | None:
    """Run the tasks of a locked folder that are not finished; write and return the manifest, or None (Slurm).

    Raises:
        ValueError: if the folder is of another plan, or its text has changed.
    """
    manifest = read_manifest(out) if (out / MANIFEST).exists() else None
    _refuse_another(out, plan, manifest)
    wrong = wrong_size if manifest is None else wrong_content
    done = run_tasks(config, out, sources, facts, engine, jobs=jobs, wrong=wrong)
    if done is None:
        return None
    records, tally, filtered = done
    _refuse_an_empty_split(tally, config, filtered)
    left_out = {"blank": tally.blank, "invalid": tally.invalid, "filtered": filtered}
    made = {**plan, **{split: _split_of(records, split) for split in SPLITS}, "left_out": left_out}
    if manifest is not None and made != manifest:
        raise ValueError(changed(out, "a shard"))
    finish(out, made)
    return made


class _Preparation:
    """The state of a preparation whose folder is locked and has a plan or a manifest.

    Raises:
        ValueError: if the folder is of another plan.
    """

    def __init__(self, config: PrepareConfig, out: Path, plan: dict, sources: Sequence[TextSource], progress):
        self.config, self.out, self.plan, self.sources = config, out, plan, sources
        self.manifest = read_manifest(out) if (out / MANIFEST).exists() else None
        _refuse_another(out, plan, self.manifest)
        self.kept = _intact(out, self.manifest, plan["dtype"])  # records of shards that need not be made, by name
        records = list(self.kept.values()) if self.manifest is None else _records(self.manifest)
        self.text_hashes = {record["name"]: record["text_hash"] for record in records}
        self.seen: set[str] = set()
        self.tally = Tally()
        self.state = Progress(total=sum(source.size for source in sources))
        self._report = progress or (lambda state: None)

    def run(self, facts: TokenizerFacts, jobs: int) -> dict:
        """Make the shards that are missing; return the manifest."""
        out, manifest = self.out, self.manifest
        if manifest is not None and len(self.kept) == len(_records(manifest)):
            finish(out, manifest)
            return manifest
        (out / SHARDS).mkdir(exist_ok=True)
        self._report(self.state)
        task = Task(out / SHARDS, facts.state, facts.dtype, facts.end_of_text)
        for record, unit in shards(self._missing(), task, jobs):
            if manifest is None:
                append_lines(out / JOURNAL, [record])
            elif record not in manifest[unit.split]["shards"]:
                raise ValueError(changed(out, unit.name))
            self.kept[unit.name] = record
            self.state.text_bytes += record["text_bytes"]
            self.state.tokens += record["tokens"]
            self._advance(unit)
        if self.seen != set(self.kept):
            raise ValueError(changed(out, min(set(self.kept) - self.seen)))
        _refuse_an_empty_split(self.tally, self.config)
        made = manifest or {**self.plan, **{split: _split_of(self.kept, split) for split in SPLITS}, "left_out": {}}
        made["left_out"] = {"blank": self.tally.blank, "invalid": self.tally.invalid}
        finish(out, made)
        return made

    def _missing(self) -> Iterator[Unit]:
        """The units whose shards are to be made; the text of the others must not have changed."""
        config = self.config
        pieces = read_pieces(
            self.sources,
            field=config.field,
            share=config.validation,
            skip_invalid=config.skip_invalid,
            tally=self.tally,
        )
        for unit in units(pieces, config.shard_bytes):
            if unit.name in self.text_hashes and self.text_hashes[unit.name] != unit.text_hash():
                raise ValueError(changed(self.out, unit.name))
            if unit.name in self.kept:
                self._advance(unit)
            else:
                yield unit

    def _advance(self, unit: Unit) -> None:
        self.seen.add(unit.name)
        self.state.read += unit.read
        self._report(self.state)


def _what_is_in(out: Path) -> str:
    if (out / MANIFEST).exists():
        return "is prepared already; check or repair it (--verify, --resume) or choose another folder"
    if (out / PLAN).exists():
        return "holds an interrupted preparation; continue it (--resume) or choose another folder"
    return "is not empty and holds no preparation; choose another folder"


def _plan(config: PrepareConfig, sources: Sequence[TextSource], facts: TokenizerFacts) -> dict:
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": config.to_dict(),
        "sources": [source.description() for source in sources],
        "tokenizer": {"hash": facts.hash, "size": facts.size, "end_of_text": facts.end_of_text},
        "dtype": facts.dtype,
    }


def _refuse_another(out: Path, plan: dict, manifest: dict | None) -> None:
    whole: dict = manifest or read_json(out / PLAN)
    there: dict = {key: whole.get(key) for key in plan}
    if there == plan:
        return
    here, was = plan["tokenizer"]["hash"], there["tokenizer"]["hash"]
    if here != was:
        raise ValueError(
            f"{out} is prepared with a tokenizer of hash {was}, this one ({plan['settings']['tokenizer']}) has {here}; "
            "give the same tokenizer, or choose another folder"
        )
    listed = "\n  ".join(differences(there, plan))
    raise ValueError(
        f"{out} is a preparation with other settings (saved against given):\n  {listed}\n"
        f"remove {out} to start anew, or choose another folder"
    )


def _intact(out: Path, manifest: dict | None, dtype: str) -> dict[str, dict]:
    """Records of the intact shards, by name. The files of a complete folder are read, for their checksums."""
    folder = out / SHARDS
    if manifest is not None:
        records = _records(manifest)
        return {record["name"]: record for record in records if wrong_content(folder, record, dtype) is None}
    records = read_journal(out / JOURNAL).values()
    return {record["name"]: record for record in records if wrong_size(folder, record, dtype) is None}


def _records(manifest: dict) -> list[dict]:
    return [record for split in SPLITS for record in manifest[split]["shards"]]


def _refuse_an_empty_split(tally: Tally, config: PrepareConfig, filtered: int = 0) -> None:
    if not tally.train + tally.validation:
        dropped = f", and {filtered} that the filters drop" if filtered else ""
        raise ValueError(
            f"the sources hold no text: {tally.blank} blank and {tally.invalid} invalid documents{dropped}"
        )
    for split, count in (("training", tally.train), ("validation", tally.validation)):
        if not count:
            total = tally.train + tally.validation
            raise ValueError(
                f"none of the {total} documents fell to the {split} side at a held-out share of {config.validation}; "
                f"give more text, or folders train/ and val/"
            )


def _split_of(records: dict[str, dict], split: str) -> dict:
    mine = [records[name] for name in sorted(records) if name.startswith(split)]
    return {**{key: sum(r[key] for r in mine) for key in ("tokens", "documents", "text_bytes")}, "shards": mine}
