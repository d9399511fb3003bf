"""Files that are written whole or not at all: beside the final name, then renamed."""

import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from diff_transformer.errors import UserError

PARTIAL = ".partial"  # end of the names of unfinished files


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Replace the file ``path``, or make the folder ``path``, as a whole.

    The block writes a file or a folder at the yielded path, which is next to ``path`` and unique, so that several
    processes may write ``path`` at a time: the last one wins. If the block raises, what it wrote is removed. An error
    of the disk is an OSError; libraries in Rust (safetensors, tokenizers) raise their own, whose errno is parsed.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        remove(partial)
        number = None if isinstance(error, OSError) else re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` atomically: a reader at any moment, or after a kill, finds the old or the new."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


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
