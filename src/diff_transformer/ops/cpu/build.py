"""Compiles ``native.cpp`` for this processor at its first use, and loads the library.

The library is kept in the folder ``native-UID`` of the package's cache folder. A library runs code in this process, so
its folder and file must belong to the user and be writable by nobody else, and nobody else may exchange a folder above
them; otherwise it is compiled in a private temporary folder, once for each process. What is loaded is a copy in memory
of the bytes that were checked. Where the library cannot be compiled or loaded, the backend runs in PyTorch.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from diff_transformer.durable import cache_folder, once

log = logging.getLogger("diff_transformer")

SWITCH = "DIFF_TRANSFORMER_NATIVE"
SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
OPENMP = "-fopenmp"
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", OPENMP),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w"),
)
_BUILDING = "-building-"  # in the names of folders in which something is compiled
SECONDS = 180.0  # limit of the compiler, which takes some ten seconds
# Runs a compiler, and watches this process by its end of a pipe. If the process is killed, the compiler is stopped and
# its folder removed.
GUARDED = """
exec 3<&0 </dev/null
{ trap '' TERM; read -r _ <&3; kill -TERM 0; sleep 1; rm -rf "$1"; kill -KILL 0; } >/dev/null 2>&1 &
watching=$!
shift
"$@" 3<&-
status=$?
kill -KILL $watching
exit $status
"""
DIGEST_BYTES = hashlib.sha256().digest_size  # appended to a kept library, so that a damaged file is never loaded


class CannotBuild(RuntimeError):
    """There is no native library on this machine; the message says why."""


class NoOpenMP(CannotBuild):
    """The compiler has no OpenMP."""


class Untrusted(RuntimeError):
    """The cache folder cannot be used for code; the message says why."""


@cache
def library() -> ctypes.CDLL | None:
    """The native library, or None where there is none. Compiles it if needed: some ten seconds, once on a machine.

    ``DIFF_TRANSFORMER_NATIVE=0`` turns it off. Logs once whether the backend runs natively or in PyTorch; a failure is
    not retried in this process.

    Raises:
        ValueError: DIFF_TRANSFORMER_NATIVE is neither 0 nor 1.
    """
    given = os.environ.get(SWITCH, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {given!r}; give 0 (PyTorch) or 1 (native, the default)")
    if given == "0":
        log.info("blockwise: PyTorch form (DIFF_TRANSFORMER_NATIVE=0)")
        return None
    try:
        path, loaded = _load(compiler(), FLAGS)
    except (CannotBuild, OSError, AttributeError) as error:  # the last: a symbol is missing
        log.warning("blockwise: PyTorch form, which is slower, because the native one cannot be built: %s", error)
        return None
    log.info("blockwise: native form, %s", path)
    return loaded


def compiler() -> str:
    """``$CXX``, or the first of c++, g++, clang++ that is installed."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise CannotBuild(f"no C++ compiler ({', '.join(names)}) is installed")
    return found


def _load(command: str, flags: tuple[str, ...]) -> tuple[Path, ctypes.CDLL]:
    """The library for these flags, without OpenMP (one thread) if the compiler has none; and its path."""
    try:
        return _load_exactly(command, flags)
    except NoOpenMP as error:
        log.info("blockwise: compiling without OpenMP, for one thread: %s", error)
        return _load_exactly(command, tuple(flag for flag in flags if flag != OPENMP))


def _load_exactly(command: str, flags: tuple[str, ...]) -> tuple[Path, ctypes.CDLL]:
    try:
        path = library_path(command, flags)
        path = private_folder(path.parent) / path.name
    except Untrusted as reason:
        with _temporary_folder() as folder:
            path, loaded = folder / "native.so", _loaded(_compiled(command, folder, flags))
        log.warning(
            "blockwise: the native form is compiled in each process, because %s; "
            "set DIFF_TRANSFORMER_CACHE to a folder that you own, where nobody else can write to it or above it",
            reason,
        )
        return path, loaded
    content = _build_once(command, path, flags)
    try:
        return path, _loaded(content)
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)  # the next process compiles again
        raise


