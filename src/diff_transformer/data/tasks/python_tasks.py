"""Tasks made from the running Python's documentation, without a download.

Grounded and multiple-choice questions:

    dedent      Remove any common leading whitespace from every line in `text`.     name, summary
                This can be used to make triple-quoted strings line up with ...     body

These are functions, classes and methods whose docstring begins with a paragraph that stands alone. They come from the
modules that the corpus "python" holds out, so a model trained on that corpus has not read them.

Labelled texts (``python_labels``): the module of the standard library that a docstring's first sentence comes from.
"""

import ast
import functools
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from diff_transformer.data.python_library import load_python_library, modules_of, parsed
from diff_transformer.data.seeding import evaluation_rng
from diff_transformer.data.tasks.types import GroundedItem, Labelled, MultipleChoiceItem

SUMMARY_CHARACTERS = (20, 140)
BODY_CHARACTERS = 200
PASSAGES = 4  # descriptions in the context of a question
CHOICES = 4


class Documented(NamedTuple):
    """A name of the standard library, the first paragraph of its docstring, and what follows it."""

    name: str
    summary: str
    body: str


def summaries(seed: int = 0) -> list[GroundedItem]:
    """Summaries: the document is a docstring without its first paragraph, which is the reference."""
    items = [
        GroundedItem("summary", entry.body, references=(entry.summary,))
        for entry in documented()
        if len(entry.body) >= BODY_CHARACTERS
    ]
    return _shuffled(items, seed, "summaries")


def lookups(seed: int = 0) -> list[GroundedItem]:
    """Questions: the document is four names with descriptions; the question quotes one and asks for its name."""
    entries = documented()
    items = []
    for index, entry in enumerate(entries):
        rng = evaluation_rng(seed, "lookup", index)
        shown = [entry, *(entries[i] for i in _others(rng, entries, index, PASSAGES - 1))]
        document = "\n".join(f"{shown[i].name}: {shown[i].summary}" for i in rng.permutation(len(shown)))
        question = f"Which name has this description? {entry.summary}"
        items.append(GroundedItem("question", document, question, (entry.name,)))
    return _shuffled(items, seed, "lookups")


def descriptions(seed: int = 0) -> list[MultipleChoiceItem]:
    """Multiple choice: which of four descriptions belongs to a name."""
    entries, items = documented(), []
    for index, entry in enumerate(entries):
        rng = evaluation_rng(seed, "choices", "summary", index)
        picked = [index, *_others(rng, entries, index, CHOICES - 1)]
        order = [int(i) for i in rng.permutation(CHOICES)]
        choices = tuple(entries[picked[i]].summary for i in order)
        items.append(MultipleChoiceItem(f"What does {entry.name} do?", choices, order.index(0)))
    return _shuffled(items, seed, "descriptions")


@functools.cache
def documented() -> tuple[Documented, ...]:
    """The documented names of the held-out modules in their order, without repeated names or summaries."""
    root = Path(sysconfig.get_paths()["stdlib"])
    validation = load_python_library().validation
    modules = [document.group for document in validation if document.name.startswith("docstrings/")]
    entries: dict[str, Documented] = {}
    seen = set()
    for module in modules:
        read = parsed(root / module)
        for entry in documented_in(read[1]) if read else ():
            if entry.name not in entries and entry.summary not in seen:
                entries[entry.name] = entry
                seen.add(entry.summary)
    return tuple(entries.values())


def documented_in(tree: ast.Module) -> list[Documented]:
    """The public documented names in a module whose first paragraph is about one sentence."""
    names = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        first, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
        summary, body = " ".join(first.split()), " ".join(rest.split())
        if SUMMARY_CHARACTERS[0] <= len(summary) <= SUMMARY_CHARACTERS[1]:
            names.append(Documented(node.name, summary, body))
    return names


def _others(rng, entries, index: int, count: int) -> list[int]:
    """``count`` distinct indices other than ``index``."""
    return [int(i) + (i >= index) for i in rng.choice(len(entries) - 1, size=count, replace=False)]


def _shuffled(items: list, seed: int, key: str) -> list:
    return [items[i] for i in evaluation_rng(seed, "order", key).permutation(len(items))]


CLASSES = 16
SENTENCES_PER_CLASS = 400
CHARACTERS = (20, 100)
_SENTENCE = re.compile(r"(.+?[.!?])(?=\s+[A-Z]|\s*$)", re.DOTALL)


@functools.cache
def python_labels() -> tuple[Labelled, ...]:
    """First sentences of docstrings, labelled with one of the 16 modules that have most of them.

    Sentences that occur in two modules, or name their module, are left out. A model trained on the corpus "python" has
    read most of the sentences, but never with these labels.
    """
    modules: dict[str, set[str]] = defaultdict(set)  # sentence -> modules
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in modules_of(root):
        module = path.relative_to(root).parts[0].removesuffix(".py").strip("_")
        for sentence in first_sentences(path):
            if module.lower() not in sentence.lower():
                modules[sentence].add(module)
    by_module: dict[str, list[str]] = defaultdict(list)
    for sentence, where in modules.items():
        if len(where) == 1:
            by_module[next(iter(where))].append(sentence)
    largest = sorted(by_module, key=lambda module: (-len(by_module[module]), module))[:CLASSES]
    return tuple(Labelled(s, module) for module in largest for s in by_module[module][:SENTENCES_PER_CLASS])


def first_sentences(path: Path) -> Iterator[str]:
    """The first sentence of each docstring in a source file, if it has 20 to 100 characters.

    Nothing if the file cannot be parsed.
    """
    source = parsed(path)
    for node in ast.walk(source[1]) if source else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match = _SENTENCE.match((ast.get_docstring(node) or "").split("\n\n")[0])
            sentence = " ".join(match[1].split()) if match else ""
            if CHARACTERS[0] <= len(sentence) <= CHARACTERS[1]:
                yield sentence
