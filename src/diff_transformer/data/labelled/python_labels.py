"""A labelled set on every machine: which module of the standard library a docstring's first sentence is from."""

import ast
import functools
import os
import re
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from diff_transformer.data.labelled.types import Labelled, LabelledSet, hold_out
from diff_transformer.data.python_library import SKIPPED_FOLDERS

CLASSES = 16
SENTENCES_PER_CLASS = 400
CHARACTERS = (20, 100)
_SENTENCE = re.compile(r"(.+?[.!?])(?=\s+[A-Z]|\s*$)", re.DOTALL)


@functools.cache
def python_labels() -> LabelledSet:
    """The 16 top-level modules with the most documented functions and classes; a fifth of the sentences is asked.

    A sentence that two modules share is left out, and so is one that names its module. A model trained on the corpus
    "python" has read most of the sentences, but never with these labels.

    Raises:
        ValueError: where the library's sources are not there.
    """
    modules: dict[str, set[str]] = defaultdict(set)  # sentence -> modules
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _sources(root):
        module = path.relative_to(root).parts[0].removesuffix(".py").strip("_")
        for sentence in first_sentences(path):
            if module.lower() not in sentence.lower():
                modules[sentence].add(module)
    by_module: dict[str, list[str]] = defaultdict(list)
    for sentence, where in modules.items():
        if len(where) == 1:
            by_module[next(iter(where))].append(sentence)
    largest = sorted(by_module, key=lambda module: (-len(by_module[module]), module))[:CLASSES]
    if len(largest) < CLASSES:
        raise ValueError(f"no documented sources under {root} (a stripped Python?); give data= a file instead")
    examples = [Labelled(s, module) for module in largest for s in by_module[module][:SENTENCES_PER_CLASS]]
    train, test = hold_out(examples)
    return LabelledSet("python", train, test, "Text", "Module")


def first_sentences(path: Path) -> Iterator[str]:
    """The first sentence of each docstring in a source file, where it has a sentence's length; nothing where the file
    does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = _SENTENCE.match((ast.get_docstring(node) or "").split("\n\n")[0])
            sentence = " ".join(found[1].split()) if found else ""
            if CHARACTERS[0] <= len(sentence) <= CHARACTERS[1]:
                yield sentence


def _sources(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))
