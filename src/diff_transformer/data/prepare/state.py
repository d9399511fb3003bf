"""What a folder that is being prepared knows of itself: its plan, the shards that are finished, the manifest.

plan.json        what was asked for; there from the start, replaced by the manifest at the end
finished.jsonl   a line for each finished shard; removed at the end
tokenizer/       as save_pretrained writes it
shards/          two files a shard
manifest.json    written last: a folder with it is complete
"""

import json
import os
from pathlib import Path

from diff_transformer.durable import remove, replacing, write_whole

MANIFEST, PLAN, JOURNAL, SHARDS, TOKENIZER = "manifest.json", "plan.json", "finished.jsonl", "shards", "tokenizer"
LOCK = ".lock"
_BEFORE_THE_PLAN = {LOCK, TOKENIZER, TOKENIZER + ".partial", PLAN + ".partial"}


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
