"""The two decoding kernels: one split of the keys for both maps, and the combination of all splits.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
Row j T + t of a program is query t of the j-th signal head of its key/value head.
"""

import triton
import triton.language as tl

from diff_transformer.ops.triton.forward import online_softmax_step
from diff_transformer.ops.triton.tiles import MINUS_INFINITY, load_tile, product, zeros

ROWS = tl.constexpr(16)  # of a program: those of the smallest tensor-core product
MASK_SCAN = tl.constexpr(128)  # keys that ``visible_range`` reads at once


@triton.jit
def quotient(acc, row_sum):
    """acc / row_sum, 0 for fully masked rows."""
    return tl.where(row_sum > 0, acc / tl.where(row_sum > 0, row_sum, 1.0), 0.0)


@triton.jit
def store_rows(to, rows, inside, a, b, A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr):
    """Store both chunks, a [ROWS, A] and b [ROWS, B], of rows of WIDTH columns that begin at ``to + rows`` [ROWS]."""
    pointers = to + rows[:, None]
    columns = tl.arange(0, A)[None, :]
    tl.store(pointers + columns, a.to(to.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH))
    if B > 0:
        columns = A + tl.arange(0, B)[None, :]
        tl.store(pointers + columns, b.to(to.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH))


@triton.jit
def visible_range(mask, mask_row, mask_stride_s, row_exists, low, high, MASK_ROWS: tl.constexpr):
    """The smallest range within keys low to high - 1 that attn_mask leaves visible, so that padding is not read."""
    first = tl.full([MASK_SCAN], high, tl.int32)
    last = tl.full([MASK_SCAN], low, tl.int32)
    for start in range(low, high, MASK_SCAN):
        key = start + tl.arange(0, MASK_SCAN)
        if MASK_ROWS:
            inside = row_exists[:, None] & (key < high)[None, :]
            seen = tl.load(mask + mask_row[:, None] + key.to(tl.int64)[None, :] * mask_stride_s, mask=inside, other=0)
            visible = tl.max((seen != 0).to(tl.int32), 0) > 0
        else:
            visible = tl.load(mask + key.to(tl.int64) * mask_stride_s, mask=key < high, other=0) != 0
        first = tl.minimum(first, tl.where(visible, key, high))
        last = tl.maximum(last, tl.where(visible, key + 1, low))
    return tl.min(first, 0), tl.max(last, 0)


