"""Labelled texts for many-shot classification (section 3.5): public sets from files or the hub, and one from Python."""

from collections.abc import Iterable
from pathlib import Path

from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.sources import suffix_of
from diff_transformer.data.tasks.python_tasks import python_labels
from diff_transformer.data.tasks.rows import SUFFIXES, rows_of
from diff_transformer.data.tasks.types import Labelled, LabelledSet, make_example
from diff_transformer.errors import UserError

SETS = {  # name -> repository, configuration, label column, revision, words for text and label
    "trec": ("CogComp/trec", None, "coarse_label", "refs/convert/parquet", "Question", "Type"),
    "trec-fine": ("CogComp/trec", None, "fine_label", "refs/convert/parquet", "Question", "Type"),
    "banking77": ("PolyAI/banking77", None, "label", "refs/convert/parquet", "Query", "Intent"),
    "clinic150": ("clinc/clinc_oos", "plus", "intent", None, "Query", "Intent"),
}
TEXT_COLUMNS = ("text", "query", "question", "sentence", "utterance")
LABEL_COLUMNS = ("category", "label_text", "intent", "label", "class")
OUT_OF_SCOPE = "oos"  # not one of Clinic-150's 150 intents
TEST_SHARE = 0.2
TREC = {  # words of its classes, of which "LOC:city" is a part of "LOC"
    "ABBR": "abbreviation", "DESC": "description", "ENTY": "entity", "HUM": "human", "LOC": "location", "NUM": "number",
}  # fmt: skip


def load_labelled(source: str | Path = "python") -> LabelledSet:
    """The labelled set named by ``source``.

    Args:
        source: ``"python"`` (offline: ``python_labels``), ``"hub:NAME"`` (a name of ``SETS``, or ``OWNER/NAME`` with a
            text and a label column), or a path. In a folder, the files with "train" and "test" in their names are the
            sides. Of a single file, a fifth is for testing, by a hash of the text.

    Raises:
        UserError: for a set that cannot be loaded.
    """
    name = str(source)
    if name == "python":
        return LabelledSet(name, *hold_out(python_labels()), "Text", "Module")
    if name.startswith("hub:"):
        name = name.removeprefix("hub:")
        repository, config, column, revision, *words = SETS.get(name, (name, None, None, None, "Text", "Label"))
        of_hub = {"config": config, "revision": revision}
        train, test = (
            from_rows(rows_of(f"hub:{repository}", split=split, **of_hub), column) for split in ("train", "test")
        )
        return LabelledSet(f"hub:{name}", tuple(train), tuple(test), *words)
    path = Path(name).expanduser()
    if not path.is_dir():
        return LabelledSet(path.name, *hold_out(from_rows(rows_of(name))))
    sides: list[tuple[Labelled, ...]] = []
    for side in ("train", "test"):
        files = [file for file in path.iterdir() if side in file.name.lower() and suffix_of(file) in SUFFIXES]
        if len(files) != 1:
            raise UserError(f"{path} has {len(files)} files with {side!r} in their names; give one train and one test")
        sides.append(tuple(from_rows(rows_of(str(files[0])))))
    train, test = sides
    return LabelledSet(path.name, train, test)


def from_rows(rows: list[dict], label: str | None = None) -> list[Labelled]:
    """Examples from rows with a text and a label column; out-of-scope and empty texts are left out.

    Args:
        label: the column; by default the first of a usual name.

    Raises:
        UserError: if there are no such columns, naming the existing ones.
    """
    columns = list(rows[0])
    text = next((name for name in TEXT_COLUMNS if name in columns), None)
    label = label or next((name for name in LABEL_COLUMNS if name in columns), None)
    if text is None or label not in columns:
        raise UserError(
            f"the set has the columns {', '.join(map(str, columns))}; it needs a text ({', '.join(TEXT_COLUMNS)}) and "
            f"a label ({', '.join(LABEL_COLUMNS)})"
        )
    pairs = [(str(row[text] or ""), str(row[label])) for row in rows if row[label] is not None]
    pairs = [(words, of) for words, of in pairs if of != OUT_OF_SCOPE and words.strip()]
    if label in ("coarse_label", "fine_label"):
        pairs = [(words, trec_words(of)) for words, of in pairs]
    return [make_example(words, of) for words, of in pairs]


def trec_words(code: str) -> str:
    """The words of a class of TREC: "location" for ``LOC``, "location city" for ``LOC:city``."""
    coarse, _, fine = code.partition(":")
    return f"{TREC[coarse]} {fine}"


def hold_out(examples: Iterable[Labelled]) -> tuple[tuple[Labelled, ...], tuple[Labelled, ...]]:
    """(train, test) of a set without a split: a fifth of the examples is for testing, by a hash of the text.

    Test examples of a class without training examples are left out.
    """
    sides: tuple[list[Labelled], list[Labelled]] = ([], [])
    for example in examples:
        sides[hash_of_name(example.text) < TEST_SHARE].append(example)
    train, test = sides
    shown = {example.label for example in train}
    return tuple(train), tuple(example for example in test if example.label in shown)
