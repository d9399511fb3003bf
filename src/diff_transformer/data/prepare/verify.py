"""Whether a prepared folder is what was written."""

from collections.abc import Callable
from pathlib import Path

from diff_transformer.data.prepare.shard_files import wrong_content
from diff_transformer.data.prepare.state import SHARDS, TOKENIZER
from diff_transformer.data.shards import read_manifest
from diff_transformer.data.tokenizer import load_tokenizer, tokenizer_hash


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
