"""Texts with four endings, of which one is right: HellaSwag, or made from the running Python's documentation.

The names of the module are exported. A name that begins with an underscore is not.     context
It can still be imported by its full name.                                              right ending
The default is to close the file. | Each call returns a new list. | ...                 from other texts
"""

import re
from collections.abc import Sequence

import numpy as np

from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Document
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.rows import rows_of
from diff_transformer.data.tasks.types import MultipleChoiceItem
from diff_transformer.errors import UserError

CHOICES = 4
CONTEXT_CHARACTERS = (40, 400)
ENDING_CHARACTERS = (25, 110)
_SENTENCE_END = re.compile(r"(?<=[a-z)`'\"]\.) +(?=[A-Z`'\"])")
_PROSE = re.compile(r"[\w\s,.;:'\"()`*/-]+")


def load_continuations(data: str, *, seed: int = 0) -> list[MultipleChoiceItem]:
    """The tasks that ``data`` names: those of a file in its order, others in an order drawn by ``seed``.

    Args:
        data: "python" (made from the documentation that the corpus "python" holds out); a file of HellaSwag's rows; or
            "hub:NAME", such as "hub:Rowan/hellaswag".

    Raises:
        UserError: for a path that does not exist, another format, or a set on the hub that cannot be downloaded.
    """
    if data == "python":
        return continuations_of(load_corpus("python").validation, seed=seed)
    hub = data.startswith("hub:")
    items = [_item(row, data) for row in rows_of(data, split="validation" if hub else None)]
    return [items[i] for i in evaluation_rng(seed, "order").permutation(len(items))] if hub else items


def _item(row: dict, source: str) -> MultipleChoiceItem:
    try:
        context = f"{row['activity_label']}: {row['ctx']}" if row.get("activity_label") else row["ctx"]
        endings, label = tuple(map(_clean, row["endings"])), int(row["label"])
        return MultipleChoiceItem(_clean(context), endings, range(len(endings))[label])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"a row of {source} is not one of HellaSwag, {{ctx, endings, label}} ({error!r})") from None


def continuations_of(documents: Sequence[Document], *, seed: int = 0) -> list[MultipleChoiceItem]:
    """A task for each paragraph of prose in ``documents`` with at least two sentences.

    The last sentence is the right ending; the wrong ones are the last sentences of paragraphs in other documents.
    Documents named code/... have no prose.

    Raises:
        UserError: if fewer than four documents have such a paragraph.
    """
    parts = [(d.name, *split) for d in documents if not d.name.startswith("code/") for split in _paragraphs(d.text)]
    parts = list({ending: (name, context, ending) for name, context, ending in parts}.values())
    if len({name for name, _, _ in parts}) < CHOICES:
        raise UserError(f"{len(documents)} documents hold too few paragraphs for tasks; give a file of HellaSwag")
    items = []
    for index, (name, context, ending) in enumerate(parts):
        rng = evaluation_rng(seed, "continuation", index)
        choices = [ending, *_others(rng, parts, name)]
        order = [int(i) for i in rng.permutation(CHOICES)]
        right = order.index(0)
        items.append(MultipleChoiceItem(context, tuple(choices[i] for i in order), right))
    return [items[i] for i in evaluation_rng(seed, "order").permutation(len(items))]


def _others(rng: np.random.Generator, parts: list[tuple[str, str, str]], name: str) -> list[str]:
    """Three endings from three other documents."""
    taken: dict[str, str] = {}
    while len(taken) < CHOICES - 1:
        other, _, ending = parts[rng.integers(len(parts))]
        if other != name:
            taken.setdefault(other, ending)
    return list(taken.values())


def _paragraphs(text: str) -> list[tuple[str, str]]:
    """(context, last sentence) of each paragraph of prose; the context is as many sentences before it as fit."""
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


def _clean(text: str) -> str:
    """HellaSwag's WikiHow texts without markup: "[title]" becomes the end of a sentence, other brackets are removed."""
    text = re.sub(r"\s*\[(?:title|header)\]\s*", ". ", text.strip())
    text = re.sub(r"\[[^\]]*\]", "", text)
    return re.sub(r"\s{2,}", " ", text).strip().removeprefix(". ")
