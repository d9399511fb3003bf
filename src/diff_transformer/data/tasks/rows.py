"""Rows of question sets: of JSON, JSON-lines, CSV and parquet files, also compressed, or of the hub."""

import json
import os
from pathlib import Path
from typing import Any

from diff_transformer.checks import first_line, require_extra
from diff_transformer.data.sources import PACKED_SUFFIXES, hub_query, read_text, suffix_of
from diff_transformer.errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_SIDES = ("test", "validation", "dev", "train")


def rows_of(name: str, *, split: str | None = None) -> list:
    """The rows of a set, as dictionaries. Class labels are their names.

    Args:
        name: a file; a folder with a file for each split; or ``hub:NAME[?config=...&split=...&revision=...]``.
        split: of a folder or a data set of the hub; by default the first that it has of test, validation, dev, train.

    Raises:
        UserError: for a path that does not exist, a file that cannot be read, one without rows, and a data set that
            cannot be downloaded.
    """
    name = os.path.expanduser(name)
    path = Path(name)
    kind = suffix_of(path)
    if not name.startswith("hub:") and not path.is_dir() and (not path.is_file() or kind not in SUFFIXES):
        raise UserError(f"no file at {name}; give {', '.join(SUFFIXES)}, also .gz or .zst, or hub:NAME")
    rows = _json(path) if kind in (".json", ".jsonl") else _dataset(name, kind, split)
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{name} holds no rows; give JSON lines, or a JSON list, of objects")
    return rows


def stem_of(path: Path) -> str:
    """The file's name without the suffixes of format and compression."""
    return Path(path.stem if path.suffix.lower() in PACKED_SUFFIXES else path.name).stem


def _json(path: Path) -> list:
    text = read_text(path)
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise UserError(f"{path} is neither a JSON list nor JSON lines: {first_line(error)}") from None


def _dataset(name: str, kind: str, split: str | None) -> list[dict]:
    require_extra("data", f"reading {name}", "datasets")
    import datasets

    is_hub, (repository, options) = name.startswith("hub:"), hub_query(name)
    try:
        if not is_hub and kind in SUFFIXES:
            rows: Any = datasets.load_dataset(kind.removeprefix("."), data_files=name)
        else:
            rows = datasets.load_dataset(
                repository, options.get("config"), split=split or options.get("split"), revision=options.get("revision")
            )
        if isinstance(rows, dict):
            rows = rows[next(side for side in (*_SIDES, *rows) if side in rows)]
    except Exception as error:  # the type depends on the library's version and on where it fails
        advice, cause = "; connect this machine, give the set as a local file, or data=python", error.__cause__ or error
        reason = f"{type(cause).__name__}: {first_line(cause)}"
        raise UserError(f"{name} cannot be read ({reason}){advice if is_hub else ''}") from error
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.ClassLabel):
            names = feature.int2str(rows[column])
            rows = rows.remove_columns(column).add_column(column, names)
    return list(rows)
