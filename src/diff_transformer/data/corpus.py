"""A corpus from the name or path of a source: the Python library, a text file, a folder, a tar archive."""

import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from diff_transformer.checks import require_regular
from diff_transformer.data.documents import (
    ARCHIVE_SUFFIXES,
    TEXT_SUFFIXES,
    VALIDATION_FOLDERS,
    Corpus,
    Document,
    archive_members,
    decoded,
    held_out_split,
    stable_order,
    tail_split,
    take_bytes,
    without_common_folders,
)
from diff_transformer.data.prepared_folder import is_prepared
from diff_transformer.data.python_library import load_python_library
from diff_transformer.data.sources import files_of, kind_of
from diff_transformer.errors import UserError

PYTHON_BYTES = 8_000_000


def load_corpus(source: str | os.PathLike = "python", *, max_bytes: int | None = None) -> Corpus:
    """The corpus named by ``source``.

    ``"python"`` is the running Python's own library: language reference, docstrings and code, on every machine and
    without a download. Anything else is a path: a UTF-8 text file, a folder of text files or a tar archive of one
    (:func:`load_text_path` documents how each is split), or a folder that
    ``diff-transformer prepare`` made, of which the first documents of each side are decoded (8 MB by default).

    The same source and cap give the same corpus, in the same order, on every run.

    Args:
        max_bytes: UTF-8 bytes of the training side, at most (default: 8 MB of ``"python"``, all of a path); the
            validation side is capped in proportion. Whole documents are taken in the order of a hash; the last one is
            cut at a line end.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: for an empty corpus, an empty side of the split, a file that is not UTF-8, or another kind of file.
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


MAX_ARCHIVE_BYTES = 4 << 30

ACCEPTED = (
    "a UTF-8 text file, a folder of text files "
    f"({', '.join(sorted(TEXT_SUFFIXES))}; optionally train/ and val/ inside) or a tar archive of one "
    f"({', '.join(ARCHIVE_SUFFIXES)})"
)


def load_text_path(path: str | os.PathLike) -> Corpus:
    """The corpus at ``path``: a text file, a folder of text files or a tar archive of one.

    If there are folders ``train/`` and ``val/`` (or ``valid/``, ``validation/``), they are the split, and other
    files are not read. Otherwise about a tenth of the files is held out by a hash of their names, or the last tenth of
    a single file. A byte order mark is dropped and CRLF becomes LF. An archive is read in memory and never extracted.

    Raises:
        FileNotFoundError: for a path that does not exist.
        ValueError: as ``load_corpus``.
    """
    path = Path(path)
    if path.is_dir():
        files = list(_folder_files(path))
        if not files:
            raise UserError(f"corpus {str(path)!r} holds no text files; give {_accepted(path)}")
        return _split(str(path), files)
    if not path.exists():
        raise UserError(
            f"corpus {str(path)!r} does not exist; give 'python' or {ACCEPTED}, or prepare it: `diff-transformer "
            f"prepare SOURCE... --out {path}`"
        )
    require_regular(path)
    if path.name.lower().endswith(ARCHIVE_SUFFIXES):
        return _split(str(path), list(dict(_archive_files(path)).items()))  # of each name the last
    if path.suffix.lower() not in TEXT_SUFFIXES | {""}:
        raise UserError(f"corpus {str(path)!r} has suffix {path.suffix!r}, which is not read; give {_accepted(path)}")
    document = Document(path.name, decoded(str(path), path.read_bytes()))
    _refuse_blank(str(path), [document])
    train, validation = tail_split(document)
    return Corpus(str(path), [train], [validation], "the last 10 % of the text is validation")


def _accepted(path: Path) -> str:
    """The accepted sources, and the ``prepare`` command if it can read ``path``."""
    names = [path.name, *(inner.name for inner in path.rglob("*"))]
    rows = any(kind_of(name) in ("lines", "parquet") for name in names)
    return ACCEPTED + (f", or prepare it: `diff-transformer prepare {path} --out FOLDER`" if rows else "")


def _folder_files(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in files_of(root):
        if kind_of(path.name) == "text":
            yield path.relative_to(root).as_posix(), path.read_bytes()


def _archive_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The regular text members; links and devices are ignored."""
    total = 0
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive_members(archive):
                if not member.isfile() or not _is_text(member.name):
                    continue
                total += member.size
                if total > MAX_ARCHIVE_BYTES:
                    raise UserError(
                        f"{path} holds more than {MAX_ARCHIVE_BYTES >> 30} GiB of text, too much to read in memory; "
                        "unpack it and give a folder with the part you need"
                    )
                stream = archive.extractfile(member)
                if stream is not None:
                    yield member.name, stream.read()
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} cannot be read as a tar archive ({error}); give {ACCEPTED}") from error


def _is_text(name: str) -> bool:
    parts = PurePosixPath(name).parts
    hidden = any(part.startswith(".") and part not in (".", "..") for part in parts)
    return not hidden and PurePosixPath(name).suffix.lower() in TEXT_SUFFIXES


def _split(name: str, files: list[tuple[str, bytes]]) -> Corpus:
    if not files:
        raise UserError(f"corpus {name!r} holds no text files; give {ACCEPTED}")
    names = without_common_folders([path for path, _ in files])
    files = [(path, data) for path, (_, data) in zip(names, files, strict=True)]
    folders = {path.split("/")[0] for path, _ in files if "/" in path}
    if "train" in folders and folders & VALIDATION_FOLDERS:
        split = sorted(folders & VALIDATION_FOLDERS)[0]
        train = stable_order(_documents(name, [file for file in files if file[0].startswith("train/")]))
        validation = stable_order(_documents(name, [file for file in files if file[0].startswith(f"{split}/")]))
        for label, documents in (("train", train), (split, validation)):
            _refuse_blank(f"{name}, folder {label}/", documents)
        return Corpus(name, train, validation, f"the folders train/ and {split}/")
    documents = stable_order(_documents(name, files))
    _refuse_blank(name, documents)
    if len(documents) == 1:
        first, second = tail_split(documents[0])
        return Corpus(name, [first], [second], "the last 10 % of the text is validation")
    train, validation = held_out_split(documents)
    return Corpus(name, train, validation, "about 10 % of the files, by a hash of their names, are validation")


def _documents(name: str, files: list[tuple[str, bytes]]) -> list[Document]:
    documents = [Document(path, decoded(f"{path} in {name}", data)) for path, data in files]
    return [document for document in documents if document.text.strip()]


def _refuse_blank(name: str, documents: list[Document]) -> None:
    if not any(document.text.strip() for document in documents):
        raise UserError(f"corpus {name} is empty: no text but white space; give {ACCEPTED}")
