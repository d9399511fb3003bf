"""Reading files of rows: text, JSON and JSON lines, plain or compressed."""

import bz2
import gzip
import json
import os
from pathlib import Path
from typing import Any

from diff_transformer.errors import UserError

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.bz2", ".json.bz2")


def read_text(path: str | os.PathLike) -> str:
    """The UTF-8 text of a file, decompressed if its name ends in .gz or .bz2.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not UTF-8, or not in the format of its name.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no file at {path}")
    unpack = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(path.suffix.lower(), bytes)
    try:
        return unpack(path.read_bytes()).decode("utf-8-sig")
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error})") from None


def read_records(path: str | os.PathLike) -> Any:
    """The value of a JSON file, or the list of values of a file of JSON lines.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not JSON, naming the line.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if ".jsonl" not in Path(path).name.lower() and "\n" not in text.strip():
            raise UserError(f"{path} is not JSON: {error}") from None
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number} is not JSON: {error}") from None
    return records


def as_rows(value: Any, path: object) -> list[dict]:
    """``value`` as a list of dictionaries; a dictionary is a list of one.

    Raises:
        ValueError: for any other value, naming ``path``.
    """
    rows = [value] if isinstance(value, dict) else value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no rows; give JSON lines, or a JSON list, of objects")
    return rows


def stem(path: str | os.PathLike) -> str:
    """The file's name without the suffixes of format and compression."""
    name = Path(path).name
    for suffix in (".gz", ".bz2", ".jsonl", ".json", ".txt"):
        name = name[: -len(suffix)] if name.lower().endswith(suffix) else name
    return name
