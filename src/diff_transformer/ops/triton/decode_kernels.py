"""The two decoding kernels: one split of the keys for both maps, and the combination of all splits.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
Row j T + t of a program is query t of the j-th signal head of its key/value head. A program finds its rows, its keys
(``own_length``, ``own_keys``), which of a tile its rows see (``visible``), and writes the output (``write_output``) or,
where there are several splits, what the second kernel combines (``write_partial``).
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
def visible_range(mask, row_exists, low, high, MASK_ROWS: tl.constexpr):
    """The smallest range within keys low to high - 1 that attn_mask leaves visible, so that padding is not read."""
    first = tl.full([MASK_SCAN], high, tl.int32)
    last = tl.full([MASK_SCAN], low, tl.int32)
    for start in range(low, high, MASK_SCAN):
        key = start + tl.arange(0, MASK_SCAN)
        if MASK_ROWS:
            inside = row_exists[:, None] & (key < high)[None, :]
            pointers = mask[0] + mask[1][:, None] + key.to(tl.int64)[None, :] * mask[2]
            given = tl.load(pointers, mask=inside, other=0)  # [ROWS, MASK_SCAN]
            seen = tl.max((given != 0).to(tl.int32), 0) > 0
        else:
            seen = tl.load(mask[0] + key.to(tl.int64) * mask[2], mask=key < high, other=0) != 0  # [MASK_SCAN]
        first = tl.minimum(first, tl.where(seen, key, high))
        last = tl.maximum(last, tl.where(seen, key + 1, low))
    return tl.min(first, 0), tl.max(last, 0)


@triton.jit
def own_length(lengths, b, S, RAGGED: tl.constexpr):
    """Keys of batch entry b: S, or (RAGGED) what ``lengths`` says."""
    length = S
    if RAGGED:
        length = tl.minimum(tl.maximum(tl.load(lengths + b), 0), S)  # scalar
    return length


@triton.jit
def own_keys(length, T, window, mask, row_exists, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
             MASK_ROWS: tl.constexpr):  # fmt: skip
    """(first key, end) of this program's split: an equal share of what the window leaves, without what the mask hides
    at either end."""
    low = 0
    if WINDOW:
        low = tl.maximum(0, length - T - window + 1)
    splits = tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(length - low, splits), BLOCK_N) * BLOCK_N
    low = tl.minimum(low + tl.program_id(1) * share, length)
    high = tl.minimum(low + share, length)
    if MASKED:
        low, high = visible_range(mask, row_exists, low, high, MASK_ROWS)
    return low, high


@triton.jit
def visible(key, exists, own, window, mask, row_exists, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
            MASKED: tl.constexpr, MASK_ROWS: tl.constexpr):  # fmt: skip
    """Which keys of a tile each row sees, [ROWS, BLOCK_N]; ``own``: the position of each row's query."""
    seen = row_exists[:, None] & exists[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= own[:, None])
    if WINDOW:
        seen = seen & (key[None, :] > own[:, None] - window)
    if MASKED:
        key64 = key.to(tl.int64)
        if MASK_ROWS:
            pointers = mask[0] + mask[1][:, None] + key64[None, :] * mask[2]
            given = tl.load(pointers, mask=seen, other=0)  # [ROWS, BLOCK_N]
            seen = seen & (given != 0)
        else:
            given = tl.load(mask[0] + key64 * mask[2], mask=exists, other=0)  # [BLOCK_N]
            seen = seen & (given != 0)[None, :]
    return seen


@triton.jit
def write_output(
    out, out_row, row_exists, lam, weight, map1, map2, VA: tl.constexpr, VB: tl.constexpr, DV: tl.constexpr
):
    """The rows of the output, from both maps' accumulators and row sums over all keys; lam and weight [ROWS, 1]."""
    acc1a, acc1b, _, row_sum1 = map1
    acc2a, acc2b, _, row_sum2 = map2
    a = weight * quotient(acc1a, row_sum1[:, None]) - lam * quotient(acc2a, row_sum2[:, None])
    b = a
    if VB > 0:
        b = weight * quotient(acc1b, row_sum1[:, None]) - lam * quotient(acc2b, row_sum2[:, None])
    store_rows(out, out_row * DV, row_exists, a, b, VA, VB, DV)


