"""Labelled texts for many-shot classification (section 3.5): public sets from files or the hub, and one from Python."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diff_transformer.data.tasks.files import as_rows, read_records, read_text
from diff_transformer.data.tasks.python_tasks import python_labels
from diff_transformer.data.tasks.trec import read_label_file, trec_words
from diff_transformer.data.tasks.types import Labelled, LabelledSet, check_distinct, hold_out, in_words, make_example
from diff_transformer.errors import UserError

ACCEPTED = (
    '"python"; "hub:trec", "hub:trec-fine", "hub:banking77", "hub:clinic150"; a file (.label, .csv or .jsonl); '
    "or a folder with a file for training and one for testing"
)
_SUFFIXES = (".label", ".csv", ".jsonl")


def load_labelled(source: str | os.PathLike = "python", *, fine: bool = False) -> LabelledSet:
    """The labelled set named by ``source``.

    Args:
        source: ``"python"`` (offline: ``python_labels``), ``"hub:NAME"`` (a name of ``SETS``), or a path. In a folder,
            the file with "train" in its name is for training and the other one of its kind for testing ("test" if there
            are several). Of a single file, a fifth is for testing, by a hash of the text.
        fine: the 50 classes of TREC instead of its 6.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for a set that cannot be loaded, or ``fine`` for a set with one kind of classes.
    """
    name = str(source)
    if name.startswith("hub:"):
        wanted = name.removeprefix("hub:")
        _refuse_fine(fine and wanted not in ("trec", "trec-fine"), name)
        return load_hub_labelled("trec-fine" if fine else wanted)
    if name == "python":
        _refuse_fine(fine, name)
        return python_labels()
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"no labelled set at {name}; give {ACCEPTED}")
    train, test = _sides(path) if path.is_dir() else (path, None)
    kind = train.suffix.lower()
    if kind not in _SUFFIXES:
        raise UserError(f"{train} has suffix {kind!r}, which is not read; give {ACCEPTED}")
    _refuse_fine(fine and kind != ".label", name)
    return _from_files(path, train, test, kind, fine)


def _from_files(path: Path, train: Path, test: Path | None, kind: str, fine: bool) -> LabelledSet:
    def read(file: Path) -> list[Labelled]:
        if kind == ".label":
            return read_label_file(file, fine=fine)
        return read_csv(file) if kind == ".csv" else read_json_lines(file)

    splits = hold_out(read(train)) if test is None else (tuple(read(train)), tuple(read(test)))
    names = {".label": ("Question", "Type"), ".csv": ("Query", "Intent"), ".jsonl": ("Text", "Label")}[kind]
    return LabelledSet(path.name + ("-fine" if fine else ""), *splits, *names)


def _sides(folder: Path) -> tuple[Path, Path]:
    """The training and the test file."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    for suffix in _SUFFIXES:
        mine = [file for file in files if file.suffix.lower() == suffix]
        train = [file for file in mine if "train" in file.name.lower()]
        others = [file for file in mine if file not in train]
        tests = [file for file in others if "test" in file.name.lower()] or others
        if len(train) == 1 and len(tests) == 1:
            return train[0], tests[0]
    found = ", ".join(file.name for file in files[:8]) or "nothing"
    raise UserError(f"{folder} holds {found}; give a folder with one training and one test file, or one of: {ACCEPTED}")


def _refuse_fine(refused: bool, name: str) -> None:
    if refused:
        raise UserError(f"fine classes were asked for, which {name} does not have; only TREC has coarse and fine ones")


TEXT_COLUMNS = ("text", "query", "question", "sentence", "utterance")
LABEL_COLUMNS = ("category", "label_text", "intent", "label", "class")
OUT_OF_SCOPE = "oos"  # not one of Clinic-150's 150 intents


