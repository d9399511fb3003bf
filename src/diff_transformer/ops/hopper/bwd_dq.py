"""Gradients of the queries, dQ1 and dQ2: the second of two deterministic passes.

A program computes 2 ROWS rows of dQ1 and dQ2 of one head. As in the forward, a producer warp loads keys and values, and
each of two consumer warpgroups owns ROWS = 64 query rows, whose queries and dO it loads itself. For each tile of keys a
consumer computes five products: dP, the scores of each map, and dS of each map times its keys.

Barriers (pipeline.py): ``q_full[consumer]`` gets one arrival, with the bytes of the consumer's own tiles, and is used
once. One ring holds the keys of both maps, another the values. Both consumers visit every tile (``skip``).
"""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from diff_transformer.ops.hopper.pipeline import (
    LN_2,
    claim,
    gl,
    jit,
    last_visible_key,
    load_lam,
    recompute_here,
    release,
    ring,
    skip,
    store_rows,
    tile,
    tiles_for,
    unmasked_tiles_for,
    wait_full,
)

NOT_SPECIALIZED = ["stride_lam_b", "stride_lam_h", "stride_lam_t", "T", "S", "H", "signal_per_kv"]


@jit
def own_queries(T, recomputed, ROWS: gl.constexpr):
    """(batch entry, head, first row) of a program, the longest rows first; ``recomputed`` as in bwd_dkdv.py."""
    blocks = (T + 2 * ROWS - 1) // (2 * ROWS)
    first = (blocks - 1 - recomputed - gl.program_id(0)) * (2 * ROWS)
    return gl.program_id(2) + recomputed, gl.program_id(1) + recomputed, first


@jit
def attention_map(s, log, first_key, unmasked, last_seen, factor, SL: gl.constexpr, CAUSAL: gl.constexpr):
    """A tile of a map, [ROWS, BN]; keys from ``unmasked`` on are not visible to all rows."""
    p = gl.exp2(s * factor - gl.expand_dims(log, 1))
    if first_key >= unmasked:
        keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, SL))
        if CAUSAL:
            p = gl.where(gl.expand_dims(keys, 0) <= gl.expand_dims(last_seen, 1), p, 0.0)
        else:
            p = gl.where(gl.expand_dims(keys <= last_seen, 0), p, 0.0)
    return p