def _loaded(content: bytes) -> ctypes.CDLL:
    """The library of these bytes, with the types of its functions, from a file that nobody else can reach."""
    number = -1
    with suppress(AttributeError, OSError):  # Linux alone has files in memory, and may forbid to run them
        number = os.memfd_create("diff-transformer-native", os.MFD_CLOEXEC)
        with open(number, "wb", closefd=False) as file:  # stays open: the loader knows libraries by their names
            file.write(content)
        return _declared(ctypes.CDLL(f"/proc/self/fd/{number}"))
    if number >= 0:
        os.close(number)
    with _temporary_folder() as folder:
        copy = folder / "native.so"
        copy.write_bytes(content)
        return _declared(ctypes.CDLL(str(copy)))  # stays in memory when the file is deleted


@contextmanager
def _temporary_folder() -> Generator[Path]:
    """A folder that only this user may enter, and that nobody else can exchange; removed at the end.

    Raises:
        CannotBuild: there is no such place.
    """
    try:
        place = Path(tempfile.gettempdir()).resolve()
        _refuse_exchangeable(place)
    except (OSError, Untrusted) as reason:
        raise CannotBuild(f"there is no safe place for it: {reason}; set TMPDIR to a folder of your own") from None
    with tempfile.TemporaryDirectory(prefix="diff-transformer-", dir=place) as folder:
        yield Path(folder)


def library_path(command: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """Path of the kept library of this source, compiler, flags and processor.

    Raises:
        Untrusted: there is no cache folder.
    """
    try:
        folder = cache_folder()
    except RuntimeError as error:  # HOME is not set, and the user has no entry in the password database
        raise Untrusted(f"there is no home folder ({error})") from error
    return folder / f"native-{_user()}" / f"native-{identity(command, flags)}.so"


def identity(command: str | None = None, flags: tuple[str, ...] = FLAGS) -> str:
    """What tells this library from others: a digest of its source, compiler, flags and processor."""
    sources = [path.read_text() for path in (SOURCE, *HEADERS)]
    key = "\n".join([*sources, command or compiler(), *flags, platform.machine(), instruction_sets()])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def instruction_sets() -> str:
    """What -march=native depends on, or the name of the processor."""
    return _processor_line("flags", "Features")


def processor() -> str:
    """The name of the processor."""
    return _processor_line("model name", "CPU part").rpartition(":")[2].strip()


def _processor_line(*names: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(names)), platform.processor())


def private_folder(folder: Path) -> Path:
    """The folder without links in its path, made if it is missing; only this user can change or exchange it.

    Raises:
        Untrusted: it cannot be made or written, or someone else could put a library there.
    """
    try:
        for place in reversed((folder, *folder.parents)):
            if not place.exists():
                place.mkdir(exist_ok=True, mode=0o700 if place == folder else 0o755)  # also where the umask is 002
        status = folder.lstat()
        resolved = folder.resolve()
    except OSError as error:
        raise Untrusted(f"{folder} cannot be made ({error.strerror})") from error
    if not stat.S_ISDIR(status.st_mode):
        raise Untrusted(f"{folder} is no folder")
    if not _is_ours(status):
        raise Untrusted(f"{folder} belongs to another user, or others can write to it")
    _refuse_exchangeable(resolved.parent)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Untrusted(f"{folder} cannot be written")
    return resolved


def _refuse_exchangeable(folder: Path) -> None:
    """Check that nobody but this user and root can rename what this user has in ``folder``, a path without links.

    Raises:
        Untrusted: for the first folder of its path that belongs to someone else, or in which others may rename.
    """
    for place in (folder, *folder.parents):
        status = place.lstat()
        mode = status.st_mode
        shared = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and status.st_gid != _own_group())
        if status.st_uid not in (0, _user()) or not stat.S_ISDIR(mode) or (shared and not mode & stat.S_ISVTX):
            raise Untrusted(f"{place} belongs to another user, or others can write to it")


def _own_group() -> int | None:
    """The group that has this user alone, as many systems make one for each; with it new folders are shared."""
    import grp  # not on Windows
    import pwd

    with suppress(KeyError):
        user = pwd.getpwuid(_user())
        group = grp.getgrgid(user.pw_gid)
        if group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}:
            return group.gr_gid
    return None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == _user() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def kept(path: Path) -> bytes | None:
    """The library that this user kept, or None: if it is not one, to its last byte (it could crash the loader)."""
    with suppress(OSError):
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and _is_ours(status):
                content = file.read()
                if hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]:
                    return content[:-DIGEST_BYTES]
    return None


