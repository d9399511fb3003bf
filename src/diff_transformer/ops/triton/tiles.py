"""Shared by the forward and backward kernels: loading tiles, products over two chunks of a width, masks.

Sizes of a tile are powers of two. Another width is split into chunks a and b (96 = 64 + 32). If one chunk is enough, b
is a placeholder that is never read. Scores are in units of log2, because the hardware computes exp2.

What belongs together travels in tuples: ``strides`` of a tensor are those of a batch entry, a head and a row, in
elements; ``lengths`` are T, S and the window; ``tiles`` the tiles of a head and the heads in all; ``mask`` a pointer,
and the strides of a row and of a key.

``recompute_here`` is an argument of the kernels that is always 0. Added to a value, it makes the compiler compute the
addresses and limits that follow from that value again where they are used, for it cannot know the 0. Otherwise it keeps
them in registers during a loop, and ptxas spills them: the trick avoids ``st.local`` and ``ld.local``.
"""

import triton
import triton.language as tl

NO_MASK = tl.constexpr(0)  # values of MASK_KIND: the kind of attn_mask
BOOLEAN = tl.constexpr(1)
ADDITIVE = tl.constexpr(2)
ONE_ROW = tl.constexpr(0)  # values of MASK_ROWS: one row of attn_mask for all queries,
ROW_PER_QUERY = tl.constexpr(1)  # a row for each query,
VALUE_PER_QUERY = tl.constexpr(2)  # one value for each query, the same for all keys
LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def load_chunk(
    base, offset, stride, limit, FIRST: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS_CHECKED: tl.constexpr,
):  # fmt: skip
    """[rows, CHUNK]: columns from FIRST on of the rows ``offset`` [rows]; zero from row ``limit`` and column WIDTH
    on."""
    columns = FIRST + tl.arange(0, CHUNK)
    pointers = base + (offset[:, None] * stride + columns[None, :])
    if FIRST + CHUNK > WIDTH:
        inside = columns[None, :] < WIDTH
        if ROWS_CHECKED:
            inside = inside & (offset[:, None] < limit)
        return tl.load(pointers, mask=inside, other=0.0)  # [rows, CHUNK]
    elif ROWS_CHECKED:
        return tl.load(pointers, mask=offset[:, None] < limit, other=0.0)  # [rows, CHUNK]
    else:
        return tl.load(pointers)  # [rows, CHUNK]


@triton.jit
def load_tile(
    base, offset, stride, limit, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, ROWS_CHECKED: tl.constexpr
):
    """Both chunks, [rows, A] and [rows, B], of rows ``base + offset * stride``; if B is 0, the first one twice."""
    a = load_chunk(base, offset, stride, limit, 0, A, WIDTH, ROWS_CHECKED)  # [rows, A]
    if B > 0:
        return a, load_chunk(base, offset, stride, limit, A, B, WIDTH, ROWS_CHECKED)  # [rows, B]
    else:
        return a, a


