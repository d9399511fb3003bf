"""The forward kernel: both maps in one launch, subtracted in fp32.

The fused form (FUSED) keeps an accumulator for each map and reads every tile of V, and of keys that both maps share,
once. Its registers suffice in half precision up to width 64. The sequential form goes through
keys and values twice, even if k2 is k1, with one accumulator of twice the rows. It computes the noise map first, writes
O2 to memory, which the backward needs anyway, and loads it again for the subtraction. The backward reads O1 and O2, not
the output, so that callers may change the output in place.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.triton.launching import SECTION, Launch, inputs_of, kernel_mask, like_queries, strides
from diff_transformer.ops.triton.tile_sizes import Table, chunks, tile_size, value_chunks
from diff_transformer.ops.triton.tiles import (
    LOG2_E,
    MINUS_INFINITY,
    NO_MASK,
    ONE_ROW,
    accumulate,
    load_chunk,
    load_tile,
    mask_scores,
    place,
    product,
    store_chunk,
    store_tile,
    zeros,
)


@triton.jit
def online_softmax_step(acc_a, acc_b, row_max, row_sum, s, va, vb, factor, FOLD: tl.constexpr, VB: tl.constexpr):
    """One step of the online softmax: update accumulators, row maximum and row sum by scores s [BLOCK_M, BLOCK_N].

    FOLD: s is finite and not yet in units of log2; multiplying by ``factor`` (positive) is part of the exponential.
    Otherwise s is in units of log2, and a row may be -inf throughout.
    """
    if FOLD:
        new = tl.maximum(row_max, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - new[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(row_max - new)
    else:
        new = tl.maximum(row_max, tl.max(s, 1))
        finite = tl.where(new == MINUS_INFINITY, 0.0, new)
        p = tl.exp2(s - finite[:, None])
        rescale = tl.exp2(row_max - finite)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc_a = acc_a * rescale[:, None]
    if VB > 0:
        acc_b = acc_b * rescale[:, None]
    acc_a, acc_b = accumulate(acc_a, acc_b, p, va, vb, VB)
    return acc_a, acc_b, new, row_sum


@triton.jit
def finalize(acc_a, acc_b, row_max, row_sum, VB: tl.constexpr):
    """(both chunks of softmax v, log-sum-exp in base 2); 0 and +inf for a fully masked row."""
    fully_masked = row_sum == 0.0
    inverse = tl.where(fully_masked, 0.0, 1.0 / row_sum)
    lse = tl.where(fully_masked, float("inf"), row_max + tl.log2(row_sum))
    acc_a = acc_a * inverse[:, None]
    if VB > 0:
        acc_b = acc_b * inverse[:, None]
    return acc_a, acc_b, lse


@triton.jit
def range_of_loop(CHECKED: tl.constexpr, ranges):
    """(begin, end, gap) of the loop over the inner range, or (CHECKED) over the ranges before and after it.

    The second kind of loop adds ``gap`` to its position from inner_low on.
    """
    low, inner_low, inner_high, high = ranges
    if CHECKED:
        return low, high - (inner_high - inner_low), inner_high - inner_low
    else:
        return inner_low, inner_high, inner_low * 0


@triton.jit
def one_map(
    q, k, v, steps, first, lengths, ranges, mask, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, MASK_ROWS: tl.constexpr,
    POSITIVE: tl.constexpr,
):  # fmt: skip
    """(both chunks of softmax(q k^T scale) v, log-sum-exp in base 2) of BLOCK_M queries; ``steps``: strides of rows.

    The loop without checks covers keys that all queries see; the other one masks its scores.
    """
    T, S, _ = lengths
    q_t, k_t, v_t = steps
    rows = tl.arange(0, BLOCK_M)
    offset = tl.arange(0, BLOCK_N)
    query = (first + rows)[:, None]
    qa, qb = load_tile(q, rows, q_t, T - first, DA, DB, D, True)  # [BLOCK_M, DA], [BLOCK_M, DB]
    acc_a, acc_b = zeros(BLOCK_M, VA, VB)  # [BLOCK_M, VA], [BLOCK_M, VB]
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for CHECKED in tl.static_range(2):
        if CHECKED or MASK_KIND == NO_MASK:
            begin, end, gap = range_of_loop(CHECKED, ranges)
            for step in tl.range(begin, end, BLOCK_N):
                n = step
                if CHECKED:
                    n += tl.where(step >= ranges[1], gap, 0)
                start = tl.cast(n, tl.int64)
                ka, kb = load_tile(k + start * k_t, offset, k_t, S - n, DA, DB, D, CHECKED)  # [BLOCK_N, DA or DB]
                s = product(qa, qb, ka, kb, DB)  # [BLOCK_M, BLOCK_N]
                if CHECKED:
                    s = s * factor
                    key = n + offset[None, :]
                    s = mask_scores(s, query, key, lengths, mask, CAUSAL, WINDOW, MASK_KIND, MASK_ROWS)
                elif not POSITIVE:
                    s = s * factor
                va, vb = load_tile(v + start * v_t, offset, v_t, S - n, VA, VB, DV, CHECKED)  # [BLOCK_N, VA or VB]
                acc_a, acc_b, row_max, row_sum = online_softmax_step(
                    acc_a, acc_b, row_max, row_sum, s, va, vb, factor, POSITIVE and not CHECKED, VB
                )
    return finalize(acc_a, acc_b, row_max, row_sum, VB)


@triton.jit
def both_maps(
    q1, q2, k1, k2, v, steps, first, lengths, ranges, mask, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, MASK_ROWS: tl.constexpr,
    POSITIVE: tl.constexpr, SHARED_KEYS: tl.constexpr,
):  # fmt: skip
    """The results of ``one_map`` for both maps; reads V once, and keys that both maps share once."""
    T, S, _ = lengths
    q1_t, q2_t, k1_t, k2_t, v_t = steps
    rows = tl.arange(0, BLOCK_M)
    offset = tl.arange(0, BLOCK_N)
    query = (first + rows)[:, None]
    q1a, q1b = load_tile(q1, rows, q1_t, T - first, DA, DB, D, True)  # [BLOCK_M, DA], [BLOCK_M, DB]
    q2a, q2b = load_tile(q2, rows, q2_t, T - first, DA, DB, D, True)  # [BLOCK_M, DA], [BLOCK_M, DB]
    acc1_a, acc1_b = zeros(BLOCK_M, VA, VB)  # [BLOCK_M, VA], [BLOCK_M, VB]
    acc2_a, acc2_b = zeros(BLOCK_M, VA, VB)
    row_max1 = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum1 = tl.zeros([BLOCK_M], tl.float32)
    row_max2, row_sum2 = row_max1, row_sum1
    for CHECKED in tl.static_range(2):
        if CHECKED or MASK_KIND == NO_MASK:
            begin, end, gap = range_of_loop(CHECKED, ranges)
            for step in tl.range(begin, end, BLOCK_N):
                n = step
                if CHECKED:
                    n += tl.where(step >= ranges[1], gap, 0)
                start = tl.cast(n, tl.int64)
                ka, kb = load_tile(k1 + start * k1_t, offset, k1_t, S - n, DA, DB, D, CHECKED)  # [BLOCK_N, DA or DB]
                s1 = product(q1a, q1b, ka, kb, DB)  # [BLOCK_M, BLOCK_N]
                if not SHARED_KEYS:
                    # [BLOCK_N, DA], [BLOCK_N, DB]
                    ka, kb = load_tile(k2 + start * k2_t, offset, k2_t, S - n, DA, DB, D, CHECKED)
                s2 = product(q2a, q2b, ka, kb, DB)  # [BLOCK_M, BLOCK_N]
                if CHECKED:
                    key = n + offset[None, :]
                    s1 = mask_scores(s1 * factor, query, key, lengths, mask, CAUSAL, WINDOW, MASK_KIND, MASK_ROWS)
                    s2 = mask_scores(s2 * factor, query, key, lengths, mask, CAUSAL, WINDOW, MASK_KIND, MASK_ROWS)
                elif not POSITIVE:
                    s1 = s1 * factor
                    s2 = s2 * factor
                va, vb = load_tile(v + start * v_t, offset, v_t, S - n, VA, VB, DV, CHECKED)  # [BLOCK_N, VA or VB]
                acc1_a, acc1_b, row_max1, row_sum1 = online_softmax_step(
                    acc1_a, acc1_b, row_max1, row_sum1, s1, va, vb, factor, POSITIVE and not CHECKED, VB
                )
                acc2_a, acc2_b, row_max2, row_sum2 = online_softmax_step(
                    acc2_a, acc2_b, row_max2, row_sum2, s2, va, vb, factor, POSITIVE and not CHECKED, VB
                )
    o1a, o1b, lse1 = finalize(acc1_a, acc1_b, row_max1, row_sum1, VB)
    o2a, o2b, lse2 = finalize(acc2_a, acc2_b, row_max2, row_sum2, VB)
    return o1a, o1b, lse1, o2a, o2b, lse2


@triton.jit
def key_ranges(
    first, lengths, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    ALL_CHECKED: tl.constexpr,
):  # fmt: skip
    """low <= inner_low <= inner_high <= high: the keys that some of the queries from ``first`` see; the inner ones all
    see.

    All but high are multiples of BLOCK_N. Keys of the inner range need no mask.
    """
    T, S, window = lengths
    low = first * 0
    high = S
    inner_low = first * 0
    inner_high = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        own = first + (S - T)
        high = tl.minimum(S, tl.maximum(own + BLOCK_M, 0))
        inner_high = tl.minimum(inner_high, tl.maximum(own + 1, 0) // BLOCK_N * BLOCK_N)
        if WINDOW:
            low = tl.maximum(own - window + 1, 0) // BLOCK_N * BLOCK_N
            inner_low = (tl.maximum(own + BLOCK_M - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if ALL_CHECKED:
        inner_high = first * 0
    inner_low = tl.maximum(low, tl.minimum(inner_low, inner_high))
    inner_high = tl.maximum(inner_low, inner_high)
    return low, inner_low, inner_high, high


# T, S and the window only bound loops, so kernels are not specialised for values that 16 divides.
@triton.jit(do_not_specialize=["lengths", "tiles"])
def forward_kernel(
    inputs, mask, results, documents, input_strides, mask_strides, result_strides, lengths, factor, tiles,
    recompute_here,
    H: tl.constexpr, HN: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr,
    DB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FUSED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr,
    MASK_ROWS: tl.constexpr, POSITIVE: tl.constexpr, SHARED_KEYS: tl.constexpr, SAVE: tl.constexpr,
    VARLEN: tl.constexpr, SECTION: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one signal head. Tuples, and ``recompute_here``: tiles.py."""
    q1, q2, k1, k2, v, lam_at, first_at = inputs
    out, out1, out2, lse1, lse2 = results
    q1_strides, q2_strides, k1_strides, k2_strides, v_strides, lam_strides, first_strides = input_strides
    out_b, out_h, out_t = result_strides
    T, S, window = lengths
    rows_in_all = T
    first, head, batch, q_start, T, k_start, S = place(tiles, documents, T, S, H, BLOCK_M, False, VARLEN, SECTION)
    if first >= T:
        return

    noise_head = (head // (H // HN)).to(tl.int64)
    kv_head = (head // (H // G)).to(tl.int64)
    head = head.to(tl.int64)
    lse_row = (batch * H + head) * rows_in_all
    row = q_start + first
    q1 += batch * q1_strides[0] + head * q1_strides[1] + row * q1_strides[2]
    q2 += batch * q2_strides[0] + noise_head * q2_strides[1] + row * q2_strides[2]
    k1 += batch * k1_strides[0] + kv_head * k1_strides[1] + k_start * k1_strides[2]
    k2 += batch * k2_strides[0] + kv_head * k2_strides[1] + k_start * k2_strides[2]
    v += batch * v_strides[0] + kv_head * v_strides[1] + k_start * v_strides[2]
    if MASK_KIND != NO_MASK:
        mask += batch * mask_strides[0] + head * mask_strides[1]
    mask = (mask, mask_strides[2], mask_strides[3])

    rows = tl.arange(0, BLOCK_M)
    here = first + rows < T
    lengths = (T, S, window)
    ranges = key_ranges(first, lengths, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, MASK_KIND != NO_MASK)
    o2_out = out
    if SAVE:
        o2_out = out2
    o2_out += batch * out_b + head * out_h + row * out_t
    if FUSED:
        steps = (q1_strides[2], q2_strides[2], k1_strides[2], k2_strides[2], v_strides[2])
        o1a, o1b, log1, o2a, o2b, log2 = both_maps(
            q1, q2, k1, k2, v, steps, first, lengths, ranges, mask, factor, BLOCK_M, BLOCK_N, D, DV, DA, DB, VA, VB,
            CAUSAL, WINDOW, MASK_KIND, MASK_ROWS, POSITIVE, SHARED_KEYS,
        )  # fmt: skip
        if SAVE:
            store_tile(o2_out, rows, out_t, T - first, o2a, o2b, VA, VB, DV)
            tl.store(lse2 + lse_row + row + rows, log2, mask=here)
    else:
        steps = (q2_strides[2], k2_strides[2], v_strides[2])
        o2a, o2b, log2 = one_map(
            q2, k2, v, steps, first, lengths, ranges, mask, factor, BLOCK_M, BLOCK_N, D, DV, DA, DB, VA, VB,
            CAUSAL, WINDOW, MASK_KIND, MASK_ROWS, POSITIVE,
        )  # fmt: skip
        store_tile(o2_out, rows, out_t, T - first, o2a, o2b, VA, VB, DV)
        if SAVE:
            tl.store(lse2 + lse_row + row + rows, log2, mask=here)
        rows += recompute_here
        out_t += recompute_here
        out_h += recompute_here
        first, again, batch, q_start, T, k_start, S = place(
            (tiles[0] + recompute_here, tiles[1]), documents, T, S, H, BLOCK_M, False, VARLEN, SECTION
        )
        head = again.to(tl.int64)
        row = q_start + first
        steps = (q1_strides[2], k1_strides[2], v_strides[2])
        o1a, o1b, log1 = one_map(
            q1, k1, v, steps, first, (T, S, window), ranges, mask, factor, BLOCK_M, BLOCK_N, D, DV, DA, DB, VA, VB,
            CAUSAL, WINDOW, MASK_KIND, MASK_ROWS, POSITIVE,
        )  # fmt: skip
        o2_out = out
        if SAVE:
            o2_out = out2
        o2_out += batch * out_b + head * out_h + row * out_t

    here = first + rows < T
    place_out = batch * out_b + head * out_h + row * out_t
    if SAVE:
        tl.store(lse1 + lse_row + row + rows, log1, mask=here)
        store_tile(out1 + place_out, rows, out_t, T - first, o1a, o1b, VA, VB, DV)
    out += place_out
    lam_at += batch * lam_strides[0] + head * lam_strides[1] + row * lam_strides[2]
    lam = tl.load(lam_at + rows.to(tl.int64) * lam_strides[2], mask=here, other=0.0)[:, None]  # [BLOCK_M, 1]
    if WEIGHTED:
        first_at += batch * first_strides[0] + head * first_strides[1] + row * first_strides[2]
        weight = tl.load(first_at + rows.to(tl.int64) * first_strides[2], mask=here, other=0.0)[:, None]
        o1a *= weight
        if VB > 0:
            o1b *= weight
    # Chunk by chunk, which takes fewer registers. The barriers make the O2 that other threads stored visible.
    if not FUSED:
        tl.debug_barrier()
        o2a = load_chunk(o2_out, rows, out_t, T - first, 0, VA, DV, True).to(tl.float32)  # [BLOCK_M, VA]
    store_chunk(out, rows, out_t, T - first, o1a - lam * o2a, 0, VA, DV)
    if VB > 0:
        if not FUSED:
            tl.debug_barrier()
            o2b = load_chunk(o2_out, rows, out_t, T - first, VA, VB, DV, True).to(tl.float32)  # [BLOCK_M, VB]
        store_chunk(out, rows, out_t, T - first, o1b - lam * o2b, VA, VB, DV)


def plan_forward(
    call: Call, need_gradient: bool, table: Table
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], list[Launch]]:
    """(out, softmax(q1 k1^T scale) v, softmax(q2 k2^T scale) v, both log-sum-exps in base 2), not yet computed, and
    what computes them.

    All but ``out`` are empty unless need_gradient. q1, q2, k1, k2 and v have last strides of 1. ``out`` is [B, T, H,
    Dv], contiguous, in the dtype of v. Outputs of the maps are [B, H, T, Dv] in the same memory layout. Log-sum-exps
    are [B, H, T], fp32, +inf for a fully masked row.
    """
    q1, v, inputs = call.q1, call.v, inputs_of(call)
    (B, H, T, D), (G, S, Dv) = q1.shape, v.shape[1:]
    out = v.new_empty(B, T, H, Dv)
    out1, out2 = (like_queries(v, B, H, T) if need_gradient else v.new_empty(0) for _ in range(2))
    lse1, lse2 = (q1.new_empty((B, H, T) if need_gradient else 0, dtype=torch.float32) for _ in range(2))
    mask, mask_strides, mask_kind, mask_rows = kernel_mask(call.attn_mask, v)
    size = tile_size("forward", call, mask_rows != ONE_ROW.value, table)
    tiles, sequences, documents = call.grid("queries", size.BLOCK_M, lse1)
    DA, DB = chunks(D)
    VA, VB = value_chunks(Dv)
    arguments = {
        "inputs": inputs, "mask": mask, "results": (out, out1, out2, lse1, lse2), "documents": documents,
        "input_strides": strides(*inputs), "mask_strides": mask_strides,
        "result_strides": strides(out.transpose(1, 2))[0],
        "lengths": (T, S, call.window or 0), "factor": call.scale * LOG2_E.value, "tiles": (tiles, sequences * H),
        "recompute_here": 0,
        "H": H, "HN": call.q2.shape[1], "G": G, "D": D, "DV": Dv, "DA": DA, "DB": DB, "VA": VA, "VB": VB,
        "FUSED": size.fused, "CAUSAL": call.is_causal, "WINDOW": call.window is not None,
        "MASK_KIND": mask_kind, "MASK_ROWS": mask_rows, "POSITIVE": call.scale > 0, "SHARED_KEYS": call.k2 is None,
        "SAVE": need_gradient, "VARLEN": call.documents is not None, "SECTION": SECTION,
        "WEIGHTED": call.first is not None,
    }  # fmt: skip
    launch = Launch(forward_kernel, (tiles * sequences * H,), arguments | size.options())
    return (out, out1, out2, lse1, lse2), [launch]