@jit
def consumer(descriptors, statistics, lam_strides, q_s, do_s, k_s, v_s, bars, dq1_to, dq2_to, sizes, factor,
         KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
         SIGNAL_PER_NOISE: gl.constexpr, INDEX: gl.constexpr):  # fmt: skip
    """A consumer warpgroup: ROWS rows of dQ1 and dQ2."""
    q1, q2, dout = descriptors
    lse1, lse2, delta1, lam_delta2, lam_at = statistics
    q_full, key_ring, value_ring = bars
    k_full, k_empty = key_ring
    v_full, v_empty = value_ring
    T, S, H = sizes
    ROWS: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    D: gl.constexpr = k_s.shape[4]
    DV: gl.constexpr = v_s.shape[4]
    dtype: gl.constexpr = k_s.dtype
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    QL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    AL: gl.constexpr = gl.DotOperandLayout(0, QL, 2)
    b, h, row = own_queries(T, 0, ROWS)
    tiles = tiles_for(row, 2 * ROWS, T, S, BN, CAUSAL)
    row += INDEX * ROWS
    mbarrier.expect(q_full.index(INDEX), ROWS * (2 * D + DV) * 2)
    tma.async_copy_global_to_shared(q1, [b, h, row, 0], q_full.index(INDEX), q_s.index(INDEX))
    tma.async_copy_global_to_shared(dout, [b, h, row, 0], q_full.index(INDEX), do_s.index(INDEX))
    noise = h // SIGNAL_PER_NOISE
    tma.async_copy_global_to_shared(q2, [b, noise, row, 0], q_full.index(INDEX), q_s.index(2 + INDEX))
    own = tiles_for(row, ROWS, T, S, BN, CAUSAL)
    unmasked = unmasked_tiles_for(row, T, S, BN, CAUSAL) * BN
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    last_seen = last_visible_key(rows, T, S, CAUSAL)
    here = rows < T
    at = (b * H + h).to(gl.int64) * T + rows
    log1 = gl.load(lse1 + at, mask=here, other=float("inf"))  # [ROWS]
    log2 = gl.load(lse2 + at, mask=here, other=float("inf"))  # [ROWS]
    first_delta = gl.expand_dims(gl.load(delta1 + at, mask=here, other=0.0), 1)  # [ROWS, 1]
    second_delta = gl.expand_dims(gl.load(lam_delta2 + at, mask=here, other=0.0), 1)  # [ROWS, 1]
    lam = gl.expand_dims(load_lam(lam_at, lam_strides, b, h, rows, T), 1)  # [ROWS, 1]
    dq1 = gl.full([ROWS, D], 0.0, gl.float32, QL)  # [ROWS, D]
    dq2 = gl.full([ROWS, D], 0.0, gl.float32, QL)
    zeros = gl.full([ROWS, BN], 0.0, gl.float32, SL)
    mbarrier.wait(q_full.index(INDEX), 0)
    for c in range(own):
        wait_full(k_full, c, KEY_STAGES)
        k1 = tile(k_s, 2 * (c % KEY_STAGES))
        k2 = tile(k_s, 2 * (c % KEY_STAGES) + 1)
        s = warpgroup_mma(tile(q_s, INDEX + recompute_here(c)), k1.permute((1, 0)), zeros, use_acc=False, is_async=True)
        wait_full(v_full, c, VALUE_STAGES)
        v = tile(v_s, c % VALUE_STAGES + recompute_here(c))
        do = tile(do_s, INDEX + recompute_here(c))
        dp = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        p = attention_map(s, log1, c * BN, unmasked, last_seen, factor, SL, CAUSAL)  # [ROWS, BN]
        dp = warpgroup_mma_wait(0, deps=(dp,))
        release(v_empty, c, VALUE_STAGES)
        ds = (p * (dp - first_delta)).to(dtype)
        s = warpgroup_mma(
            tile(q_s, 2 + INDEX + recompute_here(c)), k2.permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        dq1 = warpgroup_mma(gl.convert_layout(ds, AL), k1, dq1, is_async=True)
        s, dq1 = warpgroup_mma_wait(0, deps=(s, dq1))
        p = attention_map(s, log2, c * BN, unmasked, last_seen, factor, SL, CAUSAL)
        ds = (p * (second_delta - lam * dp)).to(dtype)
        dq2 = warpgroup_mma(gl.convert_layout(ds, AL), k2, dq2, is_async=True)
        dq2 = warpgroup_mma_wait(0, deps=(dq2,))
        release(k_empty, c, KEY_STAGES)
    for c in range(own, tiles):  # one slot of each ring in turn, as the producer fills them
        skip(k_full, k_empty, c, c + 1, KEY_STAGES)
        skip(v_full, v_empty, c, c + 1, VALUE_STAGES)
    b, h, row = own_queries(T, recompute_here(own), ROWS)
    start = (b.to(gl.int64) * T * H + h) * D
    scale = factor * LN_2
    store_rows(dq1_to + start, (dq1 * scale).to(dtype), row + INDEX * ROWS, T, H * D, QL)
    dq2 = (dq2 * scale).to(gl.float32 if SIGNAL_PER_NOISE > 1 else dtype)
    store_rows(dq2_to + start, dq2, row + INDEX * ROWS, T, H * D, QL)


@jit
def producer(descriptors, k_s, v_s, bars, sizes, signal_per_kv, ROWS: gl.constexpr,
         KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """The producer warp: tiles of the keys of both maps, and of values."""
    k1, k2, v = descriptors
    _, key_ring, value_ring = bars
    k_full, k_empty = key_ring
    v_full, v_empty = value_ring
    T, S, _ = sizes
    BN: gl.constexpr = k_s.shape[3]
    b, h, row = own_queries(T, 0, ROWS)
    g = h // signal_per_kv
    for c in range(tiles_for(row, 2 * ROWS, T, S, BN, CAUSAL)):
        claim(k_full, k_empty, c, KEY_STAGES, 2 * BN * k_s.shape[4] * 2)
        slot = c % KEY_STAGES
        tma.async_copy_global_to_shared(k1, [b, g, c * BN, 0], k_full.index(slot), k_s.index(2 * slot))
        tma.async_copy_global_to_shared(k2, [b, g, c * BN, 0], k_full.index(slot), k_s.index(2 * slot + 1))
        claim(v_full, v_empty, c, VALUE_STAGES, BN * v_s.shape[4] * 2)
        slot = c % VALUE_STAGES
        tma.async_copy_global_to_shared(v, [b, g, c * BN, 0], v_full.index(slot), v_s.index(slot))


@jit(do_not_specialize=NOT_SPECIALIZED)
def bwd_dq(q1, q2, k1, k2, v, do, lse1, lse2, delta1, lam_delta2, lam, dq1, dq2,
                    stride_lam_b, stride_lam_h, stride_lam_t, T, S, H, signal_per_kv, factor,
                    ROWS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, KEY_STAGES: gl.constexpr,
                    VALUE_STAGES: gl.constexpr, CAUSAL: gl.constexpr, SIGNAL_PER_NOISE: gl.constexpr):  # fmt: skip
    """Grid: cdiv(T, 2 ROWS), H, B. Arguments as in ``bwd_dkdv``; dq1 and dq2: memory [B, T, H, D].

    If heads of q1 share one of q2, dq2 is fp32 and has separate rows for each head of q1.
    """
    dtype: gl.constexpr = v.dtype
    q_s = gl.allocate_shared_memory(dtype, [4, 1, 1, ROWS, D], q1.layout)
    do_s = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, DV], do.layout)
    k_s = gl.allocate_shared_memory(dtype, [2 * KEY_STAGES, 1, 1, BN, D], k1.layout)
    v_s = gl.allocate_shared_memory(dtype, [VALUE_STAGES, 1, 1, BN, DV], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_full.index(1), count=1)
    bars = (q_full, ring(KEY_STAGES, 1, 2), ring(VALUE_STAGES, 1, 2))
    descriptors = (q1, q2, do)
    statistics = (lse1, lse2, delta1, lam_delta2, lam)
    strides = (stride_lam_b, stride_lam_h, stride_lam_t)
    sizes = (T, S, H)
    gl.warp_specialize([
        (consumer, (descriptors, statistics, strides, q_s, do_s, k_s, v_s, bars, dq1, dq2, sizes, factor,
                KEY_STAGES, VALUE_STAGES, CAUSAL, SIGNAL_PER_NOISE, 0)),
        (consumer, (descriptors, statistics, strides, q_s, do_s, k_s, v_s, bars, dq1, dq2, sizes, factor,
                KEY_STAGES, VALUE_STAGES, CAUSAL, SIGNAL_PER_NOISE, 1)),
        (producer, ((k1, k2, v), k_s, v_s, bars, sizes, signal_per_kv, ROWS, KEY_STAGES, VALUE_STAGES, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip
