"""Multiple-choice tasks from files: ARC, HellaSwag, and one simple format for any other.

ARC         {"question": {"stem", "choices": [{"label", "text"}, ...]}, "answerKey": "B"}, or the hub's columns
HellaSwag   {"ctx", "endings": [...], "label": 2, "activity_label"}; or text of six lines a task:
            the context, the number of the right ending from 0, four endings
PIQA        {"goal", "sol1", "sol2", "label": 0}
BoolQ       {"passage", "question", "answer": true}, or "label": 1
WinoGrande  {"sentence": "... _ ...", "option1", "option2", "answer": "2"}
simple      {"question": "...", "choices": ["...", ...], "answer": 0}, the answer as an index from 0, as a letter from
            A, or as the choice itself

``load_continuations`` also makes tasks in the form of HellaSwag from the running Python's documentation:

    The names of the module are exported. A name that begins with an underscore is not.     context
    It can still be imported by its full name.                                              right ending
    The default is to close the file. | Each call returns a new list. | ...                 from other texts
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from diff_transformer.data.corpus import load_corpus
from diff_transformer.data.documents import Document
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.files import SUFFIXES, as_rows, read_records, read_text, stem
from diff_transformer.data.tasks.hub import hub_rows
from diff_transformer.data.tasks.python_tasks import descriptions, names
from diff_transformer.data.tasks.types import MultipleChoiceItem, MultipleChoiceSet

TEXT_SUFFIXES = (".txt", ".txt.bz2", ".txt.gz")
ACCEPTED = f"'python', or a file ({', '.join(SUFFIXES + TEXT_SUFFIXES)}) or a folder of them"
_PART = re.compile(r"(?i)[-_. ]?(train|dev|val|valid|validation|test)$")
_SHOTS_FROM = ("train", "dev", "val", "valid", "validation")


def load_multiple_choice(data: str, *, seed: int = 0) -> dict[str, MultipleChoiceSet]:
    """The tasks that ``data`` names, by name.

    Args:
        data: "python" (made from the running Python's documentation), a file, or a folder. In a folder, files whose
            names differ only in -Train, -Dev, -Test (or val, valid, validation) are parts of one task: the last part is
            scored, and few-shot examples come from the first.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for an unknown format, naming the known ones, or two files of one name.
    """
    if data == "python":
        return {"python_descriptions": _halved(descriptions(seed)), "python_names": _halved(names(seed))}
    path = Path(data)
    if path.is_file():
        return {stem(path): MultipleChoiceSet(read_multiple_choice(path))}
    if not path.is_dir():
        raise FileNotFoundError(f"data {data!r} does not exist; give {ACCEPTED}")
    parts: dict[str, dict[str, Path]] = {}
    for file in sorted(path.iterdir()):
        if file.name.lower().endswith(SUFFIXES + TEXT_SUFFIXES):
            part = _PART.search(stem(file))
            task, of = parts.setdefault(_PART.sub("", stem(file)), {}), part[1].lower() if part else ""
            if of in task:
                raise ValueError(f"{task[of]} and {file.name} are the same part of one task; rename or remove one")
            task[of] = file
    if not parts:
        raise ValueError(f"the folder {data} holds no file that is read; give {ACCEPTED}")
    return {name: _task(files) for name, files in parts.items()}


def _task(files: dict[str, Path]) -> MultipleChoiceSet:
    order = [part for part in ("", "test", *reversed(_SHOTS_FROM)) if part in files]
    scored, shots = files[order[0]], [files[part] for part in _SHOTS_FROM if part in order[1:]]
    return MultipleChoiceSet(read_multiple_choice(scored), read_multiple_choice(shots[0]) if shots else [])


def _halved(items: list[MultipleChoiceItem]) -> MultipleChoiceSet:
    """Keep a quarter of the items as few-shot examples, so that no prompt shows the answer to a later question."""
    kept = len(items) - len(items) // 4
    return MultipleChoiceSet(items[:kept], items[kept:])


def read_multiple_choice(path: Path) -> list[MultipleChoiceItem]:
    """The items of one file.

    Raises:
        ValueError: for a row in none of the formats, naming the row and the formats.
    """
    if path.name.lower().endswith(TEXT_SUFFIXES):
        return _six_lines(path)
    return items_of(as_rows(read_records(path), path), str(path))


def items_of(rows: list[dict], source: str) -> list[MultipleChoiceItem]:
    """The items of rows from a file or the hub.

    Raises:
        ValueError: for a row in none of the formats, naming the row, ``source`` and the formats.
    """
    items = []
    for number, row in enumerate(rows):
        try:
            items.append(_row(row))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"row {number} of {source} cannot be read ({type(error).__name__}: {error}); accepted rows are "
                "{question, choices, answer}, ARC's {question: {stem, choices}, answerKey}, HellaSwag's "
                "{ctx, endings, label}, PIQA's {goal, sol1, sol2, label}, BoolQ's {passage, question, answer} and "
                "WinoGrande's {sentence, option1, option2, answer}"
            ) from None
    return items


def _row(row: dict) -> MultipleChoiceItem:
    if "endings" in row:
        context = row["ctx"] if not row.get("activity_label") else f"{row['activity_label']}: {row['ctx']}"
        return _item(_clean(context), [_clean(ending) for ending in row["endings"]], int(row["label"]), completion=True)
    if "goal" in row:
        return _item(row["goal"], [row["sol1"], row["sol2"]], int(row["label"]))
    if "passage" in row:
        question = f"{row['passage'].strip()}\nQuestion: {row['question'].strip().removesuffix('?')}?\nAnswer:"
        return _item(question, ["no", "yes"], int(row["label"] if "label" in row else row["answer"]), completion=True)
    if "option1" in row:
        before, blank, ending = row["sentence"].partition("_")
        if not blank or not ending.strip():
            raise ValueError(f"the sentence {row['sentence']!r} has no _ with text after it")
        item = _item(before, [row["option1"], row["option2"]], int(row["answer"]) - 1, completion=True)
        return replace(item, ending=ending.strip())
    if "answerKey" not in row:
        return _item(row["question"], row["choices"], _place(row["answer"], row["choices"]))
    question: Any = row["question"]
    choices: Any = row.get("choices")
    if isinstance(question, dict):  # ARC as published
        question, choices = question["stem"], question["choices"]
    if isinstance(choices, dict):  # the hub's columns
        labels, texts = choices["label"], choices["text"]
    else:
        labels, texts = [choice["label"] for choice in choices], [choice["text"] for choice in choices]
    return _item(question, texts, labels.index(row["answerKey"]))


def _place(answer: int | str, choices: list[str]) -> int:
    if not isinstance(answer, str):
        return answer
    letters = [chr(ord("A") + place) for place in range(len(choices))]
    if answer in choices:
        return choices.index(answer)
    if answer.strip().upper() in letters:
        return letters.index(answer.strip().upper())
    if answer.strip().isdigit():
        return int(answer)
    raise ValueError(f"the answer {answer!r} is none of the {len(choices)} choices, nor their place or letter")


def _item(question: str, choices: list[str], answer: int, completion: bool = False) -> MultipleChoiceItem:
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"the answer {answer!r} is not a place among {len(choices)} choices")
    if not isinstance(question, str) or not question.strip() or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("the question and the choices must be texts that are not empty")
    return MultipleChoiceItem(question.strip(), tuple(choices), answer, completion)


def _clean(text: str) -> str:
    """HellaSwag's WikiHow texts without markup: "[title]" becomes the end of a sentence, other brackets are removed."""
    text = re.sub(r"\s*\[(?:title|header)\]\s*", ". ", text.strip())
    text = re.sub(r"\[[^\]]*\]", "", text)
    return re.sub(r"\s{2,}", " ", text).strip().removeprefix(". ")


def _six_lines(path: Path) -> list[MultipleChoiceItem]:
    lines = [line.rstrip("\r") for line in read_text(path).split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines or len(lines) % 6:
        raise ValueError(f"{path} has {len(lines)} lines; tasks in text have six lines each")
    items = []
    for start in range(0, len(lines), 6):
        context, answer, *endings = lines[start : start + 6]
        if not answer.strip().isdigit():
            raise ValueError(f"line {start + 2} of {path} is {answer[:40]!r}; it should be the right ending's number")
        items.append(_item(_clean(context), [_clean(ending) for ending in endings], int(answer), completion=True))
    return items


CHOICES = 4
CONTEXT_CHARACTERS = (40, 400)
ENDING_CHARACTERS = (25, 110)
_SENTENCE_END = re.compile(r"(?<=[a-z)`'\"]\.) +(?=[A-Z`'\"])")
_PROSE = re.compile(r"[\w\s,.;:'\"()`*/-]+")


def load_continuations(data: str, *, seed: int = 0) -> list[MultipleChoiceItem]:
    """The tasks that ``data`` names: those of a file in its order, others in an order drawn by ``seed``.

    Args:
        data: "python" (made from the documentation that the corpus "python" holds out); a file of HellaSwag, as JSON
            lines or as text of six lines a task, plain or compressed; or "hub:NAME", such as "hub:Rowan/hellaswag".

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for another format, or a set on the hub that cannot be downloaded.
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
    """A task for each paragraph of prose in ``documents`` with at least two sentences.

    The last sentence is the right ending; the wrong ones are the last sentences of paragraphs in other documents.
    Documents named code/... have no prose.

    Raises:
        ValueError: if fewer than four documents have such a paragraph.
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
