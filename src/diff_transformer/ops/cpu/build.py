"""Compiles ``native.cpp`` for this processor at its first use, and keeps the library in the user's cache folder."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from diff_transformer.durable import cache_folder

log = logging.getLogger("diff_transformer")

SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w"),
)

WITHOUT_TILES = (*FLAGS, "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")


class CannotBuild(RuntimeError):
    """There is no native library here, and why."""


def compiler() -> str:
    """``$CXX``, or the first of c++, g++, clang++ that is installed."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise CannotBuild(f"no C++ compiler ({', '.join(names)}) is installed")
    return found


def _processor() -> str:
    """What -march=native depends on: the instruction sets, or the name of the processor."""
    info = Path("/proc/cpuinfo")
    flags = (
        [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))]
        if info.exists()
        else []
    )
    return flags[0] if flags else platform.processor()


def library_path(command: str, flags: tuple[str, ...] = FLAGS) -> Path:
    """Where the library of this source, compiler, flags and processor is kept."""
    sources = [path.read_text() for path in (SOURCE, *HEADERS)]
    told = "\n".join([*sources, command, *flags, platform.machine(), _processor()])
    return cache_folder() / f"native-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"


def build(command: str, path: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile to ``path``, in one move, so that processes that build it at the same time do not meet half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            done = subprocess.run(
                [command, *flags, str(SOURCE), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                raise CannotBuild(f"{command} failed: {done.stderr.strip()[-500:]}")
            os.replace(made, path)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuild(f"{error}") from error


def _load(command: str, flags: tuple[str, ...]) -> tuple[Path, ctypes.CDLL]:
    path = library_path(command, flags)
    if not path.exists():
        log.info("blockwise: compiling the native form, once on this machine")
        build(command, path, flags)
    loaded = ctypes.CDLL(str(path))
    loaded.diff_attention_ready.restype = loaded.diff_attention_in_tiles.restype = ctypes.c_bool
    return path, loaded


@cache
def library() -> ctypes.CDLL | None:
    """The native library, built if it is not there yet (some ten seconds, once on a machine); None where it cannot be.

    ``DIFF_TRANSFORMER_NATIVE=0`` turns it off. Which of the two forms of the backend runs is logged once.
    """
    if os.environ.get("DIFF_TRANSFORMER_NATIVE", "1") == "0":
        log.info("blockwise: PyTorch form (DIFF_TRANSFORMER_NATIVE=0)")
        return None
    try:
        command = compiler()
        path, loaded = _load(command, FLAGS)
        if not loaded.diff_attention_ready():
            log.info("blockwise: this process may not use the processor's tiles (AMX)")
            path, loaded = _load(command, WITHOUT_TILES)
    except (CannotBuild, OSError) as error:
        log.warning("blockwise: PyTorch form, which is slower, because the native one cannot be built: %s", error)
        return None
    for which in ("forward", "backward", "decode"):
        workspace, call = (
            getattr(loaded, f"diff_attention_{which}_workspace"),
            getattr(loaded, f"diff_attention_{which}"),
        )
        workspace.argtypes, workspace.restype = [ctypes.c_char_p, ctypes.c_bool], ctypes.c_int64
        call.argtypes, call.restype = [ctypes.c_char_p, ctypes.c_bool, ctypes.c_void_p], None
    loaded.diff_attention_decode_layer.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_bool]
    loaded.diff_attention_decode_layer.restype = None
    log.info("blockwise: native form%s, %s", ", bf16 in tiles" if loaded.diff_attention_in_tiles() else "", path)
    return loaded
