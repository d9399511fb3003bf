"""Sources to a folder of shards: parallel, resumable, the same bytes every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from diff_transformer.checks import require_positive
from diff_transformer.data.prepare.config import PrepareConfig, TokenizerFacts, choose_tokenizer, facts_of
from diff_transformer.data.prepare.folder import (
    FORMAT,
    JOURNAL,
    LOCK,
    MANIFEST,
    PLAN,
    SHARDS,
    SIDES,
    TOKENIZER,
    VERSION,
    Journal,
    begin,
    finish,
    is_new,
    read_manifest,
    wrong_content,
    wrong_size,
)
from diff_transformer.data.prepare.pieces import Unit, units
from diff_transformer.data.prepare.readers import Tally, read_pieces
from diff_transformer.data.prepare.sources import TextSource, find_sources
from diff_transformer.data.prepare.workers import Task, shards
from diff_transformer.data.tokenizer import load_tokenizer
from diff_transformer.durable import require_writable


@dataclass
class Progress:
    """``read`` of ``total`` bytes of input (0: nobody knows); ``text_bytes`` and ``tokens`` made by this call."""

    read: int = 0
    total: int = 0
    text_bytes: int = 0
    tokens: int = 0


def prepare(
    config: PrepareConfig,
    out: Path | str,
    *,
    jobs: int = 1,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> dict:
    """Tokenise the sources of ``config`` to shards in the folder ``out``; the manifest that describes them.

    The bytes of the folder depend on the sources and on ``config`` alone: not on ``jobs``, nor on interruptions. At any
    moment the process may be killed; with ``resume`` finished shards are kept and the others made. In a folder that is
    complete ``resume`` makes the shards again that are missing or damaged. The input is read from its start each time,
    and a shard's text must be what it was. A preparation without a finished shard may be begun anew.

    Args:
        jobs: processes; memory is about jobs times six shards of text.

    Raises:
        FileExistsError: if ``out`` holds a finished shard and ``resume`` is False, or holds something else.
        FileNotFoundError, ValueError: for sources or a tokenizer that cannot be had, text that cannot be read, a side
            of the split without a document, or an ``out`` of another plan, naming the differences.
        DiskError: if ``out`` is a file, or may not be written to.
        RuntimeError: if another process is at work in ``out``, or one of its processes was killed.
    """
    out = Path(out)
    config.validate()
    require_positive(jobs=jobs)
    require_writable(out)
    fresh = is_new(out)
    if not fresh and not resume:
        raise FileExistsError(f"{out} {_what_is_in(out)}")
    if not fresh and not (out / PLAN).exists() and not (out / MANIFEST).exists():
        raise FileExistsError(f"{out} is not empty and holds no preparation; choose another folder")
    sources = find_sources(config.sources, config.validation)
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
            return _go_on(config, out, plan, sources, facts, jobs, progress)
    except Timeout:
        raise RuntimeError(f"another process is preparing {out}; wait for it, or choose another folder") from None
    except OSError as error:
        raise RuntimeError(f"{error}; what is finished is kept: go on with --resume") from error


def _what_is_in(out: Path) -> str:
    if (out / MANIFEST).exists():
        return "is prepared already; check or mend it (--verify, --resume) or choose another folder"
    if (out / PLAN).exists():
        return "holds an interrupted preparation; go on with it (--resume) or choose another folder"
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


def _go_on(config, out: Path, plan: dict, sources, facts: TokenizerFacts, jobs: int, progress) -> dict:
    manifest = read_manifest(out) if (out / MANIFEST).exists() else None
    _refuse_another(out, plan, manifest)
    kept = _intact(out, manifest, plan["dtype"])
    if manifest is not None and len(kept) == len(_records(manifest)):
        finish(out, manifest)
        return manifest
    (out / SHARDS).mkdir(exist_ok=True)
    tally, state = Tally(), Progress(total=sum(source.size for source in sources))
    if progress is not None:
        progress(state)
    pieces = read_pieces(
        sources, field=config.field, share=config.validation, skip_invalid=config.skip_invalid, tally=tally
    )

    def missing() -> Iterator[Unit]:
        for unit in units(pieces, config.shard_bytes):
            if unit.name in known and known[unit.name] != unit.text_hash():
                raise ValueError(_changed(out, unit.name))
            if unit.name not in kept:
                yield unit
                continue
            seen.add(unit.name)
            state.read += unit.read
            if progress is not None:
                progress(state)

    seen: set[str] = set()
    records = list(kept.values()) if manifest is None else _records(manifest)
    known = {record["name"]: record["text_hash"] for record in records}
    journal = Journal(out / JOURNAL)
    task = Task(out / SHARDS, facts.state, facts.dtype, facts.end_of_text)
    for record, unit in shards(missing(), task, jobs):
        if manifest is None:
            journal.add(record)
        elif record not in manifest[unit.side]["shards"]:
            raise ValueError(_changed(out, unit.name))
        kept[unit.name] = record
        seen.add(unit.name)
        state.read += unit.read
        state.text_bytes += record["text_bytes"]
        state.tokens += record["tokens"]
        if progress is not None:
            progress(state)
    if seen != set(kept):
        raise ValueError(_changed(out, min(set(kept) - seen)))
    _refuse_an_empty_side(tally, config)
    made = manifest or {**plan, **{side: _side(kept, side) for side in SIDES}, "left_out": {}}
    made["left_out"] = {"blank": tally.blank, "invalid": tally.invalid}
    finish(out, made)
    return made


def _refuse_another(out: Path, plan: dict, manifest: dict | None) -> None:
    import json

    from diff_transformer.checks import differences

    whole: dict = manifest or json.loads((out / PLAN).read_text())
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
        f"{out} is a preparation with other settings (there against here):\n  {listed}\n"
        f"remove {out} to begin anew, or choose another folder"
    )


def _intact(out: Path, manifest: dict | None, dtype: str) -> dict[str, dict]:
    """Records of the shards that need not be made, by name. A complete folder is read wholly, for its checksums."""
    folder = out / SHARDS
    if manifest is not None:
        records = _records(manifest)
        return {record["name"]: record for record in records if wrong_content(folder, record, dtype) is None}
    records = Journal(out / JOURNAL).records.values()
    return {record["name"]: record for record in records if wrong_size(folder, record, dtype) is None}


def _records(manifest: dict) -> list[dict]:
    return [record for side in SIDES for record in manifest[side]["shards"]]


def _changed(out: Path, name: str) -> str:
    return (
        f"the text of {name} is not what {out} was prepared from: a source has changed though its name and size have "
        "not; put the old one back, or prepare into another folder"
    )


def _refuse_an_empty_side(tally: Tally, config: PrepareConfig) -> None:
    if not tally.train + tally.validation:
        raise ValueError(f"the sources hold no text: {tally.blank} blank and {tally.invalid} invalid documents")
    for side, count in (("training", tally.train), ("validation", tally.validation)):
        if not count:
            total = tally.train + tally.validation
            raise ValueError(
                f"none of the {total} documents fell to the {side} side at a held-out share of {config.validation}; "
                f"give more text, or folders train/ and val/"
            )


def _side(records: dict[str, dict], side: str) -> dict:
    mine = [records[name] for name in sorted(records) if name.startswith(side)]
    return {**{key: sum(r[key] for r in mine) for key in ("tokens", "documents", "text_bytes")}, "shards": mine}