@triton.jit(do_not_specialize=["S", "window", "mask_stride_b", "mask_stride_h", "mask_stride_t"])
def decode_split_kernel(
    q1, q2, k1, k2, v, lam, mask, lengths, out, partial,
    factor, T, S, window, H, Hn, G, all_rows,
    q1_stride_b, q1_stride_h, q1_stride_t, q2_stride_b, q2_stride_h, q2_stride_t,
    k1_stride_b, k1_stride_g, k1_stride_s, k2_stride_b, k2_stride_g, k2_stride_s,
    v_stride_b, v_stride_g, v_stride_s, lam_stride_b, lam_stride_h, lam_stride_t,
    mask_stride_b, mask_stride_h, mask_stride_t, mask_stride_s,
    D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr,
    BLOCK_N: tl.constexpr, SHARED_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, MASK_ROWS: tl.constexpr, RAGGED: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr,
):  # fmt: skip
    """Both maps of one split of keys. Grid: (B * G * tiles of rows, splits). SINGLE_SPLIT: writes ``out`` itself.

    partial: unnormalised outputs [splits, 2, all_rows, DV], then row maxima and row sums [splits, 2, 2, all_rows].
    """
    group = H // G
    tiles = tl.cdiv(group * T, ROWS)
    place = tl.program_id(0)
    g = (place // tiles) % G
    b = place // (tiles * G)
    b64 = b.to(tl.int64)
    g64 = g.to(tl.int64)

    row = (place % tiles) * ROWS + tl.arange(0, ROWS)
    row_exists = row < group * T
    row = tl.where(row_exists, row, 0)
    head = g * group + row // T
    t = row % T
    head64 = head.to(tl.int64)
    t64 = t.to(tl.int64)
    noise = (head // (H // Hn)).to(tl.int64)
    q1_row = b64 * q1_stride_b + head64 * q1_stride_h + t64 * q1_stride_t
    q2_row = b64 * q2_stride_b + noise * q2_stride_h + t64 * q2_stride_t
    q1a, q1b = load_tile(q1, q1_row, 1, 0, DA, DB, D, False)  # [ROWS, DA], [ROWS, DB]; row 0 where there is none
    q2a, q2b = load_tile(q2, q2_row, 1, 0, DA, DB, D, False)

    length = S
    if RAGGED:
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), S)
    own = length - T + t  # position of each row's query
    low = 0
    if WINDOW:
        low = tl.maximum(0, length - T - window + 1)
    splits = tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(length - low, splits), BLOCK_N) * BLOCK_N
    low = tl.minimum(low + tl.program_id(1) * share, length)
    high = tl.minimum(low + share, length)
    mask_row = row
    if MASKED:
        mask += b64 * mask_stride_b
        mask_row = head64 * mask_stride_h + t64 * mask_stride_t
        low, high = visible_range(mask, mask_row, mask_stride_s, row_exists, low, high, MASK_ROWS)

    k1 += b64 * k1_stride_b + g64 * k1_stride_g
    k2 += b64 * k2_stride_b + g64 * k2_stride_g
    v += b64 * v_stride_b + g64 * v_stride_g
    acc1a, acc1b = zeros(ROWS, VA, VB)  # [ROWS, VA], [ROWS, VB]
    acc2a, acc2b = zeros(ROWS, VA, VB)
    row_max1 = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    row_max2 = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    row_sum1 = tl.zeros([ROWS], tl.float32)
    row_sum2 = tl.zeros([ROWS], tl.float32)
    # Counted from 0: in a loop that starts at the result of visible_range, Triton does not pipeline the loads.
    for step in tl.range(0, high - low, BLOCK_N):
        key = low + step + tl.arange(0, BLOCK_N)
        key64 = key.to(tl.int64)
        exists = key < high
        ka, kb = load_tile(k1, key64, k1_stride_s, high, DA, DB, D, True)  # [BLOCK_N, DA], [BLOCK_N, DB]
        scores1 = product(q1a, q1b, ka, kb, DB) * factor  # [ROWS, BLOCK_N]
        if not SHARED_KEYS:
            ka, kb = load_tile(k2, key64, k2_stride_s, high, DA, DB, D, True)
        scores2 = product(q2a, q2b, ka, kb, DB) * factor
        seen = row_exists[:, None] & exists[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= own[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > own[:, None] - window)
        if MASKED:
            if MASK_ROWS:
                given = tl.load(mask + mask_row[:, None] + key64[None, :] * mask_stride_s, mask=seen, other=0)
                seen = seen & (given != 0)
            else:
                given = tl.load(mask + key64 * mask_stride_s, mask=exists, other=0)
                seen = seen & (given != 0)[None, :]
        va, vb = load_tile(v, key64, v_stride_s, high, VA, VB, DV, True)
        scores1 = tl.where(seen, scores1, MINUS_INFINITY)
        scores2 = tl.where(seen, scores2, MINUS_INFINITY)
        acc1a, acc1b, row_max1, row_sum1 = online_softmax_step(
            acc1a, acc1b, row_max1, row_sum1, scores1, va, vb, factor, False, VB
        )
        acc2a, acc2b, row_max2, row_sum2 = online_softmax_step(
            acc2a, acc2b, row_max2, row_sum2, scores2, va, vb, factor, False, VB
        )

    out_row = (b64 * H + head64) * T + t64  # [ROWS]
    if SINGLE_SPLIT:
        lam_row = b64 * lam_stride_b + head64 * lam_stride_h + t64 * lam_stride_t
        weight = tl.load(lam + lam_row)[:, None]
        a = quotient(acc1a, row_sum1[:, None]) - weight * quotient(acc2a, row_sum2[:, None])
        b = a
        if VB > 0:
            b = quotient(acc1b, row_sum1[:, None]) - weight * quotient(acc2b, row_sum2[:, None])
        store_rows(out, out_row * DV, row_exists, a, b, VA, VB, DV)
    else:
        first = tl.program_id(1).to(tl.int64) * 2 * all_rows  # first row of this split in ``partial``
        written = row_exists & (row_max1 > MINUS_INFINITY)
        store_rows(partial, (first + out_row) * DV, written, acc1a, acc1b, VA, VB, DV)
        store_rows(partial, (first + all_rows + out_row) * DV, written, acc2a, acc2b, VA, VB, DV)
        state = partial + tl.num_programs(1).to(tl.int64) * 2 * all_rows * DV + first * 2
        tl.store(state + out_row, row_max1, mask=row_exists)
        tl.store(state + all_rows + out_row, row_sum1, mask=row_exists)
        tl.store(state + 2 * all_rows + out_row, row_max2, mask=row_exists)
        tl.store(state + 3 * all_rows + out_row, row_sum2, mask=row_exists)


@triton.jit
def combine_splits(outputs, state, splits, all_rows, row, dv, inside, DV: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """Columns dv of softmax v of one map in one row, combined from its splits; fp32."""
    i = tl.arange(0, SPLITS_PAD).to(tl.int64)
    exists = i < splits
    row_max = tl.load(state + i * 4 * all_rows + row, mask=exists, other=MINUS_INFINITY)  # [splits]
    row_sum = tl.load(state + i * 4 * all_rows + all_rows + row, mask=exists, other=0.0)
    highest = tl.max(row_max, 0)
    weight = tl.exp2(row_max - tl.where(highest == MINUS_INFINITY, 0.0, highest))
    written = (row_max > MINUS_INFINITY)[:, None] & inside[None, :]  # splits without visible keys have no output
    pointers = outputs + (i[:, None] * 2 * all_rows + row) * DV + dv[None, :]
    parts = tl.load(pointers, mask=written, other=0.0)  # [splits, columns]
    return quotient(tl.sum(parts * weight[:, None], 0), tl.sum(row_sum * weight, 0))


@triton.jit(do_not_specialize=["splits", "all_rows"])
def decode_combine_kernel(
    partial, lam, out, splits, all_rows, H, T, lam_stride_b, lam_stride_h, lam_stride_t,
    DV: tl.constexpr, COLUMNS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Combine the splits of both maps and subtract. Grid: (rows of out, tiles of COLUMNS)."""
    row = tl.program_id(0).to(tl.int64)
    dv = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = dv < DV
    state = partial + splits.to(tl.int64) * 2 * all_rows * DV
    first = combine_splits(partial, state, splits, all_rows, row, dv, inside, DV, SPLITS_PAD)
    second = combine_splits(
        partial + all_rows.to(tl.int64) * DV, state + 2 * all_rows, splits, all_rows, row, dv, inside, DV, SPLITS_PAD
    )
    head = row // T
    weight = tl.load(lam + (head // H) * lam_stride_b + (head % H) * lam_stride_h + (row % T) * lam_stride_t)
    tl.store(out + row * DV + dv, (first - weight * second).to(out.dtype.element_ty), mask=inside)
