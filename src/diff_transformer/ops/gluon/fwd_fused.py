"""Fused forward: both maps in one pass over the keys, for widths whose registers hold two accumulators (D = 64).

Each tile takes two steps, one for each map. A step computes the softmax of one map while the tensor cores add the other
map's weights times V. K1, K2 and V are read once for 128 rows. Barriers and names: pipeline.py.
"""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from diff_transformer.ops.gluon.pipeline import (
    FWD_NOT_SPECIALIZED,
    claim,
    finalize,
    forward_barriers,
    forward_place,
    gl,
    jit,
    last_visible_key,
    load_lam,
    load_queries,
    output_offsets,
    release,
    skip,
    softmax_step,
    tile,
    tiles_for,
    unmasked_tiles_for,
    wait_full,
)


@jit
def start_scores(q, k_s, c, STAGES: gl.constexpr, SL: gl.constexpr):
    """Start q K^T of tile c, [ROWS, BN] in layout SL."""
    k = tile(k_s, c % STAGES)
    zeros = gl.full([q.shape[0], k.shape[0]], 0.0, gl.float32, SL)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@jit
def start_values(acc, p, v_s, c, STAGES: gl.constexpr):
    """Start acc += p V of tile c."""
    return warpgroup_mma(p, tile(v_s, c % STAGES), acc, is_async=True)


@jit
def map_step(c_scores, c_values, first_key, q, k_s, v_s, m, l, scale, last_seen, acc_other, p_other,
              STAGES: gl.constexpr, SL: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
              MASK: gl.constexpr):  # fmt: skip
    """Scores and weights of one map for tile c_scores, while acc_other += p_other V of tile c_values.

    Returns the map's weights [ROWS, BN], the factor [ROWS] that rescales its accumulator, its m and l [ROWS], and the
    other map's accumulator [ROWS, DV].
    """
    s = start_scores(q, k_s, c_scores, STAGES, SL)  # [ROWS, BN]
    acc_other = start_values(acc_other, p_other, v_s, c_values, STAGES)
    s = warpgroup_mma_wait(1, deps=(s,))
    weights, rescale, m, l = softmax_step(s, m, l, scale, first_key, last_seen, SL, BN, CAUSAL, MASK)
    acc_other, p_other = warpgroup_mma_wait(0, deps=(acc_other, p_other))
    return weights, rescale, m, l, acc_other


