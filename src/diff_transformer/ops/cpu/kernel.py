"""Call the CPU kernel, ``native.cpp``."""

import os
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.cpu.library import HeadOutput, Mask, Matrix, Problem, library

MAX_WIDTH = 256  # of queries and values
MAX_DECODE_ROWS = 8  # rows of a map that share a key/value head: up to here each key is read once, unpacked
MAX_SINGLE_THREAD_WORK = 2**15  # multiply-adds that one thread finishes before a second one has started
STRIP, CHUNK = 32, 256  # queries and keys of a product
MAX_ROWS = 128  # queries of a block
MAX_SAVED_BYTES = 2**25  # of exponentials, in each thread
MAX_NEAR_BYTES = 2**23  # of a head's packed keys and values: more do not stay in a cache from one block to the next


def forward(call: Call) -> Tensor:
    """[B, T, H, Dv] in the dtype of v."""
    q1, k1, v = call.q1, call.k1, call.v
    B, H, T, _ = q1.shape
    out = v.new_empty(B, T, H, v.shape[-1])
    few_rows = H // k1.shape[1] * T <= MAX_DECODE_ROWS
    rows, head_output = (T, HeadOutput(gain=1.0)) if few_rows else (forward_rows(q1, k1, v, call.window), None)
    run("decode" if few_rows else "forward", call, rows, head_output, out=out.transpose(1, 2))
    return out


def backward(call: Call, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q1, q2, k1, k2, v, lam and first; dout [B, H, T, Dv] is that of the output."""
    q1, q2, k1, _, v, lam = call.inputs
    some_rows_are_fully_masked = call.is_causal and k1.shape[2] < q1.shape[2]
    new = torch.zeros_like if some_rows_are_fully_masked else torch.empty_like
    of = (new(x, memory_format=torch.contiguous_format) for x in (*call.inputs, lam))
    dq1, dq2, dk1, dk2, dv, dlam, dfirst = of
    rows = backward_rows(q1, q2, k1, v, call.window)
    run(
        "backward", call, rows, None,
        dout=dout, dq1=dq1, dq2=dq2, dk1=dk1, dk2=dk2, dv=dv, dlam=dlam, dfirst=dfirst,
    )  # fmt: skip
    return dq1, dq2, dk1, dk2, dv, dlam, dfirst


def run(name: str, call: Call, rows: int, head_output: HeadOutput | None, **results: Tensor) -> None:
    """Run ``diff_attention_NAME`` of the library.

    Args:
        rows: queries of a block.
        head_output: for "decode".
        results: ``out``, or ``dout`` and the gradients, by their names in ``Problem``.
    """
    native = library()
    assert native is not None  # ``unsupported_reason`` has asked
    copies: list[Tensor] = []  # copies live until the kernel returns
    q1, q2, k1, k2, v, lam = call.inputs
    lam_and_first = {name: results.pop(name).data_ptr() for name in ("dlam", "dfirst") if name in results}
    tensors = {"q1": q1, "q2": q2, "k1": k1, "k2": k2, "v": v, "lam": lam, **results}
    if call.first is not None:
        tensors["first"] = call.first
    (B, H, T, D), Hn, (G, S), Dv = q1.shape, q2.shape[1], k1.shape[1:3], v.shape[3]
    threads = threads_of(B * H * T * S * (D + Dv))
    matrices: dict[str, Any] = {name: matrix(x, copies) for name, x in tensors.items()}
    if k2 is k1:  # the kernel compares addresses
        matrices["k2"] = matrices["k1"]
    problem = Problem(
        **matrices, **lam_and_first, mask=mask_of(call.attn_mask, copies),
        B=B, H=H, Hn=Hn, G=G, T=T, S=S, D=D, Dv=Dv, causal=call.is_causal, window=call.window or 0,
        threads=threads, rows=rows, parts=-(-threads // (B * G)), bf16=q1.dtype == torch.bfloat16, scale=call.scale,
    )  # fmt: skip
    check(getattr(native, f"diff_attention_{name}")(problem, *(() if head_output is None else (head_output,))))


def check(status: int) -> None:
    """Raise the error that a function of the library returns.

    Raises:
        MemoryError: there is no memory for its workspace. RuntimeError: anything else.
    """
    if status == 1:
        raise MemoryError("the CPU kernel of diff_attention could not allocate its workspace")
    if status:
        raise RuntimeError("the CPU kernel of diff_attention failed; give backend='sdpa'")


def threads_of(work: int) -> int:
    """Threads for this many multiply-adds."""
    return 1 if work < MAX_SINGLE_THREAD_WORK else torch.get_num_threads()


def matrix(x: Tensor, copies: list[Tensor]) -> Matrix:
    """``x`` [B, heads, rows, columns] for the kernel; a copy goes to ``copies`` if its columns are strided."""
    if x.stride(3) != 1 and x.shape[3] > 1:
        x = x.contiguous()
        copies.append(x)
    batch, head, row, _ = x.stride()
    return Matrix(x.data_ptr(), batch, head, row)


def mask_of(attn_mask: Tensor | None, copies: list[Tensor]) -> Mask:
    """The mask [B|1, H|1, T|1, S|1] for the kernel; additive masks in fp32."""
    if attn_mask is None:
        return Mask()
    additive = attn_mask.dtype != torch.bool
    mask = attn_mask.float() if additive else attn_mask
    copies.append(mask)
    strides = [stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return Mask(mask.data_ptr(), *strides, additive)


def forward_rows(q1: Tensor, k1: Tensor, v: Tensor, window: int | None) -> int:
    """Queries of a forward block, as many as fit: their sums in a quarter of the second-level cache."""
    most = MAX_ROWS * 2 // q1.element_size()  # bf16 saves its exponentials in half precision
    working, maps = 4 * v.shape[-1], 2
    return block_rows(q1, k1, v, window, most, working, maps)


def backward_rows(q1: Tensor, q2: Tensor, k1: Tensor, v: Tensor, window: int | None) -> int:
    """Queries of a backward block, as many as fit: their operands, gradients and maps of a chunk in that cache."""
    maps = 1 + 2 * q1.shape[1] // q2.shape[1]  # of a noise head, and the map and dP of each of its signal heads
    working = 3 * CHUNK + 6 * q1.shape[-1] + 2 * v.shape[-1]
    return block_rows(q1, k1, v, window, MAX_ROWS, working, maps)


def block_rows(q1: Tensor, k1: Tensor, v: Tensor, window: int | None, most: int, working: int, maps: int) -> int:
    """Queries in a block: whole strips, at most ``most``; or T rounded up to a multiple of 8.

    ``working`` numbers of each query fit in the second-level cache, and its numbers of ``maps`` maps in
    MAX_SAVED_BYTES. Each block reads all keys that it sees: where they come from memory, blocks have MAX_ROWS queries,
    if each thread then still has several.
    """
    (B, _, T, D), (G, S) = q1.shape, k1.shape[1:3]
    keys = S if window is None else min(S, window + MAX_ROWS)  # that a block may see
    rows = min(second_level_cache() // (4 * working), most)
    if 4 * keys * (2 * D + v.shape[-1]) >= MAX_NEAR_BYTES:
        rows = max(rows, min(MAX_ROWS, B * G * T // (8 * torch.get_num_threads())))
    rows = min(rows, MAX_SAVED_BYTES // (4 * maps * keys))
    return min(max(STRIP, rows // STRIP * STRIP), -(-T // 8) * 8)


@cache
def second_level_cache() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not say."""
    with suppress(AttributeError, ValueError, OSError):  # no sysconf, or not this name
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or 2**20
    return 2**20