@triton.jit
def write_partial(partial, out_row, all_rows, row_exists, map1, map2, VA: tl.constexpr, VB: tl.constexpr,
                  DV: tl.constexpr):  # fmt: skip
    """What this split found of both maps: unnormalised outputs, row maxima and row sums."""
    acc1a, acc1b, row_max1, row_sum1 = map1
    acc2a, acc2b, row_max2, row_sum2 = map2
    first = tl.program_id(1).to(tl.int64) * 2 * all_rows  # first row of this split in ``partial``
    written = row_exists & (row_max1 > MINUS_INFINITY)
    store_rows(partial, (first + out_row) * DV, written, acc1a, acc1b, VA, VB, DV)
    store_rows(partial, (first + all_rows + out_row) * DV, written, acc2a, acc2b, VA, VB, DV)
    state = partial + tl.num_programs(1).to(tl.int64) * 2 * all_rows * DV + first * 2
    tl.store(state + out_row, row_max1, mask=row_exists)
    tl.store(state + all_rows + out_row, row_sum1, mask=row_exists)
    tl.store(state + 2 * all_rows + out_row, row_max2, mask=row_exists)
    tl.store(state + 3 * all_rows + out_row, row_sum2, mask=row_exists)


@triton.jit(do_not_specialize=["S", "window", "mask_strides"])
def decode_split_kernel(
    inputs, mask, lengths, out, partial, factor, T, S, window, heads, all_rows, input_strides, mask_strides, mask_step,
    D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr,
    BLOCK_N: tl.constexpr, SHARED_KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, MASK_ROWS: tl.constexpr, RAGGED: tl.constexpr,
    SINGLE_SPLIT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Both maps of one split of keys. Grid: (B * G * tiles of rows, splits). SINGLE_SPLIT: writes ``out`` itself.

    heads: H, Hn, G. partial: unnormalised outputs [splits, 2, all_rows, DV], then row maxima and row sums [splits, 2,
    2, all_rows]. mask_strides: of batch, head and row; mask_step: of a key.
    """
    q1, q2, k1, k2, v, lam_at, first_at = inputs
    q1_strides, q2_strides, k1_strides, k2_strides, v_strides, lam_strides, first_strides = input_strides
    H, Hn, G = heads
    group = H // G
    tiles = tl.cdiv(group * T, ROWS)
    program = tl.program_id(0)
    g = (program // tiles) % G
    b = program // (tiles * G)
    b64 = b.to(tl.int64)
    g64 = g.to(tl.int64)

    row = (program % tiles) * ROWS + tl.arange(0, ROWS)
    row_exists = row < group * T
    row = tl.where(row_exists, row, 0)
    head = g * group + row // T
    t = row % T
    head64 = head.to(tl.int64)
    t64 = t.to(tl.int64)
    noise = (head // (H // Hn)).to(tl.int64)
    q1_row = b64 * q1_strides[0] + head64 * q1_strides[1] + t64 * q1_strides[2]
    q2_row = b64 * q2_strides[0] + noise * q2_strides[1] + t64 * q2_strides[2]
    q1a, q1b = load_tile(q1, q1_row, 1, 0, DA, DB, D, False)  # [ROWS, DA], [ROWS, DB]; row 0 where there is none
    q2a, q2b = load_tile(q2, q2_row, 1, 0, DA, DB, D, False)  # [ROWS, DA], [ROWS, DB]

    length = own_length(lengths, b, S, RAGGED)
    own = length - T + t  # position of each row's query
    mask_row = row
    if MASKED:
        mask += b64 * mask_strides[0]
        mask_row = head64 * mask_strides[1] + t64 * mask_strides[2]
    mask = (mask, mask_row, mask_step)
    low, high = own_keys(length, T, window, mask, row_exists, BLOCK_N, WINDOW, MASKED, MASK_ROWS)

    k1 += b64 * k1_strides[0] + g64 * k1_strides[1]
    k2 += b64 * k2_strides[0] + g64 * k2_strides[1]
    v += b64 * v_strides[0] + g64 * v_strides[1]
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
        ka, kb = load_tile(k1, key64, k1_strides[2], high, DA, DB, D, True)  # [BLOCK_N, DA], [BLOCK_N, DB]
        scores1 = product(q1a, q1b, ka, kb, DB) * factor  # [ROWS, BLOCK_N]
        if not SHARED_KEYS:
            ka, kb = load_tile(k2, key64, k2_strides[2], high, DA, DB, D, True)  # [BLOCK_N, DA], [BLOCK_N, DB]
        scores2 = product(q2a, q2b, ka, kb, DB) * factor  # [ROWS, BLOCK_N]
        seen = visible(key, exists, own, window, mask, row_exists, CAUSAL, WINDOW, MASKED, MASK_ROWS)
        va, vb = load_tile(v, key64, v_strides[2], high, VA, VB, DV, True)  # [BLOCK_N, VA], [BLOCK_N, VB]
        scores1 = tl.where(seen, scores1, MINUS_INFINITY)
        scores2 = tl.where(seen, scores2, MINUS_INFINITY)
        acc1a, acc1b, row_max1, row_sum1 = online_softmax_step(
            acc1a, acc1b, row_max1, row_sum1, scores1, va, vb, factor, False, VB
        )
        acc2a, acc2b, row_max2, row_sum2 = online_softmax_step(
            acc2a, acc2b, row_max2, row_sum2, scores2, va, vb, factor, False, VB
        )

    out_row = (b64 * H + head64) * T + t64  # [ROWS]
    map1, map2 = (acc1a, acc1b, row_max1, row_sum1), (acc2a, acc2b, row_max2, row_sum2)
    if SINGLE_SPLIT:
        lam_at += b64 * lam_strides[0] + head64 * lam_strides[1] + t64 * lam_strides[2]
        lam = tl.load(lam_at)[:, None]  # [ROWS, 1]
        weight = tl.full([ROWS, 1], 1.0, tl.float32)
        if WEIGHTED:
            first_at += b64 * first_strides[0] + head64 * first_strides[1] + t64 * first_strides[2]
            weight = tl.load(first_at)[:, None]  # [ROWS, 1]
        write_output(out, out_row, row_exists, lam, weight, map1, map2, VA, VB, DV)
    else:
        write_partial(partial, out_row, all_rows, row_exists, map1, map2, VA, VB, DV)


@triton.jit
def combine_splits(outputs, state, splits, all_rows, row, dv, inside, DV: tl.constexpr, SPLITS_PAD: tl.constexpr):
    """Columns dv of softmax v of one map in one row, combined from its splits; fp32."""
    i = tl.arange(0, SPLITS_PAD).to(tl.int64)
    exists = i < splits
    row_max = tl.load(state + i * 4 * all_rows + row, mask=exists, other=MINUS_INFINITY)  # [splits]
    row_sum = tl.load(state + i * 4 * all_rows + all_rows + row, mask=exists, other=0.0)  # [splits]
    highest = tl.max(row_max, 0)
    rescale = tl.exp2(row_max - tl.where(highest == MINUS_INFINITY, 0.0, highest))
    written = (row_max > MINUS_INFINITY)[:, None] & inside[None, :]  # splits without visible keys have no output
    pointers = outputs + (i[:, None] * 2 * all_rows + row) * DV + dv[None, :]
    parts = tl.load(pointers, mask=written, other=0.0)  # [splits, columns]
    return quotient(tl.sum(parts * rescale[:, None], 0), tl.sum(row_sum * rescale, 0))


@triton.jit(do_not_specialize=["splits", "all_rows"])
def decode_combine_kernel(
    partial, lam_at, first_at, out, splits, all_rows, H, T, lam_strides, first_strides,
    DV: tl.constexpr, COLUMNS: tl.constexpr, SPLITS_PAD: tl.constexpr, WEIGHTED: tl.constexpr,
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
    lam_b, lam_h, lam_t = lam_strides
    lam = tl.load(lam_at + (head // H) * lam_b + (head % H) * lam_h + (row % T) * lam_t)  # scalar
    if WEIGHTED:
        first_b, first_h, first_t = first_strides
        first *= tl.load(first_at + (head // H) * first_b + (head % H) * first_h + (row % T) * first_t)
    tl.store(out + row * DV + dv, (first - lam * second).to(out.dtype.element_ty), mask=inside)
