"""Labelled texts for many-shot classification (section 3.5): sets from files or the hub, and one from Python."""

from collections.abc import Iterable
from pathlib import Path

from diff_transformer.data.documents import hash_of_name
from diff_transformer.data.tasks.python_tasks import python_labels
from diff_transformer.data.tasks.rows import rows_of
from diff_transformer.data.tasks.types import Labelled, LabelledSet
from diff_transformer.errors import UserError

TEXT_COLUMNS = ("text", "query", "question", "sentence", "utterance")
LABEL_COLUMNS = ("category", "label_text", "intent", "label", "class", "coarse_label")
OUT_OF_SCOPE = "oos"  # not one of Clinic-150's 150 intents
TEST_SHARE = 0.2


def load_labelled(source: str | Path = "python") -> LabelledSet:
    """The labelled set named by ``source``.

    Args:
        source: ``"python"`` (offline: ``python_labels``); ``"hub:OWNER/NAME"`` or a folder, with the splits "train" and
            "test"; or a file, of which a fifth is for testing, by a hash of the text. The paper's sets are
            ``hub:CogComp/trec``, ``hub:PolyAI/banking77`` and ``hub:clinc/clinc_oos?config=plus``.

    Raises:
        UserError: for a set that cannot be loaded.
    """
    name = str(source)
    if name == "python":
        return LabelledSet(name, *hold_out(python_labels()), "Text", "Module")
    if name.startswith("hub:") or Path(name).expanduser().is_dir():
        train, test = (tuple(from_rows(rows_of(name, split=side))) for side in ("train", "test"))
        return LabelledSet(name, train, test)
    return LabelledSet(Path(name).name, *hold_out(from_rows(rows_of(name))))


def from_rows(rows: list[dict]) -> list[Labelled]:
    """Examples from rows with a text and a label column; out-of-scope and empty texts are left out.

    White space becomes single spaces; the label ``"card_arrival"`` reads ``"card arrival"``.

    Raises:
        UserError: if there are no such columns, naming the existing ones.
    """
    columns = list(rows[0])
    text, label = (next((name for name in of if name in columns), None) for of in (TEXT_COLUMNS, LABEL_COLUMNS))
    if text is None or label is None:
        raise UserError(
            f"the set has the columns {', '.join(map(str, columns))}; it needs a text ({', '.join(TEXT_COLUMNS)}) and "
            f"a label ({', '.join(LABEL_COLUMNS)})"
        )
    pairs = [(str(row.get(text) or ""), str(row[label])) for row in rows if row.get(label) is not None]
    return [
        Labelled(" ".join(words.split()), " ".join(of.replace("_", " ").split()))
        for words, of in pairs
        if of != OUT_OF_SCOPE and words.strip()
    ]


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
