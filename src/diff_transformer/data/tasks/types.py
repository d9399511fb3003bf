"""What the loaders of this package return: questions about texts, multiple-choice questions, labelled texts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from diff_transformer.data.documents import hash_of_name

TEST_SHARE = 0.2


@dataclass(frozen=True)
class GroundedItem:
    """A document and what is asked of it.

    Attributes:
        kind: "summary" or "question".
        document: the text that the answer must stay with; empty for a question without one.
        question: empty for a summary.
        references: right answers, each sufficient; for a summary the reference summary.
    """

    kind: str
    document: str
    question: str = ""
    references: tuple[str, ...] = ()
    id: str = ""


@dataclass(frozen=True)
class MultipleChoiceItem:
    """A question and its choices.

    Attributes:
        question: the question or, with ``completion``, the beginning of a text.
        choices: answers, or continuations of the text.
        answer: index of the right choice.
        ending: text that follows every choice and is scored in its place (WinoGrande); empty for none.
    """

    question: str
    choices: tuple[str, ...]
    answer: int
    completion: bool = False
    ending: str = ""


@dataclass(frozen=True)
class MultipleChoiceSet:
    """Items to score, and items that few-shot examples come from (none: from the others of ``items``)."""

    items: list[MultipleChoiceItem]
    examples: list[MultipleChoiceItem] = field(default_factory=list)


@dataclass(frozen=True)
class Labelled:
    """A text without line breaks, and its label in words."""

    text: str
    label: str


@dataclass(frozen=True)
class LabelledSet:
    """Examples to show and examples to ask.

    Attributes:
        name: for results.
        train: examples that may be shown in a prompt.
        test: examples that are asked; every label is one of ``train``'s.
        text_name, label_name: what a prompt calls a text and its label.

    Raises:
        ValueError: for an empty side, fewer than two labels, or a label that only ``test`` has.
    """

    name: str
    train: tuple[Labelled, ...]
    test: tuple[Labelled, ...]
    text_name: str = "Text"
    label_name: str = "Label"

    def __post_init__(self):
        if not self.train or not self.test or len(self.labels) < 2:
            raise ValueError(
                f"{self.name} has {len(self.train)} training and {len(self.test)} test texts of {len(self.labels)} "
                "labels; give at least one of each, and two labels"
            )
        unknown = sorted({example.label for example in self.test} - set(self.labels))
        if unknown:
            raise ValueError(f"{self.name}: the test labels {', '.join(unknown[:5])} are not among the training labels")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of ``train``, sorted."""
        return tuple(sorted({example.label for example in self.train}))


def make_example(text: str, label: str) -> Labelled:
    """An example with white space (line breaks too) as single spaces."""
    return Labelled(" ".join(text.split()), " ".join(label.split()))


def in_words(label: str) -> str:
    """``"card_arrival"`` as ``"card arrival"``."""
    return " ".join(label.replace("_", " ").split())


def check_distinct(words: dict[str, str], where: object) -> None:
    """Raise ValueError where two labels have the same words."""
    by_words: dict[str, str] = {}
    for label, said in words.items():
        if not said or by_words.setdefault(said, label) != label:
            raise ValueError(f"{where}: the labels {by_words.get(said, '')!r} and {label!r} read the same, {said!r}")


def hold_out(examples: Iterable[Labelled]) -> tuple[tuple[Labelled, ...], tuple[Labelled, ...]]:
    """(train, test) of a set that comes in one piece: a fifth is asked, by a hash of the text.

    The same text falls on one side; a text of a class that would have none to show is left out.
    """
    sides: tuple[list[Labelled], list[Labelled]] = ([], [])
    for example in examples:
        sides[hash_of_name(example.text) < TEST_SHARE].append(example)
    train, test = sides
    shown = {example.label for example in train}
    return tuple(train), tuple(example for example in test if example.label in shown)