def read_csv(path: Path) -> list[Labelled]:
    """The rows of a CSV file whose header names a text and a label column; quoted fields may hold line breaks.

    Raises:
        ValueError: if there are no such columns, naming the existing ones, or if the file is no CSV.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline=None)))
    except csv.Error as error:
        raise UserError(f"{path} cannot be read as CSV ({error})") from None
    return from_rows(rows, path)


def read_json_lines(path: Path) -> list[Labelled]:
    """The rows of a JSON-lines file, with the same columns as a CSV file."""
    return from_rows(as_rows(read_records(path), path), path)


def from_rows(rows: Sequence[Mapping], where: object) -> list[Labelled]:
    """Examples from rows with a text and a label column of a usual name.

    Raises:
        ValueError: if there are no such columns, naming the existing ones.
    """
    columns = list(rows[0]) if rows else []
    text = next((name for name in TEXT_COLUMNS if name in columns), None)
    label = next((name for name in LABEL_COLUMNS if name in columns), None)
    if text is None or label is None:
        raise UserError(
            f"{where} has the columns {', '.join(map(str, columns)) or 'none'}; it needs a text "
            f"({', '.join(TEXT_COLUMNS)}) and a label ({', '.join(LABEL_COLUMNS)})"
        )
    incomplete = next((i for i, row in enumerate(rows, start=1) if row.get(text) is None or row.get(label) is None), 0)
    if incomplete:
        raise UserError(f"{where}: row {incomplete} has no {text} or no {label}")
    return from_pairs(((str(row[text]), str(row[label])) for row in rows), where)


def from_pairs(pairs: Iterable[tuple[str, str]], where: object) -> list[Labelled]:
    """Examples from pairs (text, label), with labels in words; out-of-scope and empty texts are left out."""
    kept = [(text, label) for text, label in pairs if label != OUT_OF_SCOPE and text.strip()]
    words = {label: in_words(label) for _, label in kept}
    check_distinct(words, where)
    return [make_example(text, words[label]) for text, label in kept]


SETS = {  # name -> repository, configuration, label column
    "trec": ("CogComp/trec", None, "coarse_label"),
    "trec-fine": ("CogComp/trec", None, "fine_label"),
    "banking77": ("PolyAI/banking77", None, "label"),
    "clinic150": ("clinc/clinc_oos", "plus", "intent"),
    "clinic150-small": ("clinc/clinc_oos", "small", "intent"),
}
_CONVERTED = "refs/convert/parquet"  # the hub's copy of a set whose loading script is no longer run


def load_hub_labelled(name: str) -> LabelledSet:
    """A set on the hub: one of ``SETS``, or ``OWNER/NAME`` or ``OWNER/NAME:CONFIG`` with a text and a label column.

    Raises:
        ValueError: if ``datasets`` is not installed or the set cannot be downloaded, for a set without a "train" and a
            "test" (or "validation") split, or without a text and a label column.
    """
    repository, config, column = SETS[name] if name in SETS else (*_split(name), None)
    splits = _download(repository, config)
    asked = next((split for split in ("test", "validation") if split in splits), None)
    if "train" not in splits or asked is None:
        raise UserError(f"{repository} has the sides {', '.join(splits)}; it needs train, and test or validation")
    train, test = (_examples(splits[split], column, repository) for split in ("train", asked))
    names = ("Question", "Type") if repository == "CogComp/trec" else ("Query", "Intent")
    return LabelledSet(f"hub:{name}", tuple(train), tuple(test), *(names if name in SETS else ("Text", "Label")))


def _split(name: str) -> tuple[str, str | None]:
    repository, _, config = name.partition(":")
    if "/" not in repository:
        raise UserError(f"no labelled set hub:{name}; there are: {', '.join(SETS)}, or OWNER/NAME[:CONFIG]")
    return repository, config or None


def _download(repository: str, config: str | None) -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError("a set from the hub needs the package datasets: pip install datasets") from None
    try:
        try:
            return load_dataset(repository, config)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            return load_dataset(repository, config, revision=_CONVERTED)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{repository} cannot be downloaded from the hub ({reason}); connect to the network once, after which it "
            "is cached, or give the path of the files, or data=python"
        ) from error


def _examples(rows: Any, column: str | None, where: str) -> list[Labelled]:
    columns = list(rows.column_names)
    text = next((name for name in TEXT_COLUMNS if name in columns), None)
    label = column if column in columns else next((name for name in LABEL_COLUMNS if name in columns), None)
    if text is None or label is None:
        raise UserError(f"{where} has the columns {', '.join(columns)}; it needs a text and a label")
    names = getattr(rows.features[label], "names", None)
    labels = [names[value] if names and isinstance(value, int) else str(value) for value in rows[label]]
    if label in ("coarse_label", "fine_label"):
        fine = label == "fine_label"
        return [make_example(t, trec_words(code, fine=fine)) for t, code in zip(rows[text], labels, strict=True)]
    return from_pairs(zip(rows[text], labels, strict=True), where)
