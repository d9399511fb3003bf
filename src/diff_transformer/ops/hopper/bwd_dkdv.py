"""Gradients of the keys and values, dK1, dK2 and dV: the first of two deterministic passes.

A program owns BN = 64 keys of one key/value head. It visits all tiles of BM = 64 queries that see some of these keys,
for every signal head that uses them. Tiles of scores are [keys, queries]. Two consumer warpgroups split the work of a
tile by gradient, so that neither holds more than half of the accumulators:

* ``dk_consumer``: scores of both maps, P1 and P2, their difference W = P1 - lam P2; dK1 and dK2.
* ``dv_consumer``: dP = V dO^T, then dS1 and dS2; dV.
* ``producer``, one warp: K, V, then tiles of queries and dO by TMA, and the statistics of their rows by ordinary loads.

The formulas are those of ops/triton/backward.py. P1 and P2 are handed over in half precision and come back as dS1 and
dS2 in the same memory; W is computed from them in fp32 before. While ``dv_consumer`` computes dS of a tile,
``dk_consumer`` computes the next tile's scores. While ``dk_consumer`` computes exponentials, the products for dV and dK
run.

Rings (pipeline.py); c counts tiles over the life of the program:

* ``kv_full``: one arrival of the producer, with the bytes of K1, K2 and V. Used once.
* queries: Q1, Q2 and the statistics. Two fills a use, by TMA and by the producer's stores; both consumers read.
* gradients: dO; only ``dv_consumer`` reads.
* maps: W, P1 and P2, one slot. ``dk_consumer`` fills it after its products with dS of the previous tile completed.
  ``dv_consumer`` releases it after its products with W completed.
* ``ds_full``: dS1 and dS2 have replaced P1 and P2; one arrival of ``dv_consumer`` a tile. The two conditions of the
  maps' ring also say when this memory is free again.
"""

from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from diff_transformer.ops.hopper.pipeline import (
    LN_2,
    claim,
    gl,
    jit,
    load_lam,
    recompute_here,
    release,
    ring,
    signal_full,
    store_rows,
    tile,
    wait_empty,
    wait_full,
)

NOT_SPECIALIZED = ["stride_lam_b", "stride_lam_h", "stride_lam_t", "T", "S", "G", "members"]
# Rows of the statistics of a query tile in shared memory, [STATISTICS, BM] a slot.
LSE1: gl.constexpr = gl.constexpr(0)
LSE2: gl.constexpr = gl.constexpr(1)
LAM: gl.constexpr = gl.constexpr(2)
DELTA1: gl.constexpr = gl.constexpr(3)
LAM_DELTA2: gl.constexpr = gl.constexpr(4)
STATISTICS: gl.constexpr = gl.constexpr(8)  # the least power of two that holds them


