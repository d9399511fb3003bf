"""Rows of question sets: of JSON, JSON-lines, CSV and parquet files, also compressed, or of the hub."""

import json
from pathlib import Path
from typing import Any

from diff_transformer.checks import first_line, require_extra
from diff_transformer.data.sources import PACKED_SUFFIXES, read_text, suffix_of
from diff_transformer.errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_SIDES = ("test", "validation", "dev", "train")


def rows_of(name: str, *, config: str | None = None, split: str | None = None, revision: str | None = None) -> list:
    """The rows of a file, or of ``hub:NAME``, as dictionaries. Class labels are their names.

    Args:
        config, revision: of a data set of the hub.
        split: of a data set of the hub; by default the first that it has of test, validation, dev, train.

    Raises:
        UserError: for a path that does not exist, a file that cannot be read, one without rows, and a data set that
            cannot be downloaded.
    """
    path = Path(name).expanduser()
    kind = suffix_of(path)
    if not name.startswith("hub:") and (not path.is_file() or kind not in SUFFIXES):
        raise UserError(f"no file at {name}; give {', '.join(SUFFIXES)}, also .gz, .zst, .bz2, .xz, or hub:NAME")
    rows = _json(path) if kind in (".json", ".jsonl") else _dataset(name, kind, config, split, revision)
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{name} holds no rows; give JSON lines, or a JSON list, of objects")
    return rows


def stem_of(path: Path) -> str:
    """The file's name without the suffixes of format and compression."""
    return Path(path.stem if path.suffix.lower() in PACKED_SUFFIXES else path.name).stem


def _json(path: Path) -> list:
    text = read_text(path)
    try:
        value = json.loads(text)
        return value if isinstance(value, list) else [value]
    except ValueError:  # perhaps JSON lines
        pass
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON: {first_line(error)}") from None
    return rows


def _dataset(name: str, kind: str, config: str | None, split: str | None, revision: str | None) -> list[dict]:
    require_extra("data", f"reading {name}", "datasets")
    import datasets

    hub = name.startswith("hub:")
    try:
        if hub:
            rows: Any = datasets.load_dataset(name.removeprefix("hub:"), config, split=split, revision=revision)
        else:
            rows = datasets.load_dataset(kind.removeprefix("."), data_files=name)
        if isinstance(rows, dict):
            rows = rows[next(side for side in (*_SIDES, *rows) if side in rows)]
    except Exception as error:  # the type depends on the library's version and on where it fails
        advice = "; connect this machine, give the set as a local file, or data=python" if hub else ""
        raise UserError(f"{name} cannot be read ({type(error).__name__}: {first_line(error)}){advice}") from error
    for column, feature in rows.features.items():
        if isinstance(feature, datasets.ClassLabel):
            names = feature.int2str(rows[column])
            rows = rows.remove_columns(column).add_column(column, names)
    return list(rows)
