"""A corpus in memory, from the name or path of a source."""

import os

from diff_transformer.checks import require_positive
from diff_transformer.data.documents import VALIDATION_SHARE, Corpus, Document, stable_order, take_bytes
from diff_transformer.data.python_library import load_python_library
from diff_transformer.data.sources import SPLITS, Reader, find_sources, without_common_folders
from diff_transformer.data.tokens import decoded_corpus, is_prepared
from diff_transformer.errors import UserError

PYTHON_BYTES = 8_000_000


def load_corpus(source: str | os.PathLike = "python", *, max_bytes: int | None = None) -> Corpus:
    """The corpus named by ``source``: the same documents in the same order on every run.

    ``"python"`` is the running Python's own library: language reference, docstrings and code, on every machine and
    without a download. Anything else is a text file, JSON lines, a parquet file, a folder of these, or a data set of
    the hub (:func:`~diff_transformer.data.sources.find_sources` documents how each is split); or a folder that
    ``diff-transformer prepare`` made, of which the first documents of each side are decoded (8 MB by default).

    Args:
        max_bytes: UTF-8 bytes of the training side, at most (default: 8 MB of ``"python"``, all of a path); the
            validation side is capped in proportion. Whole documents are taken in the order of a hash; the last one is
            cut at a line end. Of a data set of the hub, no more rows are read.

    Raises:
        UserError: for a source that does not exist or cannot be read, and for a side without text.
    """
    source = os.path.expanduser(os.fspath(source))
    require_positive(max_bytes=max_bytes)
    if is_prepared(source):
        return decoded_corpus(source, max_bytes)
    if source == "python":
        corpus, max_bytes = load_python_library(), PYTHON_BYTES if max_bytes is None else max_bytes
    else:
        corpus = _read(source, max_bytes)
    return corpus if max_bytes is None else _capped(corpus, max_bytes)


def _read(source: str, max_bytes: int | None) -> Corpus:
    files, reader = find_sources([source], VALIDATION_SHARE), Reader("text", VALIDATION_SHARE)
    names = without_common_folders([file.path for file in files]) if len(files) > 1 else [os.path.basename(source)]
    sides: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for file, name in zip(files, names, strict=True):
        left = float("inf") if max_bytes is None or file.kind != "hub" else max_bytes  # which may be of any size
        for number, (split, text) in enumerate(reader.texts(file)):
            sides[split].append(Document(name if file.kind == "text" else f"{name}[{number}]", text))
            left -= len(text) if split == "train" else 0
            if left <= 0 and sides["validation"]:
                break
    for split, documents in sides.items():
        if not documents and any(sides.values()) and any(file.kind in ("lines", "parquet", "hub") for file in files):
            count = sum(map(len, sides.values()))
            raise UserError(
                f"a row of corpus {source!r} is held out with probability {VALIDATION_SHARE}, by a hash of its text, "
                f"and of {count} rows none is on the {split} side; give more rows, or folders train/ and val/"
            )
        if not documents:
            raise UserError(f"the {split} side of corpus {source!r} has no text but white space; give more text")
    return Corpus(stable_order(sides["train"]), stable_order(sides["validation"]))


def _capped(corpus: Corpus, max_bytes: int) -> Corpus:
    total, held_out = (sum(d.num_bytes for d in side) for side in (corpus.train, corpus.validation))
    rest = max(1, round(held_out * min(1.0, max_bytes / total)))
    return Corpus(take_bytes(corpus.train, max_bytes), take_bytes(corpus.validation, rest))
