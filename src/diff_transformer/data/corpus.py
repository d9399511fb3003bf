"""Where text comes from: ``load_corpus`` turns the name or path of a source into documents."""

import os

from diff_transformer.data.documents import Corpus, Document, take_bytes
from diff_transformer.data.prepare.state import is_prepared
from diff_transformer.data.python_library import load_python_library
from diff_transformer.data.text_files import load_text_path

__all__ = ["PYTHON_BYTES", "Corpus", "Document", "load_corpus"]

PYTHON_BYTES = 8_000_000


def load_corpus(source: str | os.PathLike = "python", *, max_bytes: int | None = None) -> Corpus:
    """The corpus named by ``source``.

    ``"python"`` is the running Python's own library: language reference, docstrings and code, on every machine and
    without a download. Anything else is a path: a UTF-8 text file, a folder of text files or a tar archive of one
    (:func:`~diff_transformer.data.text_files.load_text_path` tells how each is split), or a folder that
    ``diff-transformer prepare`` made, of which the first documents of each side are decoded (8 MB by default).

    ``max_bytes`` caps the training side (UTF-8 bytes; default: 8 MB of ``"python"``, all of a path) and the validation
    side in proportion: whole documents in a hashed order, the last cut at a line end. The same source and cap give the
    same corpus, in the same order, on every run.

    Raises FileNotFoundError for a path that is not there and ValueError for an empty corpus, an empty side of the
    split, a file that is not UTF-8 or a kind of file that is not read.
    """
    if source == "python":
        corpus = load_python_library()
        max_bytes = PYTHON_BYTES if max_bytes is None else max_bytes
    elif is_prepared(os.fspath(source)):
        from diff_transformer.data.prepared import decoded_corpus

        return decoded_corpus(os.fspath(source), max_bytes)
    else:
        corpus = load_text_path(source)
    return corpus if max_bytes is None else _capped(corpus, max_bytes)


def _capped(corpus: Corpus, max_bytes: int) -> Corpus:
    total = sum(document.num_bytes for document in corpus.train)
    share = min(1.0, max_bytes / total)
    held_out = sum(document.num_bytes for document in corpus.validation)
    return Corpus(
        corpus.name,
        take_bytes(corpus.train, max_bytes),
        take_bytes(corpus.validation, max(1, round(held_out * share))),
        corpus.split,
    )
