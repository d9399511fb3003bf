"""The embedded corpus: the running Python's own language reference, docstrings and source code."""

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

from diff_transformer.data.documents import Corpus, Document, held_out_groups, stable_order
from diff_transformer.errors import UserError

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "idlelib", "encodings"}
    | {"__pycache__", "pydoc_data"}
)
MIN_CHARACTERS = 200


@cache
def load_python_library() -> Corpus:
    """The documentation and the code of the running Python's standard library, as a corpus.

    It has the topics of the language reference (if ``pydoc_data`` is installed) and, for each module, a document of its
    docstrings and a document of its code without them. The two are on the same side of the split. Prose and code
    alternate, so that a capped corpus has both. Left out are test folders, third-party packages, and files that are not
    UTF-8 or do not parse.

    Raises:
        UserError: if this Python has no sources.
    """
    prose, code = _topics(), []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in modules_of(root):
        docstrings, source = _prose_and_code(path)
        name = path.relative_to(root).as_posix()
        prose.append(Document(f"docstrings/{name}", docstrings, group=name))
        code.append(Document(f"code/{name}", source, group=name))
    documents = stable_order(document for document in prose + code if len(document.text) >= MIN_CHARACTERS)
    if not documents:
        raise UserError(f"no Python sources under {root} (a stripped Python?); give a text file or a folder instead")
    held_out = held_out_groups(document.group for document in documents)
    sides = ([document for document in documents if (document.group in held_out) is out] for out in (False, True))
    return Corpus(*map(_alternate, sides))


def modules_of(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))


def _alternate(documents: list[Document]) -> list[Document]:
    """Prose, code, prose, code, ..., then the rest of the longer list."""
    code = [document for document in documents if document.name.startswith("code/")]
    prose = [document for document in documents if not document.name.startswith("code/")]
    return [document for document in chain.from_iterable(zip_longest(prose, code)) if document is not None]


def _topics() -> list[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    return [Document(f"topics/{name}", text, group=name) for name, text in sorted(topics.items())]


def _prose_and_code(path: Path) -> tuple[str, str]:
    """(docstrings with the names they document, the source without them); both empty if the file cannot be parsed."""
    read = parsed(path)
    if read is None:
        return "", ""
    (source, tree), prose, cut = read, [], set()
    for node in _definitions(tree):
        docstring = ast.get_docstring(node)
        if docstring is None:
            continue
        title = path.stem if isinstance(node, ast.Module) else node.name
        prose.append(f"{title}\n\n{docstring}\n")
        cut.update(range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1))
    code = [line for number, line in enumerate(source.split("\n"), start=1) if number not in cut]
    return "\n".join(prose), "\n".join(code)


def parsed(path: Path) -> tuple[str, ast.Module] | None:
    """The source of a file and its tree; None if it cannot be parsed."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return source, ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return None


def _definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The module, its classes and its functions, in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _definitions(child)
