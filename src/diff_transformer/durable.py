"""Files that are written whole or not at all: beside the final name, flushed to the disk, then renamed."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from diff_transformer.errors import UserError

PARTIAL = ".partial"  # end of the names of unfinished files


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Generator[Path]:
    """Replace the file ``path``, or make the folder ``path``, as a whole.

    The block writes a file or a folder at the yielded path, which is next to ``path`` and unique, so that several
    processes may write ``path`` at a time: the last one wins. If the block raises, what it wrote is removed. An error
    of the disk is an OSError; libraries in Rust (safetensors, tokenizers) raise their own, whose errno is parsed.

    Args:
        durable: flush content and name to the disk before returning. Give False for files that may be lost.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield partial
        if durable:
            flush_tree(partial)
        os.replace(partial, path)
        if durable:
            flush(path.parent)
    except BaseException as error:
        remove(partial)
        number = None if isinstance(error, OSError) else re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write ``content`` to ``path`` atomically: a reader, or a crash at any moment, finds the old or the new."""
    with replacing(path, durable=durable) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def append_lines(path: Path, entries: Iterable[dict]) -> None:
    """Append ``entries`` to a file of JSON lines and flush it to the disk.

    It is one write, so that several processes may share the file. A line that a crash cut off is ended first.
    """
    lines = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write(b"\n" * torn + lines)
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict]:
    """The objects in a file of JSON lines, without lines that a crash cut off; none if there is no such file."""
    entries = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk. A rename is durable only once its folder is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(path: Path) -> None:
    """Flush a file, or a folder with everything below it, to the disk."""
    if path.is_dir():
        for entry in path.iterdir():
            flush_tree(entry)
    flush(path)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_writable(folder: Path) -> None:
    """Raise UserError unless ``folder``, which need not exist yet, can be created and written to."""
    parent = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not parent.is_dir():
        raise UserError(f"{folder} cannot be a folder: {parent} is a file; choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{parent.absolute()} may not be written to; choose another --out, or change its mode")