@jit
def operand(weights, dtype: gl.constexpr, OL: gl.constexpr):
    """Weights [ROWS, BN] in the layout of the left operand of the product with V."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OL, 2))


@jit
def rescaled(acc, rescale, OL: gl.constexpr):
    """acc [ROWS, DV] with each row multiplied by its factor [ROWS]."""
    return acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OL)), 1)


@jit
def step(c, q1, q2, k1_s, k2_s, v_s, full, empty, first, second, p1, scale, last_seen,
         STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, CAUSAL: gl.constexpr,
         MASK: gl.constexpr):  # fmt: skip
    """The second map of tile c - 1, then the first map of tile c; then release tile c - 1.

    p1 [ROWS, BN] are the first map's weights of tile c - 1; its accumulator has been rescaled for them.
    """
    acc1, m1, l1 = first
    acc2, m2, l2 = second
    BN: gl.constexpr = k1_s.shape[3]
    weights, rescale, m2, l2, acc1 = map_step(c - 1, c - 1, (c - 1) * BN, q2, k2_s, v_s, m2, l2, scale, last_seen,
                                              acc1, p1, STAGES, SL, BN, CAUSAL, MASK)  # fmt: skip
    acc2 = rescaled(acc2, rescale, OL)
    p2 = operand(weights, v_s.dtype, OL)
    wait_full(full, c, STAGES)
    weights, rescale, m1, l1, acc2 = map_step(c, c - 1, c * BN, q1, k1_s, v_s, m1, l1, scale, last_seen,
                                              acc2, p2, STAGES, SL, BN, CAUSAL, MASK)  # fmt: skip
    release(empty, c - 1, STAGES)
    acc1 = rescaled(acc1, rescale, OL)
    return (acc1, m1, l1), (acc2, m2, l2), operand(weights, v_s.dtype, OL)


@jit
def consumer(q_s, k1_s, k2_s, v_s, bars, pointers, lam_strides, place, T, S, H, scale,
         STAGES: gl.constexpr, CAUSAL: gl.constexpr, SAVE: gl.constexpr, INDEX: gl.constexpr):  # fmt: skip
    """A consumer warpgroup: ROWS rows of the output."""
    q_full, full, empty = bars
    out, out2, lse1, lse2, lam = pointers
    b, h, row0, tiles = place
    ROWS: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k1_s.shape[3]
    DV: gl.constexpr = v_s.shape[4]
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    row = row0 + INDEX * ROWS
    own = tiles_for(row, ROWS, T, S, BN, CAUSAL)
    unmasked = gl.minimum(unmasked_tiles_for(row, T, S, BN, CAUSAL), own)
    last_seen = last_visible_key(row + gl.arange(0, ROWS, gl.SliceLayout(1, SL)), T, S, CAUSAL)
    m1 = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SL))  # row maxima, [ROWS]
    m2 = m1
    l1 = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SL))  # row sums, [ROWS]
    l2 = l1
    acc1 = gl.full([ROWS, DV], 0.0, gl.float32, OL)  # [ROWS, DV]
    acc2 = acc1
    q1 = tile(q_s, INDEX)  # [ROWS, D]
    q2 = tile(q_s, 2 + INDEX)  # [ROWS, D]
    mbarrier.wait(q_full, 0)
    wait_full(full, 0, STAGES)
    s = start_scores(q1, k1_s, 0, STAGES, SL)
    s = warpgroup_mma_wait(0, deps=(s,))
    weights, _, m1, l1 = softmax_step(s, m1, l1, scale, 0, last_seen, SL, BN, CAUSAL, True)
    p1 = operand(weights, v_s.dtype, OL)
    first = (acc1, m1, l1)
    second = (acc2, m2, l2)
    for c in range(1, unmasked):
        first, second, p1 = step(c, q1, q2, k1_s, k2_s, v_s, full, empty, first, second, p1, scale, last_seen,
                                 STAGES, SL, OL, CAUSAL, False)  # fmt: skip
    for c in range(gl.maximum(unmasked, 1), own):
        first, second, p1 = step(c, q1, q2, k1_s, k2_s, v_s, full, empty, first, second, p1, scale, last_seen,
                                 STAGES, SL, OL, CAUSAL, True)  # fmt: skip
    acc1, m1, l1 = first
    acc2, m2, l2 = second
    c = own - 1
    weights, rescale, m2, l2, acc1 = map_step(c, c, c * BN, q2, k2_s, v_s, m2, l2, scale, last_seen,
                                              acc1, p1, STAGES, SL, BN, CAUSAL, True)  # fmt: skip
    acc2 = start_values(rescaled(acc2, rescale, OL), operand(weights, v_s.dtype, OL), v_s, c, STAGES)
    acc2 = warpgroup_mma_wait(0, deps=(acc2,))
    release(empty, c, STAGES)
    skip(full, empty, own, tiles, STAGES)

    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, OL))
    inside = gl.expand_dims(rows < T, 1)
    statistics = (b * H + h).to(gl.int64) * T
    offsets = output_offsets(b, h, H, T, rows, DV, 0, DV, OL)
    acc2 = finalize(acc2, m2, l2, lse2 + statistics, rows, T, OL, SAVE)
    if SAVE:
        gl.store(out2 + offsets, acc2.to(v_s.dtype), mask=inside)
    acc1 = finalize(acc1, m1, l1, lse1 + statistics, rows, T, OL, SAVE)
    acc1 = acc1 - gl.expand_dims(load_lam(lam, lam_strides, b, h, rows, T), 1) * acc2
    gl.store(out + offsets, acc1.to(v_s.dtype), mask=inside)


@jit
def producer(descriptors, q_s, k1_s, k2_s, v_s, bars, place, kv_head, noise_head,
         STAGES: gl.constexpr, ONE_KEY: gl.constexpr):  # fmt: skip
    """The producer warp: queries, then tiles of keys and values. ONE_KEY: k2 is k1, and k2_s is k1_s."""
    q1, q2, k1, k2, v = descriptors
    q_full, full, empty = bars
    b, h, row0, tiles = place
    BN: gl.constexpr = k1_s.shape[3]
    KEYS: gl.constexpr = 1 if ONE_KEY else 2
    load_queries(q1, q2, q_s, q_full, b, h, noise_head, row0, 1)
    for c in range(tiles):
        slot = c % STAGES
        claim(full, empty, c, STAGES, BN * (KEYS * k1_s.shape[4] + v_s.shape[4]) * 2)
        tma.async_copy_global_to_shared(k1, [b, kv_head, c * BN, 0], full.index(slot), k1_s.index(slot))
        if not ONE_KEY:
            tma.async_copy_global_to_shared(k2, [b, kv_head, c * BN, 0], full.index(slot), k2_s.index(slot))
        tma.async_copy_global_to_shared(v, [b, kv_head, c * BN, 0], full.index(slot), v_s.index(slot))


@jit(do_not_specialize=FWD_NOT_SPECIALIZED)
def fwd_fused(q1, q2, k1, k2, v, out, out2, lse1, lse2, lam, stride_lam_b, stride_lam_h, stride_lam_t,
                     T, S, H, signal_per_noise, signal_per_kv, scale,
                     ROWS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
                     CAUSAL: gl.constexpr, SAVE: gl.constexpr, ONE_KEY: gl.constexpr):  # fmt: skip
    """Arguments and grid as in ``fwd_sequential``. Without SAVE, out2, lse1 and lse2 are not written."""
    b, h, row0 = forward_place(gl.program_id(0), T, H, ROWS)
    tiles = tiles_for(row0, 2 * ROWS, T, S, BN, CAUSAL)
    dtype: gl.constexpr = v.dtype
    q_s = gl.allocate_shared_memory(dtype, [4, 1, 1, ROWS, D], q1.layout)
    k1_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k1.layout)
    if ONE_KEY:  # noqa: SIM108 (one line would allocate in both cases)
        k2_s = k1_s
    else:
        k2_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k2.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, DV], v.layout)
    bars = forward_barriers(STAGES)
    pointers = (out, out2, lse1, lse2, lam)
    strides = (stride_lam_b, stride_lam_h, stride_lam_t)
    place = (b, h, row0, tiles)
    kv_head = h // signal_per_kv
    noise_head = h // signal_per_noise
    gl.warp_specialize([
        (consumer, (q_s, k1_s, k2_s, v_s, bars, pointers, strides, place, T, S, H, scale, STAGES, CAUSAL, SAVE, 0)),
        (consumer, (q_s, k1_s, k2_s, v_s, bars, pointers, strides, place, T, S, H, scale, STAGES, CAUSAL, SAVE, 1)),
        (producer, ((q1, q2, k1, k2, v), q_s, k1_s, k2_s, v_s, bars, place, kv_head, noise_head, STAGES, ONE_KEY)),
    ], [4, 1], [240, 24])  # fmt: skip
