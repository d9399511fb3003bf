"""Compiles ``native.cpp`` for this processor at its first use, and loads the library.

The library is kept in the folder ``native-UID`` of the package's cache folder. A library runs code in this process, so
its folder and file must belong to the user and be writable by nobody else; otherwise it is compiled into a private
temporary folder, once for each process. Where it cannot be compiled or loaded, the backend runs in PyTorch.
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
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from filelock import FileLock

from diff_transformer.durable import cache_folder, replacing

log = logging.getLogger("diff_transformer")

SWITCH = "DIFF_TRANSFORMER_NATIVE"
SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
OPENMP = "-fopenmp"
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", OPENMP),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w"),
)
SECONDS = 180.0  # limit of the compiler, which takes some ten seconds
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
        require_private(path.parent)
    except Untrusted as reason:
        with tempfile.TemporaryDirectory(prefix="diff-transformer-") as folder:  # only its user may enter it
            path = Path(folder) / "native.so"
            build(command, path, flags)
            loaded = _declared(ctypes.CDLL(str(path)))  # stays in memory when the file is deleted
        log.warning(
            "blockwise: the native form is compiled in each process, because %s; "
            "set DIFF_TRANSFORMER_CACHE to a folder that you own and nobody else can write",
            reason,
        )
        return path, loaded
    if not is_whole(path):
        _build_once(command, path, flags)
    try:
        return path, _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)  # the next process compiles again
        raise


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


def require_private(folder: Path) -> None:
    """Make the folder if it is missing, and check that only this user can write to it.

    Raises:
        Untrusted: it cannot be made or written, or someone else could put a library there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise Untrusted(f"{folder} cannot be made ({error.strerror})") from error
    if not stat.S_ISDIR(status.st_mode):
        raise Untrusted(f"{folder} is no folder")
    if not _is_ours(status):
        raise Untrusted(f"{folder} belongs to another user, or others can write to it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Untrusted(f"{folder} cannot be written")


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == _user() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_whole(path: Path) -> bool:
    """Whether the file is a library that this user kept, to its last byte. A truncated one could crash the loader."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _build_once(command: str, path: Path, flags: tuple[str, ...]) -> None:
    """Compile to ``path``. Of the processes that want the same library one compiles and the others wait.

    They share its failure as well. A later process tries again.
    """
    began = time.time()
    failure = path.with_suffix(".failed")
    with ExitStack() as held:
        with suppress(OSError, NotImplementedError):  # without locks each process compiles, and the last one stays
            held.enter_context(FileLock(path.with_suffix(".lock")))
        if is_whole(path):
            return
        with suppress(OSError):
            if failure.stat().st_mtime >= began:
                kind, _, reason = failure.read_text(encoding="utf-8").partition("\n")
                raise NoOpenMP(reason) if kind == NoOpenMP.__name__ else CannotBuild(reason)
        log.info("blockwise: compiling the native form, once on this machine")
        try:
            build(command, path, flags)
        except CannotBuild as error:
            with suppress(OSError):
                failure.write_text(f"{type(error).__name__}\n{error}", encoding="utf-8")
            raise


def build(command: str, path: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile to ``path`` atomically: no process sees an incomplete file.

    Raises:
        CannotBuild: the compiler failed, did not end in SECONDS, or the file cannot be written. NoOpenMP: it failed
        because it has no OpenMP.
    """
    try:
        with replacing(path, flush=False, unique=True) as made:  # the digest shows a file that a crash truncated
            errors = run_compiler([command, *flags, str(SOURCE), "-o", str(made)])
            if errors is not None:
                no_openmp = OPENMP in flags and re.search(r"openmp|omp\.h|-l[gi]?omp", errors, re.IGNORECASE)
                kind = NoOpenMP if no_openmp else CannotBuild
                raise kind(f"{command} failed: {errors.strip()[-500:]}")
            content = made.read_bytes()
            made.write_bytes(content + hashlib.sha256(content).digest())
            made.chmod(0o700)
    except OSError as error:
        raise CannotBuild(f"{error}") from error


def run_compiler(command: list[str]) -> str | None:
    """What the compiler printed to standard error if it failed, or None.

    Raises:
        CannotBuild: it did not end in SECONDS; it is stopped then, with the processes it started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise CannotBuild(f"{command[0]} has not ended after {SECONDS:.0f} s") from error
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
