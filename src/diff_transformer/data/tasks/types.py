"""The items that the loaders of this package return: grounded questions, multiple-choice questions, labelled texts."""

from dataclasses import dataclass

from diff_transformer.errors import UserError


@dataclass(frozen=True)
class GroundedItem:
    """A document with a question about it, or to be summarised."""

    kind: str  # "summary" or "question"
    document: str  # the text that the answer must be grounded in; empty for a question without one
    question: str = ""  # empty for a summary
    references: tuple[str, ...] = ()  # right answers, each sufficient; for a summary, the reference summary


@dataclass(frozen=True)
class MultipleChoiceItem:
    """A question with choices, or the beginning of a text with possible endings."""

    question: str
    choices: tuple[str, ...]
    answer: int  # index of the right choice


@dataclass(frozen=True)
class Labelled:
    """A text without line breaks and its label in words."""

    text: str
    label: str


@dataclass(frozen=True)
class LabelledSet:
    """A labelled set for many-shot classification.

    Raises:
        UserError: for fewer than two labels, or a label that only ``test`` has.
    """

    name: str
    train: tuple[Labelled, ...]  # examples that a prompt may show
    test: tuple[Labelled, ...]  # examples to classify; every label occurs in `train`
    text_name: str = "Text"  # the word for a text in a prompt
    label_name: str = "Label"  # the word for a label in a prompt

    def __post_init__(self):
        unknown = {example.label for example in self.test} - set(self.labels)
        if not self.test or len(self.labels) < 2 or unknown:
            raise UserError(
                f"{self.name} has {len(self.train)} training texts of {len(self.labels)} labels and {len(self.test)} "
                f"test texts, {len(unknown)} of whose labels no training text has; give two labels or more, on both "
                "sides"
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of ``train``, sorted."""
        return tuple(sorted({example.label for example in self.train}))

    def ask(self, text: str) -> str:
        """A prompt that the label of ``text`` follows, after a space."""
        return f"{self.text_name}: {text}\n{self.label_name}:"
