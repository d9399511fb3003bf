"""Files that survive a crash, and the messages when a disk or a folder does not take them.

``replacing`` is how the package replaces a file or a folder: the new content is written next to it, flushed to the disk
and renamed. ``write_whole`` does this for a text. A folder needs two renames (``swap``); if a crash comes between them,
``put_back`` restores the folder of before. ``append_lines`` and ``read_lines`` keep a journal of finished work.
"""

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

# Endings of names: of unfinished files, of a folder until the new one has its name, and of what is about to be removed.
PARTIAL, REPLACED, OLD = ".partial", ".replaced", ".old"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OVERHEAD = 1.02  # room for headers, alignment and the manifest, relative to the tensors


class DiskError(OSError):
    """A write failed. The message names the folder, the bytes needed and the bytes free."""

    def __str__(self) -> str:
        return str(self.strerror)


def cache_folder() -> Path:
    """``$DIFF_TRANSFORMER_CACHE``, or ``diff_transformer`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    given = os.environ.get("DIFF_TRANSFORMER_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diff_transformer"


@contextmanager
def replacing(path: Path, *, flush: bool = True, unique: bool = False) -> Generator[Path]:
    """Replace ``path``, a file or a folder, as a whole.

    The block writes a file or a folder at the yielded path, which is next to ``path``. If the block ends without an
    exception, that file or folder becomes ``path``. If it raises, what it wrote is removed and ``path`` is unchanged.
    What a killed process left is removed first. An error of the disk is an OSError; libraries in Rust (safetensors,
    tokenizers) raise exceptions of their own, which have its number in their text.

    Args:
        flush: bring the content and the new name to the disk before returning. Give False for files that may be lost.
        unique: draw a name for the yielded path, for files that several processes write at a time.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}" if unique else path.name + PARTIAL)
    try:
        put_back(path)
        remove(partial)
        yield partial
        if flush:
            flush_tree(partial)
        swap(partial, path, flush=flush)
    except BaseException as error:
        remove(partial)
        found = None if isinstance(error, OSError) else re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def swap(partial: Path, path: Path, *, flush: bool = True) -> None:
    """Give ``partial`` the name ``path``. A folder that had it is removed once the new name is on the disk (``flush``).

    Call ``put_back`` first, for a swap that was interrupted.
    """
    if path.is_dir():  # os.replace refuses a folder that is not empty
        os.replace(path, path.with_name(path.name + REPLACED))
    os.replace(partial, path)
    if flush:
        flush_folder(path.parent)
    put_back(path)


def put_back(path: Path) -> None:
    """Finish or undo a ``swap`` of the folder ``path`` that was interrupted."""
    replaced = path.with_name(path.name + REPLACED)
    if replaced.is_dir() and path.exists():
        discard(replaced)
    elif replaced.is_dir():
        os.replace(replaced, path)


def discard(path: Path) -> None:
    """Remove the folder ``path``, by another name: one that is removed in part must not look like a whole one."""
    old = path.with_name(path.name + OLD)
    remove(old)
    os.replace(path, old)
    remove(old)


def write_whole(path: Path, text: str, *, flush: bool = True) -> None:
    """Write ``text`` to ``path`` atomically: a reader, or a crash at any moment, finds the old content or the new.

    Args:
        flush: as in ``replacing``.
    """
    with replacing(path, flush=flush) as partial:
        partial.write_text(text, encoding="utf-8")


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
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def flush_tree(path: Path) -> None:
    """Flush a file, or a folder with everything below it, to the disk."""
    if path.is_dir():
        for entry in sorted(path.iterdir()):
            flush_tree(entry)
        flush_folder(path)
    elif path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk. A rename is durable only after this call."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_room(folder: Path, needed: int, what: str) -> None:
    """Check that the disk of ``folder`` has ``needed`` bytes free, before anything is written.

    Raises:
        DiskError: if it has not.
    """
    free = shutil.disk_usage(folder).free
    if needed * _OVERHEAD > free:
        raise DiskError(
            errno.ENOSPC, f"{what} needs {human_bytes(needed)} in {folder}, where {human_bytes(free)} are free"
        )


def explained(error: BaseException, folder: Path, needed: int, what: str) -> DiskError:
    """The error of a failed write as a DiskError that names ``folder``, the bytes needed and the bytes free."""
    number = next((e.errno for e in _chain(error) if isinstance(e, OSError) and e.errno), errno.EIO)
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    cause = "the disk or the quota is full" if number in _NO_ROOM else f"{type(error).__name__}: {error}"
    return DiskError(
        number,
        f"{what} could not be written in {folder}: {cause} ({human_bytes(needed)} needed, {human_bytes(free)} free)",
    )


def require_writable(folder: Path) -> None:
    """Check that ``folder``, which need not exist yet, can be created and written to.

    Raises:
        DiskError: if an existing parent is a file or is not writable.
    """
    parent = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))  # .exists() may raise
    if not parent.is_dir():
        raise DiskError(errno.ENOTDIR, f"{folder} cannot be a folder: {parent} is a file; choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        shown = parent if parent.parts else parent.absolute()  # the parent of a bare name is "."
        raise DiskError(errno.EACCES, f"{shown} may not be written to; choose another --out, or change its mode")


def human_bytes(count: int) -> str:
    """A number of bytes for people to read: 1.23 GB, 4.5 MB."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count} bytes"


def _chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
