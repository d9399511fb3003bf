"""What the forward and backward kernels share: reading tiles, products over two chunks of a width, which keys are seen.

A width that is no power of two is cut into chunks a and b (96 = 64 + 32), for a tile's sizes are powers of two; where
there is one chunk, b stands for nothing and is never read. Scores are in units of log2: exp2 is what the hardware has.
"""

import triton
import triton.language as tl

NO_MASK = tl.constexpr(0)  # MASK_KIND: no attn_mask
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)
ONE_ROW = tl.constexpr(0)  # MASK_ROWS: one row of attn_mask for all queries
ROW_PER_QUERY = tl.constexpr(1)  # a row for each
VALUE_PER_QUERY = tl.constexpr(2)  # a row for each, of one value for all keys
LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def load_chunk(
    base, offset, stride, limit, FIRST: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS_CHECKED: tl.constexpr,
):  # fmt: skip
    """Columns FIRST to FIRST + CHUNK of the rows ``offset`` [rows], zeros from row ``limit`` and column WIDTH on."""
    columns = FIRST + tl.arange(0, CHUNK)
    pointers = base + (offset[:, None] * stride + columns[None, :])
    if FIRST + CHUNK > WIDTH:
        inside = columns[None, :] < WIDTH
        if ROWS_CHECKED:
            inside = inside & (offset[:, None] < limit)
        return tl.load(pointers, mask=inside, other=0.0)
    elif ROWS_CHECKED:
        return tl.load(pointers, mask=offset[:, None] < limit, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile(
    base,
    offset,
    stride,
    limit,
    A: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS_CHECKED: tl.constexpr,
):
    """Both chunks of rows ``base + offset * stride``; with one chunk the second is the first."""
    a = load_chunk(base, offset, stride, limit, 0, A, WIDTH, ROWS_CHECKED)
    if B > 0:
        return a, load_chunk(base, offset, stride, limit, A, B, WIDTH, ROWS_CHECKED)
    else:
        return a, a


@triton.jit
def store_chunk(base, offset, stride, limit, x, FIRST: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    columns = FIRST + tl.arange(0, CHUNK)
    inside = (offset[:, None] < limit) & (columns[None, :] < WIDTH)
    tl.store(base + (offset[:, None] * stride + columns[None, :]), x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(base, offset, stride, limit, a, b, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr):
    store_chunk(base, offset, stride, limit, a, 0, A, WIDTH)
    if B > 0:
        store_chunk(base, offset, stride, limit, b, A, B, WIDTH)


@triton.jit
def product(xa, xb, ya, yb, B: tl.constexpr):
    """x y^T over both chunks, fp32. fp32 inputs are multiplied exactly, never rounded to TF32."""
    s = tl.dot(xa, tl.trans(ya), input_precision="ieee")
    if B > 0:
        s = tl.dot(xb, tl.trans(yb), s, input_precision="ieee")
    return s


@triton.jit
def accumulate(a, b, x, ya, yb, B: tl.constexpr):
    """a += x ya and b += x yb, with x rounded to the dtype of y."""
    x = x.to(ya.dtype)
    a = tl.dot(x, ya, a, input_precision="ieee")
    if B > 0:
        b = tl.dot(x, yb, b, input_precision="ieee")
    return a, b


@triton.jit
def zeros(ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Accumulators of both chunks; what stands for a second chunk that is not there is as small as can be."""
    a = tl.zeros([ROWS, A], tl.float32)
    if B > 0:
        return a, tl.zeros([ROWS, B], tl.float32)
    else:
        return a, tl.zeros([1], tl.float32)


@triton.jit
def within_rows(key, S):
    """key, or where there is no such key another in the last 16 of rows that are padded to multiples of 16."""
    group = tl.minimum(key // 16, (S - 1) // 16) * 16 + key % 16
    if key.shape[0] == 1:
        return tl.max_contiguous(tl.multiple_of(group, [1, 16]), [1, 16])
    else:
        return tl.max_contiguous(tl.multiple_of(group, [16, 1]), [16, 1])


@triton.jit
def mask_scores(
    scores,
    query,
    key,
    T,
    S,
    window,
    mask,
    mask_stride_t,
    mask_stride_s,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK_KIND: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):
    """Scores (in units of log2), -inf where a key does not exist or is hidden by its position or by attn_mask.

    query and key are positions that broadcast to the tile, whichever of them runs along its rows.
    """
    keep = (key < S) & (query < T)
    if CAUSAL:
        own = query + (S - T)
        keep = keep & (key <= own)
        if WINDOW:
            keep = keep & (key > own - window)
    if MASK_KIND == NO_MASK:
        return tl.where(keep, scores, MINUS_INFINITY)
    else:
        # Loads that are not predicated, or wgmma would be serialised: rows of their own are padded in memory.
        row = tl.minimum(query, T - 1).to(tl.int64) * mask_stride_t
        if MASK_ROWS == ROW_PER_QUERY:
            given = tl.load(mask + row + within_rows(key, S) * mask_stride_s)
        elif MASK_ROWS == VALUE_PER_QUERY:
            given = tl.load(mask + row)
        else:
            given = tl.load(mask + key.to(tl.int64) * mask_stride_s, mask=key < S, other=0)
        if MASK_KIND == BOOLEAN:
            return tl.where(keep & (given != 0), scores, MINUS_INFINITY)
        else:
            return tl.where(keep, scores + given.to(tl.float32) * LOG2_E, MINUS_INFINITY)


@triton.jit
def tile_of_program(tiles, heads, SECTION: tl.constexpr):
    """(tile, head) of this program: SECTION heads at a time, whose keys and values then share the L2 cache."""
    program = tl.program_id(0)
    section = program // (tiles * SECTION)
    here = tl.minimum(SECTION, heads - section * SECTION)
    place = program - section * tiles * SECTION
    return place // here, section * SECTION + place % here


@triton.jit
def document(cu_seqlens, batch, length, VARLEN: tl.constexpr):
    """(first row, rows, index of the batch) of a document among packed ones, or of a batch entry."""
    if VARLEN:
        start = tl.load(cu_seqlens + batch)
        return start.to(tl.int64), tl.load(cu_seqlens + batch + 1) - start, batch * 0
    else:
        return (batch * 0).to(tl.int64), length, batch


@triton.jit
def place(
    tiles, heads_in_all, cu_seqlens_q, cu_seqlens_k, T, S, HEADS: tl.constexpr, VARLEN: tl.constexpr,
    SECTION: tl.constexpr,
):  # fmt: skip
    """(tile, head, batch entry, first query, queries, first key, keys) of this program, of HEADS heads an entry.

    Kernels ask again, with 0 added to ``tiles`` in a way the compiler does not see through, after a loop and in it:
    else it keeps all of this, and the addresses that follow from it, in registers throughout the loop.
    """
    tile, head_in_all = tile_of_program(tiles, heads_in_all, SECTION)
    batch = (head_in_all // HEADS).to(tl.int64)
    q_start, T, entry = document(cu_seqlens_q, batch, T, VARLEN)
    k_start, S, entry = document(cu_seqlens_k, batch, S, VARLEN)
    return tile, head_in_all % HEADS, entry, q_start, T, k_start, S