def _build_once(command: str, path: Path, flags: tuple[str, ...]) -> bytes:
    """Compile to ``path``, and return the library. Of the processes that want the same one, one compiles and the others
    wait.

    They share its failure as well. A later process tries again.
    """
    began = time.time()
    failure = path.with_suffix(".failed")

    def compiled(locked: bool) -> bytes:
        for left in path.parent.glob(f"{path.stem}{_BUILDING}*") if locked else ():
            shutil.rmtree(left, ignore_errors=True)  # of a process that ended with its machine
        with suppress(OSError):
            if failure.stat().st_mtime >= began:
                kind, _, reason = failure.read_text(encoding="utf-8").partition("\n")
                raise NoOpenMP(reason) if kind == NoOpenMP.__name__ else CannotBuild(reason)
        log.info("blockwise: compiling the native form, once on this machine")
        try:
            return build(command, path, flags)
        except CannotBuild as error:
            with suppress(OSError):
                failure.write_text(f"{type(error).__name__}\n{error}", encoding="utf-8")
            raise

    return once(path, lambda: kept(path), compiled)


def build(command: str, path: Path, flags: tuple[str, ...] = FLAGS) -> bytes:
    """Compile to ``path`` atomically, so that no process sees an incomplete file; return the library.

    Raises:
        CannotBuild: the compiler failed, did not end in SECONDS, or the file cannot be written. NoOpenMP: it failed
        because it has no OpenMP.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=f"{path.stem}{_BUILDING}", dir=path.parent) as folder:
            content = _compiled(command, Path(folder), flags)
            made = Path(folder) / path.name
            made.write_bytes(content + hashlib.sha256(content).digest())  # shows a file that a crash truncated
            made.chmod(0o700)
            os.replace(made, path)
            return content
    except OSError as error:
        raise CannotBuild(f"{error}") from error


def _compiled(command: str, folder: Path, flags: tuple[str, ...]) -> bytes:
    """The library, compiled in ``folder``, which is removed if this process is killed meanwhile."""
    made = folder / "compiled.so"
    try:
        errors = run_compiler([command, *flags, str(SOURCE), "-o", str(made)], folder)
        if errors is not None:
            no_openmp = OPENMP in flags and re.search(r"openmp|omp\.h|-l[gi]?omp", errors, re.IGNORECASE)
            kind = NoOpenMP if no_openmp else CannotBuild
            raise kind(f"{command} failed: {errors.strip()[-500:]}")
        return made.read_bytes()
    except OSError as error:
        raise CannotBuild(f"{error}") from error


def run_compiler(command: list[str], folder: Path) -> str | None:
    """What the compiler printed to standard error if it failed, or None.

    Args:
        folder: for the compiler's temporary files. If this process is killed, the compiler ends and the folder goes.

    Raises:
        CannotBuild: it did not end in SECONDS; it is stopped then, with the processes it started.
    """
    watched, mine = os.pipe()  # nothing is written to it; that it closes tells the end of this process
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", GUARDED, "sh", str(folder), *command],
            stdin=watched,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            _, errors = process.communicate(timeout=SECONDS)
        except BaseException as error:  # a Ctrl-C as well
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise CannotBuild(f"{command[0]} has not ended after {SECONDS:.0f} s") from error
    finally:
        os.close(watched)
        os.close(mine)
    return errors if process.returncode else None


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    loaded.diff_attention_forms.restype = ctypes.c_int
    for name in ("forward", "backward", "decode"):
        workspace = getattr(loaded, f"diff_attention_{name}_workspace")
        workspace.argtypes, workspace.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_int64
        function = getattr(loaded, f"diff_attention_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    layer = loaded.diff_attention_decode_layer
    layer.argtypes, layer.restype = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int], ctypes.c_int
    return loaded


def refuse_failure(status: int) -> None:
    """Raise what a function of the library reports by its result."""
    if status == 1:
        raise MemoryError("the native form of blockwise could not allocate its workspace")
    if status:
        raise RuntimeError("the native form of blockwise failed; set DIFF_TRANSFORMER_NATIVE=0 to use PyTorch")
