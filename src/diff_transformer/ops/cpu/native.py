"""Calls the native implementation, ``native.cpp``."""

import math
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.cpu.build import identity, library, processor, refuse_failure
from diff_transformer.ops.measuring import NotNow, measure, tuning

MAX_DECODE_ROWS = 8  # rows of either map that share a key/value head: up to here each key is read once, unpacked
MAX_D = MAX_DV = 256
MAX_SINGLE_THREAD_WORK = 2**15  # multiply-adds that one thread finishes before a second one has started
BF16_MULTIPLY = {"amx": 3, "dpbf16": 2, "fp32": 1}  # how, and the library's number of it; the default first
STRIP, CHUNK = 32, 256  # queries and keys of a product
MAX_ROWS = 128  # queries of a block
KEPT_BYTES = 2**25  # of a block and thread
NEAR_BYTES = 2**23  # of a head's packed keys and values: more do not stay in a cache from one block to the next
TRIED_WIDTHS = (16, 32, 64, 128, MAX_D)
CALLS = 5  # in a turn of a trial


# ``struct Problem`` of native.cpp: 12 matrices (pointer and three strides), lam, dlam, mask, 14 sizes, the scale, and
# the head norm (gain, eps, weights, their dtype, whether there is one).
LAYOUT = struct.Struct("@" + 48 * "q" + 4 * "q" + "q" + 5 * "q" + 14 * "q" + "f" + "ff" + "q" + "qq")
_PLAIN = (Tensor, torch.nn.Parameter)
NO_NORM = (1.0, 0.0, 0, 0, 0)
NO_MATRIX = (0, 0, 0, 0)


class Packed(NamedTuple):
    """A call as ``native.cpp`` reads it."""

    problem: bytes  # LAYOUT
    multiply: int  # of BF16_MULTIPLY, or 0 for fp32
    copies: dict[object, Tensor]  # tensors that ``problem`` points to, kept until the call returns


def in_memory(x: Tensor) -> bool:
    """Whether the values of ``x`` lie at its address on the CPU: not so for subclasses (fake, sharded or quantised
    tensors), meta tensors, storages that were freed, and views that are negated when they are read."""
    if type(x) not in _PLAIN or not x.is_cpu or x.layout is not torch.strided or x.is_neg():
        return False
    return x.untyped_storage().nbytes() > 0


def supports(call: Call) -> bool:
    """Whether the native implementation computes this call on this machine."""
    q1, v = call.q1, call.v
    usual = q1.dtype in (torch.float32, torch.bfloat16) and q1.device.type == "cpu" and call.scale > 0
    return usual and q1.shape[-1] <= MAX_D and v.shape[-1] <= MAX_DV and library() is not None


def forward(call: Call, out: Tensor) -> None:
    """Write the output to ``out``, [B, H, T, Dv]."""
    q1, q2, k1, k2, v, lam = call.inputs
    _, H, T, _ = q1.shape
    few_rows = H // k1.shape[1] * T <= MAX_DECODE_ROWS
    multiply = int(q1.dtype == torch.bfloat16) if few_rows else multiply_of(q1, "forward")
    rows = forward_rows(q1, k1, v, call.window)
    packed = pack((q1, q2, k1, k2, v, out), multiply, lam, call, rows)
    function, workspace = prepare("decode" if few_rows else "forward", packed)
    refuse_failure(function(packed.problem, packed.multiply, _aligned(workspace)))


