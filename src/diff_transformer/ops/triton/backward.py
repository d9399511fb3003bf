"""The backward kernels: one product dP = dO V^T and one product for dV serve both maps.

With P = f P1 - lam P2, delta_i = rowsum(dO * O_i) and O = f O1 - lam O2, where f is ``first`` or 1 (all row by row):
    dV = P^T dO                       df = delta1                      dlam = -delta2
    dS1 = P1 f (dP - delta1)          dS2 = P2 lam (delta2 - dP)
    dQ_i = scale dS_i K_i             dK_i = scale dS_i^T Q_i
The maps are recomputed from the saved log-sum-exps.

There are two passes: bwd_dkdv_kernel, whose programs own keys, then bwd_dq_kernel, whose programs own queries. The
first writes dK1, dK2 and dV, the second dQ1 and dQ2; deltas.py has dlam and df. Every sum has a fixed order, so results
repeat bit for bit.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.triton.deltas import plan_statistics
from diff_transformer.ops.triton.forward import key_ranges, range_of_loop
from diff_transformer.ops.triton.launching import (
    SECTION,
    Launch,
    inputs_of,
    kernel_mask,
    rows_contiguous,
    strides,
    transposed_like,
)
from diff_transformer.ops.triton.tile_sizes import Table, chunks, split, tile_size
from diff_transformer.ops.triton.tiles import (
    LOG2_E,
    NO_MASK,
    ONE_ROW,
    accumulate,
    load_tile,
    mask_scores,
    place,
    product,
    store_tile,
    zeros,
)


@triton.jit
def query_ranges(
    first, lengths, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    ALL_CHECKED: tl.constexpr,
):  # fmt: skip
    """low <= inner_low <= inner_high <= high: the queries that see some of the keys from ``first``; the inner ones see
    all.

    All but high are multiples of BLOCK_M. Queries of the inner range need no mask.
    """
    T, S, window = lengths
    low = first * 0
    high = T
    inner_low = first * 0
    inner_high = T // BLOCK_M * BLOCK_M
    if CAUSAL:
        own = first - (S - T)  # the query that stands at the first key
        low = tl.maximum(own, 0) // BLOCK_M * BLOCK_M
        inner_low = (tl.maximum(own + BLOCK_N - 1, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        if WINDOW:
            high = tl.minimum(T, tl.maximum(own + BLOCK_N - 1 + window, 0))
            inner_high = tl.minimum(inner_high, tl.maximum(own + window, 0) // BLOCK_M * BLOCK_M)
    if ALL_CHECKED:
        inner_high = first * 0
    inner_high = tl.where(first + BLOCK_N > S, 0, inner_high)  # some of these keys do not exist
    inner_low = tl.maximum(low, tl.minimum(inner_low, inner_high))
    inner_high = tl.maximum(inner_low, inner_high)
    return low, inner_low, inner_high, high


@triton.jit
def attention_map(
    s, query, key, lengths, mask, factor, log, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr,
    MASK_ROWS: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """A tile of a map, from its scores s and the log-sum-exps of its queries (``log``)."""
    s = s * factor
    if CHECKED:
        s = mask_scores(s, query, key, lengths, mask, CAUSAL, WINDOW, MASK_KIND, MASK_ROWS)
    return tl.exp2(s - log)


@triton.jit(do_not_specialize=["lengths", "tiles"])
def bwd_dkdv_kernel(
    inputs, mask, statistics, results, documents, input_strides, dout_strides, dk_strides, dv_strides, mask_strides,
    lengths, scale, factor, tiles, recompute_here,
    H: tl.constexpr, HN: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr,
    DB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, MASK_ROWS: tl.constexpr,
    SHARED_KEYS: tl.constexpr, COMPUTE_DK: tl.constexpr, COMPUTE_DV: tl.constexpr, VARLEN: tl.constexpr,
    SECTION: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """dK1, dK2 and dV of BLOCK_N keys of one key/value head, over all signal heads that use it.

    Tiles of scores are [BLOCK_N, BLOCK_M] (keys, queries). COMPUTE_DK and COMPUTE_DV select the gradients of this
    launch: if the accumulators of all do not fit the registers, there are two launches. SHARED_KEYS: dK1 is the sum
    over both maps. Tuples, and ``recompute_here``: tiles.py.
    """
    q1, q2, k1, k2, v, lam_at, first_at = inputs
    dout, lse1, lse2, delta1, lam_delta2 = statistics
    dk1, dk2, dv = results
    q1_strides, q2_strides, k1_strides, k2_strides, v_strides, lam_strides, first_strides = input_strides
    q1_t, q2_t, dout_t, lam_t = q1_strides[2], q2_strides[2], dout_strides[2], lam_strides[2]
    T, S, window = lengths
    rows_in_all = T
    first, kv_head, batch, q_start, T, k_start, S = place(tiles, documents, T, S, G, BLOCK_N, True, VARLEN, SECTION)
    if first >= S:
        return

    keys = tl.arange(0, BLOCK_N)
    queries = tl.arange(0, BLOCK_M)
    wide_head = kv_head.to(tl.int64)
    row = k_start + first
    k1 += batch * k1_strides[0] + wide_head * k1_strides[1] + row * k1_strides[2]
    k2 += batch * k2_strides[0] + wide_head * k2_strides[1] + row * k2_strides[2]
    v += batch * v_strides[0] + wide_head * v_strides[1] + row * v_strides[2]
    k1a, k1b = load_tile(k1, keys, k1_strides[2], S - first, DA, DB, D, True)  # [BLOCK_N, DA], [BLOCK_N, DB]
    k2a, k2b = k1a, k1b
    if not SHARED_KEYS:
        k2a, k2b = load_tile(k2, keys, k2_strides[2], S - first, DA, DB, D, True)  # [BLOCK_N, DA or DB]
    if COMPUTE_DK:
        va, vb = load_tile(v, keys, v_strides[2], S - first, VA, VB, DV, True)  # [BLOCK_N, VA], [BLOCK_N, VB]
    dk1a, dk1b = zeros(BLOCK_N, DA, DB)  # [BLOCK_N, DA], [BLOCK_N, DB]
    dk2a, dk2b = zeros(BLOCK_N, DA, DB)
    dva, dvb = zeros(BLOCK_N, VA, VB)  # [BLOCK_N, VA], [BLOCK_N, VB]
    key = (first + keys)[:, None]
    for member in tl.range(0, H // G):
        first, kv_head, batch, q_start, T, k_start, S = place(
            (tiles[0] + member * recompute_here, tiles[1]), documents, T, S, G, BLOCK_N, True, VARLEN, SECTION
        )
        here_lengths = (T, S, window)
        ranges = query_ranges(first, here_lengths, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, MASK_KIND != NO_MASK)
        head = (kv_head * (H // G) + member).to(tl.int64)
        noise_head = (kv_head * (H // G) + member) // (H // HN)
        noise_head = noise_head.to(tl.int64)
        q1_here = q1 + (batch * q1_strides[0] + head * q1_strides[1] + q_start * q1_strides[2])
        q2_here = q2 + (batch * q2_strides[0] + noise_head * q2_strides[1] + q_start * q2_strides[2])
        dout_here = dout + (batch * dout_strides[0] + head * dout_strides[1] + q_start * dout_strides[2])
        lam_here = lam_at + (batch * lam_strides[0] + head * lam_strides[1] + q_start * lam_strides[2])
        first_here = first_at
        if WEIGHTED:
            first_here += batch * first_strides[0] + head * first_strides[1] + q_start * first_strides[2]
        row_here = (batch * H + head) * rows_in_all + q_start
        mask_here = mask
        if MASK_KIND != NO_MASK:
            mask_here = mask + (batch * mask_strides[0] + head * mask_strides[1])
        mask_here = (mask_here, mask_strides[2], mask_strides[3])
        for CHECKED in tl.static_range(2):
            if CHECKED or MASK_KIND == NO_MASK:
                begin, end, gap = range_of_loop(CHECKED, ranges)
                for step in tl.range(begin, end, BLOCK_M):
                    m = step
                    if CHECKED:
                        m += tl.where(step >= ranges[1], gap, 0)
                    start = tl.cast(m, tl.int64)
                    query = (m + queries)[None, :]
                    here = m + queries < T
                    row_m = row_here + start
                    # [BLOCK_M, VA], [BLOCK_M, VB]
                    da, db = load_tile(dout_here + start * dout_t, queries, dout_t, T - m, VA, VB, DV, CHECKED)
                    if COMPUTE_DK:
                        dp = product(va, vb, da, db, VB)  # [BLOCK_N, BLOCK_M]
                    # [BLOCK_M, DA], [BLOCK_M, DB]
                    qa, qb = load_tile(q1_here + start * q1_t, queries, q1_t, T - m, DA, DB, D, CHECKED)
                    log = tl.load(lse1 + row_m + queries, mask=here, other=float("inf"))[None, :]  # [1, BLOCK_M]
                    p1 = attention_map(
                        product(k1a, k1b, qa, qb, DB), query, key, here_lengths, mask_here, factor, log,
                        CAUSAL, WINDOW, MASK_KIND, MASK_ROWS, CHECKED,
                    )  # fmt: skip
                    if WEIGHTED:
                        weight_at = first_here + start * first_strides[2] + queries * first_strides[2]
                        p1 *= tl.load(weight_at, mask=here, other=0.0)[None, :]  # [1, BLOCK_M]
                    if COMPUTE_DK:
                        delta = tl.load(delta1 + row_m + queries, mask=here, other=0.0)[None, :]  # [1, BLOCK_M]
                        ds = (p1 * (dp - delta)).to(k1a.dtype)  # [BLOCK_N, BLOCK_M]
                        dk1a, dk1b = accumulate(dk1a, dk1b, ds, qa, qb, DB)
                    # [BLOCK_M, DA], [BLOCK_M, DB]
                    qa, qb = load_tile(q2_here + start * q2_t, queries, q2_t, T - m, DA, DB, D, CHECKED)
                    log = tl.load(lse2 + row_m + queries, mask=here, other=float("inf"))[None, :]  # [1, BLOCK_M]
                    p2 = attention_map(
                        product(k2a, k2b, qa, qb, DB), query, key, here_lengths, mask_here, factor, log,
                        CAUSAL, WINDOW, MASK_KIND, MASK_ROWS, CHECKED,
                    )  # fmt: skip
                    # [1, BLOCK_M]
                    lam = tl.load(lam_here + start * lam_t + queries * lam_t, mask=here, other=0.0)[None, :]
                    if COMPUTE_DV:
                        dva, dvb = accumulate(dva, dvb, p1 - lam * p2, da, db, VB)
                    if COMPUTE_DK:
                        delta = tl.load(lam_delta2 + row_m + queries, mask=here, other=0.0)[None, :]  # [1, BLOCK_M]
                        ds = (p2 * (delta - lam * dp)).to(k1a.dtype)  # [BLOCK_N, BLOCK_M]
                        # The last product of the loop; see ``accumulate``.
                        if SHARED_KEYS:
                            dk1a, dk1b = accumulate(dk1a, dk1b, ds, qa, qb, DB)
                        else:
                            dk2a, dk2b = accumulate(dk2a, dk2b, ds, qa, qb, DB)
    first, kv_head, batch, q_start, T, k_start, S = place(
        (tiles[0] + recompute_here, tiles[1]), documents, T, S, G, BLOCK_N, True, VARLEN, SECTION
    )
    wide_head = kv_head.to(tl.int64)
    row = k_start + first
    keys += recompute_here
    if COMPUTE_DK:
        to = batch * dk_strides[0] + wide_head * dk_strides[1] + row * dk_strides[2]
        store_tile(dk1 + to, keys, dk_strides[2], S - first, dk1a * scale, dk1b * scale, DA, DB, D)
        if not SHARED_KEYS:
            store_tile(dk2 + to, keys, dk_strides[2], S - first, dk2a * scale, dk2b * scale, DA, DB, D)
    if COMPUTE_DV:
        to = dv + (batch * dv_strides[0] + wide_head * dv_strides[1] + row * dv_strides[2])
        store_tile(to, keys, dv_strides[2], S - first, dva, dvb, VA, VB, DV)


@triton.jit(do_not_specialize=["lengths", "tiles"])
def bwd_dq_kernel(
    inputs, mask, statistics, results, documents, input_strides, dout_strides, dq1_strides, dq2_strides, mask_strides,
    lengths, scale, factor, tiles, recompute_here,
    H: tl.constexpr, HN: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DA: tl.constexpr,
    DB: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, MASK_ROWS: tl.constexpr,
    SHARED_KEYS: tl.constexpr, COMPUTE_DQ1: tl.constexpr, COMPUTE_DQ2: tl.constexpr, VARLEN: tl.constexpr,
    SECTION: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """dQ2 of BLOCK_M queries of one noise head, and dQ1 of every signal head that shares it.

    COMPUTE_DQ1 and COMPUTE_DQ2 select the gradients of this launch: if both do not fit the registers, there are two
    launches. Tuples, and ``recompute_here``: tiles.py.
    """
    q1, q2, k1, k2, v, lam_at, first_at = inputs
    dout, lse1, lse2, delta1, lam_delta2 = statistics
    dq1, dq2 = results
    q1_strides, q2_strides, k1_strides, k2_strides, v_strides, lam_strides, first_strides = input_strides
    k1_t, k2_t, v_t = k1_strides[2], k2_strides[2], v_strides[2]
    T, S, window = lengths
    rows_in_all = T
    first, noise_head, batch, q_start, T, k_start, S = place(
        tiles, documents, T, S, HN, BLOCK_M, False, VARLEN, SECTION
    )
    if first >= T:
        return

    keys = tl.arange(0, BLOCK_N)
    queries = tl.arange(0, BLOCK_M)
    wide_head = noise_head.to(tl.int64)
    kv_head = (noise_head // (HN // G)).to(tl.int64)
    row = q_start + first
    k1 += batch * k1_strides[0] + kv_head * k1_strides[1] + k_start * k1_strides[2]
    k2 += batch * k2_strides[0] + kv_head * k2_strides[1] + k_start * k2_strides[2]
    v += batch * v_strides[0] + kv_head * v_strides[1] + k_start * v_strides[2]
    q2_here = q2 + (batch * q2_strides[0] + wide_head * q2_strides[1] + row * q2_strides[2])
    q2a, q2b = load_tile(q2_here, queries, q2_strides[2], T - first, DA, DB, D, True)  # [BLOCK_M, DA], [BLOCK_M, DB]
    dq2a, dq2b = zeros(BLOCK_M, DA, DB)  # [BLOCK_M, DA], [BLOCK_M, DB]
    for member in tl.range(0, H // HN):
        first, noise_head, batch, q_start, T, k_start, S = place(
            (tiles[0] + member * recompute_here, tiles[1]), documents, T, S, HN, BLOCK_M, False, VARLEN, SECTION
        )
        row = q_start + first
        rows = queries + member * recompute_here
        here = first + rows < T
        query = (first + rows)[:, None]
        here_lengths = (T, S, window)
        ranges = key_ranges(first, here_lengths, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, MASK_KIND != NO_MASK)
        head = (noise_head * (H // HN) + member).to(tl.int64)
        q1_here = q1 + (batch * q1_strides[0] + head * q1_strides[1] + row * q1_strides[2])
        q1a, q1b = load_tile(q1_here, rows, q1_strides[2], T - first, DA, DB, D, True)  # [BLOCK_M, DA or DB]
        dout_here = dout + (batch * dout_strides[0] + head * dout_strides[1] + row * dout_strides[2])
        da, db = load_tile(dout_here, rows, dout_strides[2], T - first, VA, VB, DV, True)  # [BLOCK_M, VA or VB]
        row_here = (batch * H + head) * rows_in_all + row + rows
        log1 = tl.load(lse1 + row_here, mask=here, other=float("inf"))[:, None]  # [BLOCK_M, 1]
        log2 = tl.load(lse2 + row_here, mask=here, other=float("inf"))[:, None]  # [BLOCK_M, 1]
        first_delta = tl.load(delta1 + row_here, mask=here, other=0.0)[:, None]  # [BLOCK_M, 1]
        second_delta = tl.load(lam_delta2 + row_here, mask=here, other=0.0)[:, None]  # [BLOCK_M, 1]
        lam_here = lam_at + (batch * lam_strides[0] + head * lam_strides[1] + (row + rows) * lam_strides[2])
        lam = tl.load(lam_here, mask=here, other=0.0)  # [BLOCK_M]
        weight = lam
        if WEIGHTED:
            first_here = first_at + batch * first_strides[0] + head * first_strides[1] + (row + rows) * first_strides[2]
            weight = tl.load(first_here, mask=here, other=0.0)  # [BLOCK_M]
        mask_here = mask
        if MASK_KIND != NO_MASK:
            mask_here = mask + (batch * mask_strides[0] + head * mask_strides[1])
        mask_here = (mask_here, mask_strides[2], mask_strides[3])
        dq1a, dq1b = zeros(BLOCK_M, DA, DB)  # [BLOCK_M, DA], [BLOCK_M, DB]
        for CHECKED in tl.static_range(2):
            if CHECKED or MASK_KIND == NO_MASK:
                begin, end, gap = range_of_loop(CHECKED, ranges)
                for step in tl.range(begin, end, BLOCK_N):
                    n = step
                    if CHECKED:
                        n += tl.where(step >= ranges[1], gap, 0)
                    start = tl.cast(n, tl.int64)
                    va, vb = load_tile(v + start * v_t, keys, v_t, S - n, VA, VB, DV, CHECKED)  # [BLOCK_N, VA or VB]
                    dp = product(da, db, va, vb, VB)  # [BLOCK_M, BLOCK_N]
                    key = (n + keys)[None, :]
                    ka, kb = load_tile(k1 + start * k1_t, keys, k1_t, S - n, DA, DB, D, CHECKED)  # [BLOCK_N, DA or DB]
                    if COMPUTE_DQ1:
                        p = attention_map(
                            product(q1a, q1b, ka, kb, DB), query, key, here_lengths, mask_here, factor, log1,
                            CAUSAL, WINDOW, MASK_KIND, MASK_ROWS, CHECKED,
                        )  # fmt: skip
                        if WEIGHTED:
                            p *= weight[:, None]
                        dq1a, dq1b = accumulate(dq1a, dq1b, p * (dp - first_delta), ka, kb, DB)
                    if COMPUTE_DQ2:
                        if not SHARED_KEYS:
                            # [BLOCK_N, DA], [BLOCK_N, DB]
                            ka, kb = load_tile(k2 + start * k2_t, keys, k2_t, S - n, DA, DB, D, CHECKED)
                        p = attention_map(
                            product(q2a, q2b, ka, kb, DB), query, key, here_lengths, mask_here, factor, log2,
                            CAUSAL, WINDOW, MASK_KIND, MASK_ROWS, CHECKED,
                        )  # fmt: skip
                        dq2a, dq2b = accumulate(dq2a, dq2b, p * (second_delta - lam[:, None] * dp), ka, kb, DB)
        first, noise_head, batch, q_start, T, k_start, S = place(
            (tiles[0] + (member + 1) * recompute_here, tiles[1]), documents, T, S, HN, BLOCK_M, False, VARLEN, SECTION
        )
        row = q_start + first
        head = (noise_head * (H // HN) + member).to(tl.int64)
        rows += recompute_here
        if COMPUTE_DQ1:
            to = dq1 + (batch * dq1_strides[0] + head * dq1_strides[1] + row * dq1_strides[2])
            store_tile(to, rows, dq1_strides[2], T - first, dq1a * scale, dq1b * scale, DA, DB, D)
    first, noise_head, batch, q_start, T, k_start, S = place(
        (tiles[0] + recompute_here, tiles[1]), documents, T, S, HN, BLOCK_M, False, VARLEN, SECTION
    )
    wide_head = noise_head.to(tl.int64)
    row = q_start + first
    queries += recompute_here
    if COMPUTE_DQ2:
        to = dq2 + (batch * dq2_strides[0] + wide_head * dq2_strides[1] + row * dq2_strides[2])
        store_tile(to, queries, dq2_strides[2], T - first, dq2a * scale, dq2b * scale, DA, DB, D)


def plan_backward(
    call: Call, dout: Tensor, saved: Sequence[Tensor], table: Table
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], list[Launch]]:
    """Gradients of q1, q2, k1, k2, v (in their dtypes), lam and first ([B, H, T, 1], fp32), not yet computed, and what
    computes them, for dout [B, H, T, Dv].

    ``saved`` has the results of ``plan_forward`` after the first. Without k2, the gradient of k1 is the sum over both
    maps and that of k2 is empty; without ``first`` that gradient is empty.
    """
    q1, q2, k1, k2, v, scale = call.q1, call.q2, call.k1, call.k2, call.v, call.scale
    out1, out2, lse1, lse2 = saved
    inputs = inputs_of(call)
    (T, D), H, HN, (G, S, Dv) = q1.shape[2:], q1.shape[1], q2.shape[1], v.shape[1:]
    dout = rows_contiguous(dout)
    mask, mask_strides, mask_kind, mask_rows = kernel_mask(call.attn_mask, v)
    DA, DB = chunks(D)
    VA, VB = chunks(Dv)
    mask_by_query = mask_rows != ONE_ROW.value
    (delta1, lam_delta2, dlam), of_statistics = plan_statistics(dout, out1, out2, call.lam)
    launches = [of_statistics]
    dk1, dv = transposed_like(k1), transposed_like(v)
    dk2 = k1.new_empty(0) if k2 is None else transposed_like(k1)
    dq1, dq2 = transposed_like(q1), transposed_like(q2)
    dout_strides, dk_strides, dv_strides, dq1_strides, dq2_strides = strides(dout, dk1, dv, dq1, dq2)
    arguments = {
        "inputs": inputs, "mask": mask, "statistics": (dout, lse1, lse2, delta1, lam_delta2),
        "input_strides": strides(*inputs), "dout_strides": dout_strides, "mask_strides": mask_strides,
        "lengths": (T, S, call.window or 0), "scale": scale, "factor": scale * LOG2_E.value, "recompute_here": 0,
        "H": H, "HN": HN, "G": G, "D": D, "DV": Dv, "DA": DA, "DB": DB, "VA": VA, "VB": VB,
        "CAUSAL": call.is_causal, "WINDOW": call.window is not None, "MASK_KIND": mask_kind, "MASK_ROWS": mask_rows,
        "SHARED_KEYS": k2 is None, "VARLEN": call.documents is not None, "SECTION": SECTION,
        "WEIGHTED": call.first is not None,
    }  # fmt: skip

    size = tile_size("dkdv", call, mask_by_query, table)
    tiles, sequences, documents = call.grid("keys", size.BLOCK_N, lse1)
    given = arguments | {
        "results": (dk1, dk2, dv), "documents": documents, "dk_strides": dk_strides, "dv_strides": dv_strides,
        "tiles": (tiles, sequences * G), **size.options(),
    }  # fmt: skip
    for computed in split(size, "COMPUTE_DK", "COMPUTE_DV"):
        launches.append(Launch(bwd_dkdv_kernel, (tiles * sequences * G,), given | computed))

    size = tile_size("dq", call, mask_by_query, table)
    tiles, sequences, documents = call.grid("queries", size.BLOCK_M, lse1)
    given = arguments | {
        "results": (dq1, dq2), "documents": documents, "dq1_strides": dq1_strides, "dq2_strides": dq2_strides,
        "tiles": (tiles, sequences * HN), **size.options(),
    }  # fmt: skip
    for computed in split(size, "COMPUTE_DQ1", "COMPUTE_DQ2"):
        launches.append(Launch(bwd_dq_kernel, (tiles * sequences * HN,), given | computed))
    dfirst = delta1.new_empty(0) if call.first is None else delta1[..., None]
    return (dq1, dq2, dk1, dk2, dv, dlam[..., None], dfirst), launches
