"""The items that the loaders of this package return: grounded questions, multiple-choice questions, labelled texts."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from diff_transformer.data.documents import hash_of_name
from diff_transformer.errors import UserError

TEST_SHARE = 0.2


@dataclass(frozen=True)
class GroundedItem:
    """A document with a question about it, or to be summarised."""

    kind: str  # "summary" or "question"
    document: str  # the text that the answer must be grounded in; empty for a question without one
    question: str = ""  # empty for a summary
    references: tuple[str, ...] = ()  # right answers, each sufficient; for a summary, the reference summary
    id: str = ""


@dataclass(frozen=True)
class MultipleChoiceItem:
    """A question with choices, or the beginning of a text with possible endings."""

    question: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice


@dataclass(frozen=True)
class MultipleChoiceSet:
    """The items of one task."""

    items: list[MultipleChoiceItem]  # to score
    # few-shot examples; if there are none, the other items serve as examples
    examples: list[MultipleChoiceItem] = field(default_factory=list)


@dataclass(frozen=True)
class PublishedSet:
    """Rows of a published set, with the columns that it has on the hub."""

    task: str  # of lm-evaluation-harness
    items: list[dict]  # to score
    examples: list[dict] = field(default_factory=list)  # as of ``MultipleChoiceSet``


@dataclass(frozen=True)
class Labelled:
    """A text without line breaks and its label in words."""

    text: str
    label: str


@dataclass(frozen=True)
class LabelledSet:
    """A labelled set for many-shot classification.

    Raises:
        ValueError: for an empty side, fewer than two labels, or a label that only ``test`` has.
    """

    name: str
    train: tuple[Labelled, ...]  # examples that a prompt may show
    test: tuple[Labelled, ...]  # examples to classify; every label occurs in `train`
    text_name: str = "Text"  # the word for a text in a prompt
    label_name: str = "Label"  # the word for a label in a prompt

    def __post_init__(self):
        if not self.train or not self.test or len(self.labels) < 2:
            raise UserError(
                f"{self.name} has {len(self.train)} training and {len(self.test)} test texts of {len(self.labels)} "
                "labels; give at least one of each, and two labels"
            )
        unknown = sorted({example.label for example in self.test} - set(self.labels))
        if unknown:
            raise UserError(f"{self.name}: the test labels {', '.join(unknown[:5])} are not among the training labels")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of ``train``, sorted."""
        return tuple(sorted({example.label for example in self.train}))

    def ask(self, text: str) -> str:
        """A prompt that the label of ``text`` follows, after a space."""
        return f"{self.text_name}: {text}\n{self.label_name}:"


def make_example(text: str, label: str) -> Labelled:
    """An example with all white space replaced by single spaces."""
    return Labelled(" ".join(text.split()), " ".join(label.split()))


def in_words(label: str) -> str:
    """``"card_arrival"`` as ``"card arrival"``."""
    return " ".join(label.replace("_", " ").split())


def check_distinct(words: dict[str, str], where: object) -> None:
    """Raise ValueError if two labels have the same words, or a label has none."""
    by_words: dict[str, str] = {}
    for label, said in words.items():
        if not said or by_words.setdefault(said, label) != label:
            raise UserError(f"{where}: the labels {by_words.get(said, '')!r} and {label!r} read the same, {said!r}")


def hold_out(examples: Iterable[Labelled]) -> tuple[tuple[Labelled, ...], tuple[Labelled, ...]]:
    """(train, test) of a set without a split: a fifth of the examples is for testing, by a hash of the text.

    Test examples of a class without training examples are left out.
    """
    splits: tuple[list[Labelled], list[Labelled]] = ([], [])
    for example in examples:
        splits[hash_of_name(example.text) < TEST_SHARE].append(example)
    train, test = splits
    shown = {example.label for example in train}
    return tuple(train), tuple(example for example in test if example.label in shown)
