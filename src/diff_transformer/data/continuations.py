"""The beginning of a text and four ways to go on, one of them right: HellaSwag, and tasks of the same form from the
running Python's documentation.

    The names of the module are exported. A name that begins with an underscore is not.     context
    It can still be imported by its full name.                                              right
    The default is to close the file. | Each call returns a new list. | ...                 from other texts
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Document
from diff_transformer.data.hub import hub_rows
from diff_transformer.data.multiple_choice import MultipleChoiceItem, items_of, read_multiple_choice
from diff_transformer.data.seeding import evaluation_rng

CHOICES = 4
CONTEXT_CHARACTERS = (40, 400)
ENDING_CHARACTERS = (25, 110)
_SENTENCE_END = re.compile(r"(?<=[a-z)`'\"]\.) +(?=[A-Z`'\"])")
_PROSE = re.compile(r"[\w\s,.;:'\"()`*/-]+")


def load_continuations(data: str, *, seed: int = 0) -> list[MultipleChoiceItem]:
    """The tasks that ``data`` names: those of a file in its order, others in an order drawn from ``seed``.

    Args:
        data: "python" (made from the documentation that the corpus "python" holds out); a file of HellaSwag, as JSON
            lines or as text of six lines a task, plain or compressed; or "hub:NAME", say "hub:Rowan/hellaswag".

    Raises:
        FileNotFoundError: for a path that is not there.
        ValueError: for another format, or a set on the hub that cannot be had.
    """
    if data == "python":
        return continuations_of(load_corpus("python").validation, seed=seed)
    if data.startswith("hub:"):
        name = data.removeprefix("hub:")
        items = items_of(hub_rows(name, split="validation"), name)
        return [items[i] for i in evaluation_rng(seed, "order").permutation(len(items))]
    if not Path(data).is_file():
        raise FileNotFoundError(f"no file at {data!r}; give 'python', 'hub:Rowan/hellaswag' or a file of HellaSwag")
    return read_multiple_choice(Path(data))


def continuations_of(documents: Sequence[Document], *, seed: int = 0) -> list[MultipleChoiceItem]:
    """A task for each paragraph of prose in ``documents`` (those named code/... have none) with two sentences or more:
    its last sentence is right, the wrong ones are the last sentences of paragraphs of other documents.

    Raises:
        ValueError: where there are fewer than four documents with such a paragraph.
    """
    found = [(d.name, *split) for d in documents if not d.name.startswith("code/") for split in _paragraphs(d.text)]
    found = list({ending: (name, context, ending) for name, context, ending in found}.values())
    if len({name for name, _, _ in found}) < CHOICES:
        raise ValueError(f"{len(documents)} documents hold too few paragraphs for tasks; give a file of HellaSwag")
    items = []
    for index, (name, context, ending) in enumerate(found):
        rng = evaluation_rng(seed, "continuation", index)
        choices = [ending, *_others(rng, found, name)]
        order = [int(i) for i in rng.permutation(CHOICES)]
        right = order.index(0)
        items.append(MultipleChoiceItem(context, tuple(choices[i] for i in order), right, completion=True))
    return [items[i] for i in evaluation_rng(seed, "order").permutation(len(items))]


def _others(rng: np.random.Generator, found: list[tuple[str, str, str]], name: str) -> list[str]:
    """Three endings from three other documents."""
    taken: dict[str, str] = {}
    while len(taken) < CHOICES - 1:
        other, _, ending = found[rng.integers(len(found))]
        if other != name:
            taken.setdefault(other, ending)
    return list(taken.values())


def _paragraphs(text: str) -> list[tuple[str, str]]:
    """(context, last sentence) of each paragraph of prose; the context is the sentences before it that fit."""
    split = []
    for paragraph in text.split("\n\n"):
        *sentences, ending = _SENTENCE_END.split(" ".join(paragraph.split()))
        while len(" ".join(sentences)) > CONTEXT_CHARACTERS[1]:
            sentences.pop(0)
        context = " ".join(sentences)
        sizes = ((context, CONTEXT_CHARACTERS), (ending, ENDING_CHARACTERS))
        fits = all(low <= len(part) <= high for part, (low, high) in sizes)
        if fits and ending.endswith(".") and _PROSE.fullmatch(context + ending):
            split.append((context, ending))
    return split
