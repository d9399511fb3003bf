"""Forward for widths whose registers hold one accumulator only (D = 128, DV = 256): the maps one after the other.

The second map goes first over all its keys. Its output is parked in global memory, where the backward wants it anyway,
and the thread that wrote an element reads it back for the difference, so that no barrier is needed. For 128 rows K of
each map is read once, V twice. Barriers and names: steps.py.
"""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from diff_transformer.ops.triton.gluon.steps import (
    NOT_SPECIALIZED,
    barriers,
    claim,
    finish,
    gl,
    jit,
    last_seen_by,
    load_lam,
    load_queries,
    output_offsets,
    place_of,
    release,
    skip,
    softmax_step,
    start_scores,
    start_values,
    tile,
    tiles_for,
    wait_full,
    whole_tiles_for,
)


@jit
def step(c, first_key, q, k_s, v_s, full, empty, acc, m, l, p, scale, last_seen,
         STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr,
         MASK: gl.constexpr):  # fmt: skip
    """Scores and weights of tile c, while acc takes in tile c - 1, whose weights are p; tile c - 1 is let go."""
    wait_full(full, c, STAGES)
    s = start_scores(q, k_s, c, STAGES, SL)
    acc = start_values(acc, p, v_s, c - 1, STAGES)
    s = warpgroup_mma_wait(1, deps=(s,))
    weights, shrink, m, l = softmax_step(s, m, l, scale, first_key, last_seen, SL, BN, CAUSAL, MASK)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    release(empty, c - 1, STAGES)
    acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, OL)), 1)
    p = gl.convert_layout(weights.to(k_s.dtype), gl.DotOperandLayout(0, OL, 2))
    return acc, m, l, p


@jit
def one_map(base, counts, q, k_s, v_s, full, empty, scale, last_seen,
            STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """One map over its tiles, the first of which is tile base: acc [ROWS, DV], m and l [ROWS]."""
    whole, own, tiles = counts
    BN: gl.constexpr = k_s.shape[3]
    m = gl.full([q.shape[0]], -float("inf"), gl.float32, gl.SliceLayout(1, SL))
    l = gl.full([q.shape[0]], 0.0, gl.float32, gl.SliceLayout(1, SL))
    acc = gl.full([q.shape[0], v_s.shape[4]], 0.0, gl.float32, OL)
    wait_full(full, base, STAGES)
    s = start_scores(q, k_s, base, STAGES, SL)
    s = warpgroup_mma_wait(0, deps=(s,))
    p, _, m, l = softmax_step(s, m, l, scale, 0, last_seen, SL, BN, CAUSAL, True)
    p = gl.convert_layout(p.to(k_s.dtype), gl.DotOperandLayout(0, OL, 2))
    for i in range(1, whole):
        acc, m, l, p = step(base + i, i * BN, q, k_s, v_s, full, empty, acc, m, l, p, scale, last_seen,
                            STAGES, SL, OL, BN, CAUSAL, False)  # fmt: skip
    for i in range(gl.maximum(whole, 1), own):
        acc, m, l, p = step(base + i, i * BN, q, k_s, v_s, full, empty, acc, m, l, p, scale, last_seen,
                            STAGES, SL, OL, BN, CAUSAL, True)  # fmt: skip
    acc = start_values(acc, p, v_s, base + own - 1, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty, base + own - 1, STAGES)
    skip(full, empty, base + own, base + tiles, STAGES)
    return acc, m, l


@jit
def half(q_s, k_s, v_s, bars, pointers, lam_strides, place, T, S, H, scale,
         STAGES: gl.constexpr, CAUSAL: gl.constexpr, SAVE: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """A computing warpgroup: the second map, then the first, then their difference."""
    q_full, full, empty = bars
    out, out2, lse1, lse2, lam = pointers
    b, h, row0, tiles = place
    ROWS: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    DV: gl.constexpr = v_s.shape[4]
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    row = row0 + HALF * ROWS
    own = tiles_for(row, ROWS, T, S, BN, CAUSAL)
    counts = (gl.minimum(whole_tiles_for(row, T, S, BN, CAUSAL), own), own, tiles)
    last_seen = last_seen_by(row + gl.arange(0, ROWS, gl.SliceLayout(1, SL)), T, S, CAUSAL)
    mbarrier.wait(q_full, 0)
    for turn in range(2):
        q = tile(q_s, 2 - 2 * turn + HALF)
        acc, m, l = one_map(turn * tiles, counts, q, k_s, v_s, full, empty, scale, last_seen, STAGES, SL, OL, CAUSAL)
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, OL))
        inside = gl.expand_dims(rows < T, 1)
        statistics = (b * H + h).to(gl.int64) * T
        offsets = output_offsets(b, h, H, T, rows, DV, OL)
        if turn == 0:
            acc = finish(acc, m, l, lse2 + statistics, rows, T, OL, SAVE)
            gl.store(out2 + offsets, acc.to(v_s.dtype), mask=inside)
        else:
            acc = finish(acc, m, l, lse1 + statistics, rows, T, OL, SAVE)
            second = gl.load(out2 + offsets, mask=inside, other=0.0).to(gl.float32)
            acc = acc - gl.expand_dims(load_lam(lam, lam_strides, b, h, rows, T), 1) * second
            gl.store(out + offsets, acc.to(v_s.dtype), mask=inside)