@triton.jit
def store_chunk(base, offset, stride, limit, x, FIRST: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Store x [rows, CHUNK] to columns from FIRST on of the rows ``offset`` below ``limit``."""
    columns = FIRST + tl.arange(0, CHUNK)
    inside = (offset[:, None] < limit) & (columns[None, :] < WIDTH)
    tl.store(base + (offset[:, None] * stride + columns[None, :]), x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(base, offset, stride, limit, a, b, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr):
    """Store both chunks, a [rows, A] and b [rows, B]."""
    store_chunk(base, offset, stride, limit, a, 0, A, WIDTH)
    if B > 0:
        store_chunk(base, offset, stride, limit, b, A, B, WIDTH)


@triton.jit
def product(xa, xb, ya, yb, B: tl.constexpr):
    """x y^T over both chunks, [rows of x, rows of y] in fp32. fp32 inputs are never rounded to TF32."""
    s = tl.dot(xa, tl.trans(ya), input_precision="ieee")
    if B > 0:
        s = tl.dot(xb, tl.trans(yb), s, input_precision="ieee")
    return s


@triton.jit
def accumulate(a, b, x, ya, yb, B: tl.constexpr):
    """a += x ya [rows, A] and b += x yb [rows, B], with x rounded to the dtype of y.

    The wider chunk comes last: Triton shares all mma.sync products of a loop among the warps by the shape of the last
    one, along its columns if it has more of them than rows.
    """
    x = x.to(ya.dtype)
    if B > 0:
        b = tl.dot(x, yb, b, input_precision="ieee")
    return tl.dot(x, ya, a, input_precision="ieee"), b


@triton.jit
def zeros(ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Zero accumulators of both chunks, [ROWS, A] and [ROWS, B]; if B is 0, the second is a placeholder of size 1."""
    a = tl.zeros([ROWS, A], tl.float32)
    if B > 0:
        return a, tl.zeros([ROWS, B], tl.float32)
    else:
        return a, tl.zeros([1], tl.float32)


@triton.jit
def within_rows(key, S):
    """key, replaced by one in the last group of 16 if it lies beyond S; rows of the mask are padded to multiples of
    16."""
    group = tl.minimum(key // 16, (S - 1) // 16) * 16 + key % 16
    if key.shape[0] == 1:
        return tl.max_contiguous(tl.multiple_of(group, [1, 16]), [1, 16])
    else:
        return tl.max_contiguous(tl.multiple_of(group, [16, 1]), [16, 1])


@triton.jit
def mask_scores(
    scores, query, key, lengths, mask, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr,
    MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """Scores (in units of log2) with attn_mask applied, -inf for keys beyond S and keys that a mask hides.

    query and key are positions that broadcast to the tile: [BLOCK_M, 1] and [1, BLOCK_N], or [1, BLOCK_M] and
    [BLOCK_N, 1].
    """
    T, S, window = lengths
    keep = (key < S) & (query < T)
    if CAUSAL:
        own = query + (S - T)
        keep = keep & (key <= own)
        if WINDOW:
            keep = keep & (key > own - window)
    if MASK_KIND == NO_MASK:
        return tl.where(keep, scores, MINUS_INFINITY)
    else:
        # Loads without a predicate: with one, ptxas serialises wgmma.mma_async. So mask rows are padded in memory.
        row = tl.minimum(query, T - 1).to(tl.int64) * mask[1]
        if MASK_ROWS == ROW_PER_QUERY:
            given = tl.load(mask[0] + row + within_rows(key, S) * mask[2])  # the shape of scores
        elif MASK_ROWS == VALUE_PER_QUERY:
            given = tl.load(mask[0] + row)  # the shape of query
        else:
            given = tl.load(mask[0] + key.to(tl.int64) * mask[2], mask=key < S, other=0)  # the shape of key
        if MASK_KIND == BOOLEAN:
            return tl.where(keep & (given != 0), scores, MINUS_INFINITY)
        else:
            return tl.where(keep, scores + given.to(tl.float32) * LOG2_E, MINUS_INFINITY)


@triton.jit
def tile_of_program(tiles, SECTION: tl.constexpr):
    """(tile, head) of this program. Programs go through SECTION heads at a time, whose keys and values fit the L2
    cache."""
    tiles_of_head, heads = tiles
    program = tl.program_id(0)
    section = program // (tiles_of_head * SECTION)
    here = tl.minimum(SECTION, heads - section * SECTION)
    within = program - section * tiles_of_head * SECTION
    return within // here, section * SECTION + within % here


@triton.jit
def place(
    tiles, documents, T, S, HEADS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, VARLEN: tl.constexpr,
    SECTION: tl.constexpr,
):  # fmt: skip
    """(first row, head, batch entry, first query, queries, first key, keys) of this program; HEADS heads in a batch
    entry. Its tile is of BLOCK keys (KEYS) or queries. Those with the most to do under a causal limit come first.

    VARLEN: ``documents`` are the document of each tile (``Call.grid``) and where the queries and keys of each begin. A
    tile may lie beyond the end of its document.
    """
    tile, head_in_all = tile_of_program(tiles, SECTION)
    if not KEYS:
        tile = tiles[0] - 1 - tile
    batch = (head_in_all // HEADS).to(tl.int64)
    head = head_in_all % HEADS
    if VARLEN:
        of_tile, cu_seqlens_q, cu_seqlens_k = documents
        document = tl.load(of_tile + tile)  # scalars
        q_start = tl.load(cu_seqlens_q + document)
        k_start = tl.load(cu_seqlens_k + document)
        T = tl.load(cu_seqlens_q + document + 1) - q_start
        S = tl.load(cu_seqlens_k + document + 1) - k_start
        tile -= document + (k_start if KEYS else q_start) // BLOCK
        return tile * BLOCK, head, batch, q_start.to(tl.int64), T, k_start.to(tl.int64), S
    else:
        start = (batch * 0).to(tl.int64)
        return tile * BLOCK, head, batch, start, T, start, S
