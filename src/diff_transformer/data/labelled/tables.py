"""Labelled texts in tables: CSV (Banking-77), JSON lines, and the JSON of Clinic-150."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from diff_transformer.data.labelled.types import Labelled, check_distinct, in_words, make_example
from diff_transformer.data.records import as_rows, read_records, read_text

TEXT_COLUMNS = ("text", "query", "question", "sentence", "utterance")
LABEL_COLUMNS = ("category", "label_text", "intent", "label", "class")
OUT_OF_SCOPE = "oos"  # Clinic-150 proper is its 150 intents


def read_csv(path: Path) -> list[Labelled]:
    """The rows of a CSV file whose header names a text and a label column; quoted fields may hold line breaks.

    Raises:
        ValueError: where there are no such columns, naming those there are.
    """
    return from_rows(list(csv.DictReader(io.StringIO(read_text(path)))), path)


def read_json_lines(path: Path) -> list[Labelled]:
    """The rows of a JSON-lines file, with the same columns as a CSV file."""
    return from_rows(as_rows(read_records(path), path), path)


def read_clinic(path: Path) -> tuple[list[Labelled], list[Labelled]]:
    """(train, test) of ``data_full.json`` and its siblings: lists of ``[text, intent]`` under "train" and "test".

    Out-of-scope texts are left out.

    Raises:
        ValueError: for JSON of another shape.
    """
    data = read_records(path)
    if not isinstance(data, dict) or not all(isinstance(data.get(side), list) for side in ("train", "test")):
        raise ValueError(f'{path} has no lists "train" and "test" of [text, intent], as Clinic-150 has')
    sides = []
    for side in ("train", "test"):
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in data[side]):
            raise ValueError(f'{path}: "{side}" is not a list of [text, intent], as Clinic-150 has')
        sides.append(from_pairs(((str(text), str(intent)) for text, intent in data[side]), path))
    return sides[0], sides[1]


def from_rows(rows: Sequence[Mapping], where: object) -> list[Labelled]:
    """Examples of rows whose columns have one of the usual names.

    Raises:
        ValueError: where there are no such columns, naming those there are.
    """
    columns = list(rows[0]) if rows else []
    text = next((name for name in TEXT_COLUMNS if name in columns), None)
    label = next((name for name in LABEL_COLUMNS if name in columns), None)
    if text is None or label is None:
        raise ValueError(
            f"{where} has the columns {', '.join(map(str, columns)) or 'none'}; it needs a text "
            f"({', '.join(TEXT_COLUMNS)}) and a label ({', '.join(LABEL_COLUMNS)})"
        )
    incomplete = next((i for i, row in enumerate(rows, start=1) if row.get(text) is None or row.get(label) is None), 0)
    if incomplete:
        raise ValueError(f"{where}: row {incomplete} has no {text} or no {label}")
    return from_pairs(((str(row[text]), str(row[label])) for row in rows), where)


def from_pairs(pairs: Iterable[tuple[str, str]], where: object) -> list[Labelled]:
    """Examples of (text, label), the labels in words; out-of-scope and empty texts are left out."""
    kept = [(text, label) for text, label in pairs if label != OUT_OF_SCOPE and text.strip()]
    words = {label: in_words(label) for _, label in kept}
    check_distinct(words, where)
    return [make_example(text, words[label]) for text, label in kept]