def backward(call: Call, dout: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q1, q2, k1, k2, v and lam; dout [B, H, T, Dv] is that of the output."""
    q1, q2, k1, k2, v, lam = call.inputs
    some_rows_masked = call.is_causal and k1.shape[2] < q1.shape[2]  # fully
    new = torch.zeros_like if some_rows_masked else torch.empty_like
    gradients = [new(x, memory_format=torch.contiguous_format) for x in call.inputs]
    tensors = (q1, q2, k1, k2, v, None, dout, *gradients[:5])
    rows = backward_rows(q1, q2, k1, v, call.window)
    packed = pack(tensors, multiply_of(q1, "backward"), lam, call, rows, dlam=gradients[5])
    function, workspace = prepare("backward", packed)
    refuse_failure(function(packed.problem, packed.multiply, _aligned(workspace)))
    return tuple(gradients)


@cache
def available_multiplies() -> tuple[str, ...]:
    """The ways in which this processor can multiply bf16, the default first; empty without a library.

    "amx": in tiles; "dpbf16": in pairs, by AVX512-BF16; "fp32": widened and multiplied in fp32, on every processor.
    """
    native = library()
    found = 0 if native is None else native.diff_attention_forms()
    return tuple(name for name, number in BF16_MULTIPLY.items() if found >> number & 1)


def multiply_of(q1: Tensor, direction: str) -> int:
    """The library's number of the way to multiply in this call; direction: "forward" or "backward"."""
    return 0 if q1.dtype == torch.float32 else BF16_MULTIPLY[fastest_multiply(direction, q1.shape[-1])]


def fastest_multiply(direction: str, D: int) -> str:
    """How bf16 of width D is multiplied: the fastest way in a trial of milliseconds, once on a machine."""
    try:
        return _fastest_multiply(direction, next(width for width in TRIED_WIDTHS if width >= D))
    except NotNow:
        return available_multiplies()[0]


available_forms = available_multiplies  # its former name


@cache
def _fastest_multiply(direction: str, D: int) -> str:
    ways = available_multiplies()
    if len(ways) == 1:
        return ways[0]
    key = {"operation": f"blockwise, bf16, {direction}", "width": D, "processor": processor(), "library": identity()}
    found = measure(key, {way: partial(trial, way, direction, D) for way in ways}, _thread_clock)
    if not found.milliseconds and tuning() != "0":
        raise NotNow("another thread measures")  # an exception is not cached: the next call tries again
    return found.fastest


def _thread_clock(run: Callable[[], object]) -> float:
    """The shortest of some calls, in seconds that this thread spent on the processor: others may be busy on it."""
    shortest = math.inf
    for _ in range(CALLS):
        begin = time.thread_time()
        run()
        shortest = min(shortest, time.thread_time() - begin)
    return shortest


def trial(multiply: str, direction: str, D: int) -> None:
    """Compute one small head with this way to multiply, on one thread."""
    q = torch.ones(1, 1, 256, D, dtype=torch.bfloat16, device="cpu")
    v = q.new_ones(1, 1, 512, min(MAX_DV, 2 * D))
    k, lam, out = v[..., :D], q.new_zeros(1, 1, 256, 1, dtype=torch.float32), q.new_empty(1, 1, 256, v.shape[-1])
    if direction == "forward":
        tensors, rows, dlam = (q, q, k, k, v, out), forward_rows(q, k, v, None), None
    else:
        *gradients, dlam = (torch.empty_like(x) for x in (q, q, k, k, v, lam))
        tensors, rows = (q, q, k, k, v, None, out.fill_(1), *gradients), backward_rows(q, q, k, v, None)
    call = Call(q, q, k, None, v, lam, scale=D**-0.5)
    packed = pack(tensors, BF16_MULTIPLY[multiply], lam, call, rows, dlam=dlam, threads=1)
    function, workspace = prepare(direction, packed)
    refuse_failure(function(packed.problem, packed.multiply, _aligned(workspace)))


def forward_rows(q1: Tensor, k1: Tensor, v: Tensor, window: int | None) -> int:
    """Queries of a forward block, as many as fit: their sums in a quarter of the second-level cache."""
    most = MAX_ROWS * 2 // q1.element_size()  # bf16 keeps its exponentials in half precision
    working, maps = 4 * v.shape[-1], 2
    return block_rows(q1, k1, v, window, most, working, maps)


def backward_rows(q1: Tensor, q2: Tensor, k1: Tensor, v: Tensor, window: int | None) -> int:
    """Queries of a backward block, as many as fit: their operands, gradients and maps of a chunk in that cache."""
    maps = 1 + 2 * q1.shape[1] // q2.shape[1]  # a noise head's, and the map and dP of each of its signal heads
    working = 3 * CHUNK + 6 * q1.shape[-1] + 2 * v.shape[-1]
    return block_rows(q1, k1, v, window, MAX_ROWS, working, maps)


def block_rows(q1: Tensor, k1: Tensor, v: Tensor, window: int | None, most: int, working: int, maps: int) -> int:
    """Queries in a block: whole strips, at most ``most``; or T rounded up to a multiple of 8.

    ``working`` numbers of each query fit in the second-level cache, and its numbers of ``maps`` maps in KEPT_BYTES.
    Each block reads all keys that it sees: where they come from memory, blocks have MAX_ROWS queries, if each thread
    then still has several.
    """
    (B, _, T, D), (G, S) = q1.shape, k1.shape[1:3]
    keys = S if window is None else min(S, window + MAX_ROWS)  # that a block may see
    rows = min(second_level_cache() // (4 * working), most)
    if 4 * keys * (2 * D + v.shape[-1]) >= NEAR_BYTES:
        rows = max(rows, min(MAX_ROWS, B * G * T // (8 * torch.get_num_threads())))
    rows = min(rows, KEPT_BYTES // (4 * maps * keys))
    return min(max(STRIP, rows // STRIP * STRIP), -(-T // 8) * 8)


@cache
def second_level_cache() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not tell."""
    with suppress(AttributeError, ValueError, OSError):  # no sysconf, or not this name
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or 2**20
    return 2**20


def pack(tensors, multiply: int, lam, call: Call, rows: int, dlam=None, threads: int | None = None) -> Packed:
    """Describe a call for ``native.cpp``.

    ``tensors``: q1, q2, k1, k2, v, out, dout, dq1, dq2, dk1, dk2, dv, as many as the call needs.
    """
    q1, q2, k1, _, v = tensors[:5]
    attn_mask, window = call.attn_mask, call.window
    copies: dict[object, Tensor] = {}
    numbers: list[int] = []
    for x in tensors:
        if x is None:
            numbers += NO_MATRIX
            continue
        *strides, inner = x.stride()
        if inner != 1 and x.shape[-1] > 1:
            x = copies.setdefault(id(x), x.contiguous())
            strides = x.stride()[:3]
        numbers += (x.data_ptr(), *strides)
    numbers += NO_MATRIX * (12 - len(tensors))
    numbers += (lam.data_ptr(), *lam.stride()[:3], 0 if dlam is None else dlam.data_ptr())
    if attn_mask is None:
        numbers += (0, *NO_MATRIX)
    else:
        mask = copies["mask"] = attn_mask if attn_mask.dtype == torch.bool else attn_mask.float()
        strides = [stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True)]
        numbers += (mask.data_ptr(), *strides)
    (B, H, T, D), Hn, (G, S), Dv = q1.shape, q2.shape[1], k1.shape[1:3], v.shape[3]
    if threads is None:
        threads = 1 if B * H * T * S * (D + Dv) < MAX_SINGLE_THREAD_WORK else torch.get_num_threads()
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    numbers += (additive, B, H, Hn, G, T, S, D, Dv, call.is_causal, window or 0, threads, rows)
    numbers.append(-(-threads // (B * G)))
    return Packed(LAYOUT.pack(*numbers, call.scale, *NO_NORM), multiply, copies)


def prepare(name: str, packed: Packed) -> tuple[Callable, Tensor]:
    """The library's function ``diff_attention_NAME`` and its workspace for the call."""
    native = library()
    if native is None:
        raise RuntimeError("there is no native library here")
    size = getattr(native, f"diff_attention_{name}_workspace")(packed.problem, packed.multiply)
    return getattr(native, f"diff_attention_{name}"), torch.empty(size + 64, dtype=torch.uint8, device="cpu")


def _aligned(workspace: Tensor) -> int:
    """The first address in it that 64 divides."""
    return -(-workspace.data_ptr() // 64) * 64