@jit
def own_keys(sizes, recomputed, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """(batch entry, key/value head, first key, first query that sees it, number of query tiles that do, a head).

    recomputed: 0, or ``recompute_here`` after the loop.
    """
    T, S, _, _ = sizes
    first = (gl.program_id(0) + recomputed) * BN
    low = recomputed
    if CAUSAL:
        low = gl.maximum(first - (S - T), 0) // BM
    tiles = gl.maximum((T + BM - 1) // BM - low, 0)
    return gl.program_id(2) + recomputed, gl.program_id(1) + recomputed, first, low * BM, tiles


@jit
def statistic(st_s, c, row, STAGES: gl.constexpr, SL: gl.constexpr):
    """One statistic of the queries of tile c, [1, BM]."""
    x = st_s.index((c % STAGES) * STATISTICS + row).load(gl.SliceLayout(0, SL))  # [BM]
    return gl.expand_dims(x, 0)


@jit
def start_scores(q_s, k_s, c, STAGES: gl.constexpr, SL: gl.constexpr):
    """Start the scores of both maps for tile c, [BN, BM] in layout SL."""
    zeros = gl.full([k_s.shape[3], q_s.shape[3]], 0.0, gl.float32, SL)
    slot = 2 * (c % STAGES)
    k1 = tile(k_s, recompute_here(c))
    k2 = tile(k_s, 1 + recompute_here(c))
    s1 = warpgroup_mma(k1, tile(q_s, slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s2 = warpgroup_mma(k2, tile(q_s, slot + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return s1, s2


@jit
def attention_map(s, log, first_query, edge, factor, SL: gl.constexpr, CAUSAL: gl.constexpr):
    """A tile of a map, [BN, BM], from its scores and the log-sum-exps of its queries.

    edge: if CAUSAL, the query at the position of the first key (lower right alignment); this also masks keys beyond S.
    Otherwise the number of keys from the first one on.
    """
    p = gl.exp2(s * factor - log)
    if CAUSAL:
        if first_query < edge + s.shape[0]:
            queries = first_query + gl.arange(0, s.shape[1], gl.SliceLayout(0, SL))
            keys = edge + gl.arange(0, s.shape[0], gl.SliceLayout(1, SL))
            p = gl.where(gl.expand_dims(queries, 0) >= gl.expand_dims(keys, 1), p, 0.0)
    else:
        if edge < s.shape[0]:
            keys = gl.arange(0, s.shape[0], gl.SliceLayout(1, SL))
            p = gl.where(gl.expand_dims(keys < edge, 1), p, 0.0)
    return p


@jit
def maps(s1, s2, st_s, c, first_query, edge, factor, dtype: gl.constexpr,
         STAGES: gl.constexpr, SL: gl.constexpr, CAUSAL: gl.constexpr, OTHERS: gl.constexpr):  # fmt: skip
    """W, P1 and P2 of tile c, [BN, BM] in half precision; OTHERS products were started after the scores."""
    s1 = warpgroup_mma_wait(OTHERS + 1, deps=(s1,))
    p1 = attention_map(s1, statistic(st_s, c, LSE1, STAGES, SL), first_query, edge, factor, SL, CAUSAL)
    s2 = warpgroup_mma_wait(OTHERS, deps=(s2,))
    p2 = attention_map(s2, statistic(st_s, c, LSE2, STAGES, SL), first_query, edge, factor, SL, CAUSAL)
    w = p1 - statistic(st_s, c, LAM, STAGES, SL) * p2
    return w.to(dtype), p1.to(dtype), p2.to(dtype)


@jit
def hand_over(w, p1, p2, w_s, p_s, maps_full, c):
    """dk_consumer: hand W, P1 and P2 of tile c to dv_consumer."""
    w_s.store(w)
    p_s.index(0).store(p1)
    p_s.index(1).store(p2)
    fence_async_shared()
    signal_full(maps_full, c, 1)


@jit
def start_key_gradients(dk1, dk2, p_s, q_s, c, STAGES: gl.constexpr):
    """Start dK1 += dS1 Q1 and dK2 += dS2 Q2 of tile c."""
    slot = 2 * (c % STAGES)
    dk1 = warpgroup_mma(p_s.index(recompute_here(c)), tile(q_s, slot), dk1, is_async=True)
    dk2 = warpgroup_mma(p_s.index(1 + recompute_here(c)), tile(q_s, slot + 1), dk2, is_async=True)
    return dk1, dk2


@jit
def dk_consumer(q_s, st_s, k_s, w_s, p_s, bars, dk1_to, dk2_to, sizes, factor,
         STAGES: gl.constexpr, CAUSAL: gl.constexpr, ONE_KEY: gl.constexpr):  # fmt: skip
    """A consumer warpgroup: the maps, dK1 and dK2. ONE_KEY: k2 is k1, whose gradient is the sum."""
    kv_full, query_ring, _, maps_ring, ds_full = bars
    q_full, q_empty = query_ring
    maps_full, maps_empty = maps_ring
    T, S, G, _ = sizes
    BM: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    D: gl.constexpr = k_s.shape[4]
    dtype: gl.constexpr = k_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    KL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    b, g, first, low, tiles = own_keys(sizes, 0, BM, BN, CAUSAL)
    total = tiles * sizes[3]
    edge = S - first
    if CAUSAL:
        edge = T - edge
    dk1 = gl.full([BN, D], 0.0, gl.float32, KL)  # [BN, D]
    dk2 = gl.full([BN, D], 0.0, gl.float32, KL)
    mbarrier.wait(kv_full, 0)
    if total > 0:
        wait_full(q_full, 0, STAGES)
        s1, s2 = start_scores(q_s, k_s, 0, STAGES, SL)
        w, p1, p2 = maps(s1, s2, st_s, 0, low, edge, factor, dtype, STAGES, SL, CAUSAL, 0)
        hand_over(w, p1, p2, w_s, p_s, maps_full, 0)
        query = low
        for c in range(1, total):
            query = gl.where(query + BM < T, query + BM, low)
            wait_full(q_full, c, STAGES)
            s1, s2 = start_scores(q_s, k_s, c, STAGES, SL)
            wait_full(ds_full, c - 1, 1)
            dk1, dk2 = start_key_gradients(dk1, dk2, p_s, q_s, c - 1, STAGES)
            w, p1, p2 = maps(s1, s2, st_s, c, query, edge, factor, dtype, STAGES, SL, CAUSAL, 2)
            dk1, dk2 = warpgroup_mma_wait(0, deps=(dk1, dk2))
            release(q_empty, c - 1, STAGES)
            wait_empty(maps_empty, c, 1)
            hand_over(w, p1, p2, w_s, p_s, maps_full, c)
        wait_full(ds_full, total - 1, 1)
        dk1, dk2 = start_key_gradients(dk1, dk2, p_s, q_s, total - 1, STAGES)
        dk1, dk2 = warpgroup_mma_wait(0, deps=(dk1, dk2))
    b, g, first, low, tiles = own_keys(sizes, recompute_here(total), BM, BN, CAUSAL)
    start = (b.to(gl.int64) * S * G + g) * D
    scale = factor * LN_2
    if ONE_KEY:
        store_rows(dk1_to + start, ((dk1 + dk2) * scale).to(dtype), first, S, G * D, KL)
    else:
        store_rows(dk1_to + start, (dk1 * scale).to(dtype), first, S, G * D, KL)
        store_rows(dk2_to + start, (dk2 * scale).to(dtype), first, S, G * D, KL)


@jit
def score_gradients(dp, p_s, st_s, c, dtype: gl.constexpr, STAGES: gl.constexpr, SL: gl.constexpr):
    """Replace P1 and P2 of tile c by dS1 = P1 (dP - delta1) and dS2 = P2 lam (delta2 - dP), all [BN, BM]."""
    p1 = p_s.index(0).load(SL).to(gl.float32)  # [BN, BM]
    p_s.index(0).store((p1 * (dp - statistic(st_s, c, DELTA1, STAGES, SL))).to(dtype))
    p2 = p_s.index(1).load(SL).to(gl.float32)  # [BN, BM]
    lam = statistic(st_s, c, LAM, STAGES, SL)
    p_s.index(1).store((p2 * (statistic(st_s, c, LAM_DELTA2, STAGES, SL) - lam * dp)).to(dtype))
    fence_async_shared()


@jit
def dv_consumer(do_s, st_s, v_s, w_s, p_s, bars, dv_to, sizes, BM: gl.constexpr,
                STAGES: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """A consumer warpgroup: dP, dS1, dS2 and dV."""
    kv_full, query_ring, gradient_ring, maps_ring, ds_full = bars
    _, q_empty = query_ring
    do_full, do_empty = gradient_ring
    maps_full, maps_empty = maps_ring
    _, S, G, members = sizes
    BN: gl.constexpr = v_s.shape[3]
    DV: gl.constexpr = v_s.shape[4]
    dtype: gl.constexpr = v_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    VL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    b, g, first, _, tiles = own_keys(sizes, 0, BM, BN, CAUSAL)
    total = tiles * members
    dv = gl.full([BN, DV], 0.0, gl.float32, VL)  # [BN, DV]
    zeros = gl.full([BN, BM], 0.0, gl.float32, SL)
    mbarrier.wait(kv_full, 0)
    if total > 0:
        wait_full(do_full, 0, STAGES)
        dp = warpgroup_mma(tile(v_s, 0), tile(do_s, 0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        for c in range(total):
            wait_full(maps_full, c, 1)
            dv = warpgroup_mma(w_s, tile(do_s, c % STAGES), dv, is_async=True)
            score_gradients(dp, p_s, st_s, c, dtype, STAGES, SL)
            signal_full(ds_full, c, 1)
            release(q_empty, c, STAGES)
            n = gl.minimum(c + 1, total - 1)  # in the last step: the last tile again, whose product is not used
            wait_full(do_full, n, STAGES)
            do = tile(do_s, n % STAGES).permute((1, 0))
            dp = warpgroup_mma(tile(v_s, recompute_here(c)), do, zeros, use_acc=False, is_async=True)
            dv = warpgroup_mma_wait(1, deps=(dv,))
            release(maps_empty, c, 1)
            release(do_empty, c, STAGES)
            dp = warpgroup_mma_wait(0, deps=(dp,))
    b, g, first, _, tiles = own_keys(sizes, recompute_here(total), BM, BN, CAUSAL)
    start = (b.to(gl.int64) * S * G + g) * DV
    store_rows(dv_to + start, dv.to(dtype), first, S, G * DV, VL)


@jit
def producer(descriptors, statistics, lam_strides, q_s, do_s, st_s, k_s, v_s, bars, sizes,
         STAGES: gl.constexpr, CAUSAL: gl.constexpr, SIGNAL_PER_NOISE: gl.constexpr):  # fmt: skip
    """The producer warp."""
    q1, q2, k1, k2, v, do = descriptors
    lse1, lse2, delta1, lam_delta2, lam_at = statistics
    kv_full, query_ring, gradient_ring, _, _ = bars
    q_full, q_empty = query_ring
    do_full, do_empty = gradient_ring
    T, _, G, members = sizes
    BM: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    D: gl.constexpr = k_s.shape[4]
    DV: gl.constexpr = v_s.shape[4]
    RL: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    b, g, first, low, tiles = own_keys(sizes, 0, BM, BN, CAUSAL)
    mbarrier.expect(kv_full, BN * (2 * D + DV) * 2)
    tma.async_copy_global_to_shared(k1, [b, g, first, 0], kv_full, k_s.index(0))
    tma.async_copy_global_to_shared(k2, [b, g, first, 0], kv_full, k_s.index(1))
    tma.async_copy_global_to_shared(v, [b, g, first, 0], kv_full, v_s.index(0))
    query = low
    h = g * members
    for c in range(tiles * members):
        slot = c % STAGES
        claim(do_full, do_empty, c, STAGES, BM * DV * 2)
        tma.async_copy_global_to_shared(do, [b, h, query, 0], do_full.index(slot), do_s.index(slot))
        claim(q_full, q_empty, c, STAGES, 2 * BM * D * 2)
        tma.async_copy_global_to_shared(q1, [b, h, query, 0], q_full.index(slot), q_s.index(2 * slot))
        noise = h // SIGNAL_PER_NOISE
        tma.async_copy_global_to_shared(q2, [b, noise, query, 0], q_full.index(slot), q_s.index(2 * slot + 1))
        rows = query + gl.arange(0, BM, RL)  # [BM], as what follows
        here = rows < T
        at = (b * G * members + h).to(gl.int64) * T + rows
        st = slot * STATISTICS
        st_s.index(st + LSE1).store(gl.load(lse1 + at, mask=here, other=float("inf")))
        st_s.index(st + LSE2).store(gl.load(lse2 + at, mask=here, other=float("inf")))
        st_s.index(st + LAM).store(load_lam(lam_at, lam_strides, b, h, rows, T))
        st_s.index(st + DELTA1).store(gl.load(delta1 + at, mask=here, other=0.0))
        st_s.index(st + LAM_DELTA2).store(gl.load(lam_delta2 + at, mask=here, other=0.0))
        signal_full(q_full, c, STAGES)
        query += BM
        if query >= T:
            query = low
            h += 1


@jit(do_not_specialize=NOT_SPECIALIZED)
def bwd_dkdv(q1, q2, k1, k2, v, do, lse1, lse2, delta1, lam_delta2, lam, dk1, dk2, dv,
                  stride_lam_b, stride_lam_h, stride_lam_t, T, S, G, members, factor,
                  BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
                  CAUSAL: gl.constexpr, ONE_KEY: gl.constexpr, SIGNAL_PER_NOISE: gl.constexpr):  # fmt: skip
    """Grid: cdiv(S, BN), G, B.

    q1 .. do: descriptors of [B, heads, length, D or DV] in blocks [1, 1, BM or BN, D or DV]; H = G members heads of q1
    and do, H / SIGNAL_PER_NOISE of q2. lse1 .. lam_delta2 [B, H, T]; lam [B, H, T] by strides. dk1, dk2, dv: memory
    [B, S, G, width]. factor: scale log2(e).
    """
    dtype: gl.constexpr = v.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    q_s = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, 1, BM, D], q1.layout)
    do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, DV], do.layout)
    k_s = gl.allocate_shared_memory(dtype, [2, 1, 1, BN, D], k1.layout)
    v_s = gl.allocate_shared_memory(dtype, [1, 1, 1, BN, DV], v.layout)
    st_s = gl.allocate_shared_memory(
        gl.float32, [STATISTICS * STAGES, BM], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )  # fmt: skip
    w_s = gl.allocate_shared_memory(dtype, [BN, BM], SHARED)
    p_s = gl.allocate_shared_memory(dtype, [2, BN, BM], SHARED)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    ds_full, _ = ring(1, 1, 1)
    bars = (kv_full, ring(STAGES, 2, 2), ring(STAGES, 1, 1), ring(1, 1, 1), ds_full)
    descriptors = (q1, q2, k1, k2, v, do)
    statistics = (lse1, lse2, delta1, lam_delta2, lam)
    strides = (stride_lam_b, stride_lam_h, stride_lam_t)
    sizes = (T, S, G, members)
    gl.warp_specialize([
        (dv_consumer, (do_s, st_s, v_s, w_s, p_s, bars, dv, sizes, BM, STAGES, CAUSAL)),
        (dk_consumer, (q_s, st_s, k_s, w_s, p_s, bars, dk1, dk2, sizes, factor, STAGES, CAUSAL, ONE_KEY)),
        (producer, (descriptors, statistics, strides, q_s, do_s, st_s, k_s, v_s, bars, sizes, STAGES, CAUSAL,
                SIGNAL_PER_NOISE)),
    ], [4, 1], [248, 32])  # fmt: skip