@jit
def load(descriptors, q_s, k_s, v_s, bars, place, kv_head, noise_head, STAGES: gl.constexpr):
    """The loading warp: queries, then the second map's keys with the values, then the first map's."""
    q1, q2, k1, k2, v = descriptors
    q_full, full, empty = bars
    b, h, row0, tiles = place
    BN: gl.constexpr = k_s.shape[3]
    BYTES: gl.constexpr = BN * (k_s.shape[4] + v_s.shape[4]) * 2
    load_queries(q1, q2, q_s, q_full, b, h, noise_head, row0)
    for i in range(tiles):
        slot = i % STAGES
        claim(full, empty, i, STAGES, BYTES)
        tma.async_copy_global_to_shared(k2, [b, kv_head, i * BN, 0], full.index(slot), k_s.index(slot))
        tma.async_copy_global_to_shared(v, [b, kv_head, i * BN, 0], full.index(slot), v_s.index(slot))
    for i in range(tiles):
        slot = (tiles + i) % STAGES
        claim(full, empty, tiles + i, STAGES, BYTES)
        tma.async_copy_global_to_shared(k1, [b, kv_head, i * BN, 0], full.index(slot), k_s.index(slot))
        tma.async_copy_global_to_shared(v, [b, kv_head, i * BN, 0], full.index(slot), v_s.index(slot))


@jit(do_not_specialize=NOT_SPECIALIZED)
def forward_in_turn(q1, q2, k1, k2, v, out, out2, lse1, lse2, lam, stride_lam_b, stride_lam_h, stride_lam_t,
                    T, S, H, signal_per_noise, signal_per_kv, scale,
                    ROWS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
                    CAUSAL: gl.constexpr, SAVE: gl.constexpr):  # fmt: skip
    """Grid: cdiv(T, 2 ROWS) * B * H.

    q1 .. v: descriptors of [B, heads, length, width] in blocks [1, 1, ROWS or BN, width]. out, out2: memory
    [B, T, H, DV]; lse1, lse2 [B, H, T]; lam [B, H, T] by strides. Without SAVE lse1 and lse2 are not written, and out2
    may be out.
    """
    b, h, row0 = place_of(gl.program_id(0), T, H, ROWS)
    tiles = tiles_for(row0, 2 * ROWS, T, S, BN, CAUSAL)
    dtype: gl.constexpr = v.dtype
    q_s = gl.allocate_shared_memory(dtype, [4, 1, 1, ROWS, D], q1.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k1.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, DV], v.layout)
    bars = barriers(STAGES)
    pointers = (out, out2, lse1, lse2, lam)
    strides = (stride_lam_b, stride_lam_h, stride_lam_t)
    place = (b, h, row0, tiles)
    gl.warp_specialize([
        (half, (q_s, k_s, v_s, bars, pointers, strides, place, T, S, H, scale, STAGES, CAUSAL, SAVE, 0)),
        (half, (q_s, k_s, v_s, bars, pointers, strides, place, T, S, H, scale, STAGES, CAUSAL, SAVE, 1)),
        (load, ((q1, q2, k1, k2, v), q_s, k_s, v_s, bars, place, h // signal_per_kv, h // signal_per_noise, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
