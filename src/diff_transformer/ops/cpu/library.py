"""Load the CPU kernel that suits this processor best; setup.py compiled it when the package was installed."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch  # noqa: F401  loads its libgomp first, so that the process has one OpenMP

from diff_transformer.errors import UserError

log = logging.getLogger("diff_transformer")

SWITCH = "DIFF_TRANSFORMER_NATIVE"
CPUINFO = Path("/proc/cpuinfo")
FOLDER = Path(__file__).parent
V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = V4 | {"avx512_bf16", "avx512_vnni"}
# Flags of /proc/cpuinfo that each library needs, the fastest library first; setup.py has their compiler flags.
LIBRARIES = {"amx": BF16 | {"amx_tile", "amx_bf16"}, "bf16": BF16, "v4": V4, "v3": V3}

_int64, _address = ctypes.c_int64, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """``Matrix`` of problem.h: address and strides of [B, heads, rows, columns]."""

    _fields_ = (("data", _address), ("batch", _int64), ("head", _int64), ("row", _int64))


class Mask(ctypes.Structure):
    """``Mask`` of problem.h."""

    _fields_ = (*Matrix._fields_, ("key", _int64), ("additive", _int64))


MATRICES = ("q1", "q2", "k1", "k2", "v", "out", "dout", "dq1", "dq2", "dk1", "dk2", "dv", "lam", "first")
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
SIZES = ("B", "H", "Hn", "G", "T", "S", "D", "Dv", "causal", "window", "threads", "rows", "parts", "bf16")


class Problem(ctypes.Structure):
    """``Problem`` of problem.h."""

    _fields_ = (
        *((name, Matrix) for name in MATRICES),
        *(("dlam", _address), ("dfirst", _address), ("mask", Mask)),
        *((name, _int64) for name in SIZES),
        ("scale", ctypes.c_float),
    )


class HeadOutput(ctypes.Structure):
    """``HeadOutput`` of problem.h."""

    _fields_ = (
        ("gate", Matrix),
        *((name, _address) for name in LAMBDA_VECTORS),
        ("lambda_size", _int64),
        *(("norm_weight", _address), ("norm_weight_bf16", _int64), ("normed", _int64)),
        *(("eps", ctypes.c_float), ("gain", ctypes.c_float), ("lambda_init", ctypes.c_float)),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The kernel's library, or None on a machine that has none. Logs once which library it is.

    The environment variable DIFF_TRANSFORMER_NATIVE=0 turns it off.

    Raises:
        UserError: DIFF_TRANSFORMER_NATIVE is anything else.
    """
    if switch := os.environ.get(SWITCH):
        if switch != "0":
            raise UserError(f"{SWITCH} is {switch!r}; give 0, or leave it out")
        return None
    for name, flags in LIBRARIES.items():
        if flags <= processor_flags() and path_of(name).exists() and (loaded := load(path_of(name))) is not None:
            log.info("blockwise: CPU kernel %s", name)
            return loaded
    log.info("blockwise: no CPU kernel on this machine")
    return None


def available() -> bool:
    """True if this machine has a library."""
    return library() is not None


def why_unavailable() -> str:
    """Why there is no library."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 turns its kernel off"
    return "its kernel was not built with the package, or does not run on this processor"


# Constants for torch.compile, which cannot trace ctypes.
for _function in (available, why_unavailable):
    _function._dynamo_marked_constant = True  # ty: ignore[invalid-assignment]


def path_of(name: str) -> Path:
    """File of a library."""
    return FOLDER / f"native_{name}.so"


@cache
def processor_flags() -> frozenset[str]:
    """Instruction sets of the processor that the kernel of Linux enables; empty on other systems."""
    try:
        with CPUINFO.open() as file:
            return frozenset(next((line.partition(":")[2].split() for line in file if line.startswith("flags")), ()))
    except OSError:
        return frozenset()


def load(path: Path) -> ctypes.CDLL | None:
    """The library of this file; None if Linux refuses it the registers of AMX."""
    loaded = declare(ctypes.CDLL(str(path)))
    return loaded if loaded.diff_attention_start() else None


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the signatures of its functions."""
    problem = ctypes.POINTER(Problem)
    loaded.diff_attention_forward.argtypes = loaded.diff_attention_backward.argtypes = [problem]
    loaded.diff_attention_decode.argtypes = [problem, ctypes.POINTER(HeadOutput)]
    return loaded
