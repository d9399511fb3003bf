"""Files that survive a crash: written beside their place, flushed to the disk, moved there in one step.

And where the package keeps what it would otherwise make again.
"""

import errno
import os
import shutil
from pathlib import Path

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SPARE = 1.02  # headers, alignment and the manifest, beside the tensors themselves


class DiskError(OSError):
    """Something could not be written; the message names the folder, what was needed and what is free."""

    def __str__(self) -> str:
        return str(self.strerror)


def cache_folder() -> Path:
    """``$DIFF_TRANSFORMER_CACHE``, or ``diff_transformer`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    given = os.environ.get("DIFF_TRANSFORMER_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diff_transformer"


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash at any moment, finds the old content or the new."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def flush_tree(folder: Path) -> None:
    """Flush every file below ``folder``, and the folders themselves, to the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            flush_folder(path)
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Flush the names in ``folder``: a rename is on the disk only after this."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def remove(path: Path) -> None:
    """Remove a file or folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_room(folder: Path, needed: int, what: str) -> None:
    """Check that ``needed`` bytes fit on the disk of ``folder`` before anything is written.

    Raises:
        DiskError: if they do not.
    """
    free = shutil.disk_usage(folder).free
    if needed * _SPARE > free:
        raise DiskError(errno.ENOSPC, f"{what} needs {size(needed)} in {folder}, where {size(free)} are free")


def explained(error: Exception, folder: Path, needed: int, what: str) -> DiskError:
    """The error of a failed write with the folder, what was needed and what is free."""
    number = next((e.errno for e in _chain(error) if isinstance(e, OSError) and e.errno), errno.EIO)
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    cause = "the disk or the quota is full" if number in _NO_ROOM else f"{type(error).__name__}: {error}"
    return DiskError(
        number, f"{what} could not be written in {folder}: {cause} ({size(needed)} needed, {size(free)} free)"
    )


def require_writable(folder: Path) -> None:
    """Check that ``folder``, which need not exist yet, can be made and written to.

    Raises:
        DiskError: if an existing parent is a file, or may not be written to.
    """
    parent = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))  # .exists() may raise
    if not parent.is_dir():
        raise DiskError(errno.ENOTDIR, f"{folder} cannot be a folder: {parent} is a file; choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        shown = parent if parent.parts else parent.absolute()  # of a bare name the parent is "."
        raise DiskError(errno.EACCES, f"{shown} may not be written to; choose another --out, or change its mode")


def size(count: int) -> str:
    """Bytes for the eye: 1.23 GB, 4.5 MB."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count} bytes"


def _chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
