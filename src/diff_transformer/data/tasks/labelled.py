"""Labelled texts for many-shot classification (section 3.5): public sets from files or the hub, and one from Python."""

from collections.abc import Iterable
from pathlib import Path

from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.tasks.python_tasks import python_labels
from diff_transformer.data.tasks.rows import rows_of, suffix_of
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
ACCEPTED = (
    '"python"; "hub:trec", "hub:trec-fine", "hub:banking77", "hub:clinic150", "hub:OWNER/NAME"; a file (.label, .csv, '
    ".jsonl, .parquet); or a folder with a file for training and one for testing"
)
# The words of TREC's classes. A file of the set has a question a line, in Latin-1: "LOC:city What is ... ?".
COARSE = {
    "ABBR": "abbreviation", "DESC": "description", "ENTY": "entity", "HUM": "human", "LOC": "location", "NUM": "number",
}  # fmt: skip
FINE = {
    "ABBR:exp": "expansion of an abbreviation", "ABBR:abb": "abbreviation", "DESC:def": "definition",
    "DESC:desc": "description", "ENTY:body": "body part", "ENTY:cremat": "creative work",
    "ENTY:dismed": "disease or medicine", "ENTY:instru": "musical instrument", "ENTY:lang": "language",
    "ENTY:other": "other entity", "ENTY:techmeth": "technique or method",
    "ENTY:termeq": "equivalent term", "ENTY:veh": "vehicle", "HUM:desc": "description of a person",
    "HUM:gr": "group or organization", "HUM:ind": "individual", "HUM:title": "title of a person",
    "LOC:mount": "mountain", "LOC:other": "other location", "NUM:dist": "distance", "NUM:ord": "order or rank",
    "NUM:other": "other number", "NUM:perc": "percentage", "NUM:period": "period of time",
    "NUM:temp": "temperature", "NUM:volsize": "volume or size",
}  # fmt: skip


def load_labelled(source: str | Path = "python", *, fine: bool = False) -> LabelledSet:
    """The labelled set named by ``source``.

    Args:
        source: ``"python"`` (offline: ``python_labels``), ``"hub:NAME"`` (a name of ``SETS``, or ``OWNER/NAME`` with a
            text and a label column), or a path. In a folder, the files with "train" and "test" in their names are the
            sides. Of a single file, a fifth is for testing, by a hash of the text.
        fine: the 50 classes of a TREC file instead of its 6.

    Raises:
        UserError: for a set that cannot be loaded.
    """
    name = str(source)
    if name == "python":
        train, test = hold_out(python_labels())
        return LabelledSet(name, train, test, "Text", "Module")
    if name.startswith("hub:"):
        return _hub(name.removeprefix("hub:"))
    path = Path(name).expanduser()
    if path.is_dir():
        first, second = _sides(path)
        train, test = tuple(_examples(first, fine)), tuple(_examples(second, fine))
    else:
        first = path
        train, test = hold_out(_examples(path, fine))
    words = {".label": ("Question", "Type"), ".csv": ("Query", "Intent")}.get(suffix_of(first), ("Text", "Label"))
    return LabelledSet(path.name + ("-fine" if fine else ""), train, test, *words)


def _sides(folder: Path) -> tuple[Path, Path]:
    """The training and the test file: "train" is in the name of one, and the other has the same suffix."""
    for suffix in (".label", ".csv", ".jsonl", ".json", ".parquet"):
        files = sorted(file for file in folder.iterdir() if suffix_of(file) == suffix)
        train = [file for file in files if "train" in file.name.lower()]
        rest = [file for file in files if file not in train]
        test = [file for file in rest if "test" in file.name.lower()] or rest
        if len(train) == len(test) == 1:
            return train[0], test[0]
    raise UserError(f"{folder} has not one training and one test file; give {ACCEPTED}")


def _hub(name: str) -> LabelledSet:
    repository, config, column, revision, *words = SETS.get(name, (name, None, None, None, "Text", "Label"))
    train, test = (
        tuple(
            from_rows(rows_of(f"hub:{repository}", config=config, split=split, revision=revision), repository, column)
        )
        for split in ("train", "test")
    )
    return LabelledSet(f"hub:{name}", train, test, *words)


def _examples(path: Path, fine: bool) -> list[Labelled]:
    if not path.is_file():
        raise UserError(f"no labelled set at {path}; give {ACCEPTED}")
    if suffix_of(path) != ".label":
        return from_rows(rows_of(str(path)), path)
    lines = [line.partition(" ") for line in path.read_text(encoding="latin-1").splitlines() if line.strip()]
    if not all(text.strip() and code.partition(":")[0] in COARSE for code, _, text in lines):
        raise UserError(f"{path} is not a file of TREC; its lines read 'LOC:city What is ... ?'")
    return [make_example(text, trec_words(code, fine=fine)) for code, _, text in lines]


def trec_words(code: str, *, fine: bool) -> str:
    """The words of a class of TREC such as ``LOC:city``, or of its coarse class."""
    return FINE.get(code, code.partition(":")[2]) if fine else COARSE[code.partition(":")[0]]


def from_rows(rows: list[dict], where: object, label: str | None = None) -> list[Labelled]:
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
            f"{where} has the columns {', '.join(map(str, columns))}; it needs a text ({', '.join(TEXT_COLUMNS)}) and "
            f"a label ({', '.join(LABEL_COLUMNS)})"
        )
    pairs = [(str(row[text] or ""), str(row[label])) for row in rows if row[label] is not None]
    pairs = [(words, of) for words, of in pairs if of != OUT_OF_SCOPE and words.strip()]
    if label in ("coarse_label", "fine_label"):
        pairs = [(words, trec_words(of, fine=label == "fine_label")) for words, of in pairs]
    return [make_example(words, of) for words, of in pairs]


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
