"""Sequential forward: one map after the other, since the registers hold one accumulator at D = 128.

The second map comes first, over all its keys. Its output O2 goes to global memory, which the backward needs anyway. For
the difference, each thread reads back exactly the elements that it wrote, so that no barrier is needed. Keeping O2 in
registers instead would spill. For 128 rows, K of each map is read once, V twice. Barriers and names: pipeline.py.
"""

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from diff_transformer.ops.hopper.pipeline import (
    FWD_NOT_SPECIALIZED,
    claim,
    finalize,
    forward_barriers,
    gl,
    jit,
    last_visible_key,
    load_lam,
    load_queries,
    output_offsets,
    own_rows,
    release,
    skip,
    softmax_step,
    tile,
    tiles_for,
    unmasked_tiles_for,
    wait_full,
)


@jit
def start_scores(q_s, which, k_s, c, STAGES: gl.constexpr, SL: gl.constexpr):
    """Start q K^T of tile c, [ROWS, BN] in layout SL."""
    zeros = gl.full([q_s.shape[3], k_s.shape[3]], 0.0, gl.float32, SL)
    k = tile(k_s, c % STAGES).permute((1, 0))
    return warpgroup_mma(tile(q_s, which), k, zeros, use_acc=False, is_async=True)


@jit
def start_values(acc, p, v_s, c, STAGES: gl.constexpr):
    """Start acc += p V of tile c, [ROWS, DV]."""
    return warpgroup_mma(p, tile(v_s, c % STAGES), acc, is_async=True)


@jit
def wait_for_values(acc, p):
    """Wait until the product has completed; ``p`` must not be overwritten earlier."""
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    return acc


@jit
def step(c, first_key, q_s, which, k_s, v_s, full, empty, acc, m, l, p, scale, last_seen,
         STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, CAUSAL: gl.constexpr,
         MASK: gl.constexpr):  # fmt: skip
    """Scores and probabilities of tile c, while acc += p V of tile c - 1; then release tile c - 1."""
    wait_full(full, c, STAGES)
    s = start_scores(q_s, which, k_s, c, STAGES, SL)  # [ROWS, BN]
    acc = start_values(acc, p, v_s, c - 1, STAGES)
    s = warpgroup_mma_wait(1, deps=(s,))
    next_p, rescale, m, l = softmax_step(s, m, l, scale, first_key, last_seen, SL, k_s.shape[3], CAUSAL, MASK)
    acc = wait_for_values(acc, p)
    release(empty, c - 1, STAGES)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OL)), 1)
    p = gl.convert_layout(next_p.to(k_s.dtype), gl.DotOperandLayout(0, OL, 2))
    return acc, m, l, p


@jit
def one_map(base, counts, q_s, which, k_s, v_s, full, empty, scale, last_seen,
            STAGES: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    """One map over its tiles, which start at tile base: acc [ROWS, DV], m and l [ROWS].

    which: index of the query tile in q_s. counts: number of tiles without a mask, of this consumer, of the program.
    """
    unmasked, own, tiles = counts
    ROWS: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SL))  # row maxima
    l = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SL))  # row sums
    acc = gl.full([ROWS, v_s.shape[4]], 0.0, gl.float32, OL)
    wait_full(full, base, STAGES)
    s = start_scores(q_s, which, k_s, base, STAGES, SL)  # [ROWS, BN]
    s = warpgroup_mma_wait(0, deps=(s,))
    p, _, m, l = softmax_step(s, m, l, scale, 0, last_seen, SL, BN, CAUSAL, True)
    p = gl.convert_layout(p.to(k_s.dtype), gl.DotOperandLayout(0, OL, 2))
    for i in range(1, unmasked):
        acc, m, l, p = step(base + i, i * BN, q_s, which, k_s, v_s, full, empty, acc, m, l, p, scale, last_seen,
                            STAGES, SL, OL, CAUSAL, False)  # fmt: skip
    for i in range(gl.maximum(unmasked, 1), own):
        acc, m, l, p = step(base + i, i * BN, q_s, which, k_s, v_s, full, empty, acc, m, l, p, scale, last_seen,
                            STAGES, SL, OL, CAUSAL, True)  # fmt: skip
    acc = start_values(acc, p, v_s, base + own - 1, STAGES)
    acc = wait_for_values(acc, p)
    release(empty, base + own - 1, STAGES)
    skip(full, empty, base + own, base + tiles, STAGES)
    return acc, m, l


@jit
def consumer(q_s, k_s, v_s, bars, pointers, lam_strides, place, T, S, H, scale,
         STAGES: gl.constexpr, CAUSAL: gl.constexpr, SAVE: gl.constexpr, INDEX: gl.constexpr):  # fmt: skip
    """A consumer warpgroup: the second map, then the first, then their difference."""
    q_full, full, empty = bars
    out, out1, out2, lse1, lse2, lam_at = pointers
    b, h, row0, tiles = place
    ROWS: gl.constexpr = q_s.shape[3]
    BN: gl.constexpr = k_s.shape[3]
    DV: gl.constexpr = v_s.shape[4]
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    row = row0 + INDEX * ROWS
    own = tiles_for(row, ROWS, T, S, BN, CAUSAL)
    counts = (gl.minimum(unmasked_tiles_for(row, T, S, BN, CAUSAL), own), own, tiles)
    last_seen = last_visible_key(row + gl.arange(0, ROWS, gl.SliceLayout(1, SL)), T, S, CAUSAL)
    mbarrier.wait(q_full, 0)
    for turn in range(2):  # 0: the second map, 1: the first
        acc, m, l = one_map(turn * tiles, counts, q_s, 2 - 2 * turn + INDEX, k_s, v_s, full, empty, scale, last_seen,
                            STAGES, SL, OL, CAUSAL)  # fmt: skip
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, OL))
        inside = gl.expand_dims(rows < T, 1)
        statistics = (b * H + h).to(gl.int64) * T
        offsets = output_offsets(b, h, H, T, rows, DV, OL)
        if turn == 0:
            acc = finalize(acc, m, l, lse2 + statistics, rows, T, OL, SAVE)
            gl.store(out2 + offsets, acc.to(v_s.dtype), mask=inside)
        else:
            acc = finalize(acc, m, l, lse1 + statistics, rows, T, OL, SAVE)
            if SAVE:
                gl.store(out1 + offsets, acc.to(v_s.dtype), mask=inside)
            second = gl.load(out2 + offsets, mask=inside, other=0.0).to(gl.float32)  # [ROWS, DV]
            lam = gl.expand_dims(load_lam(lam_at, lam_strides, b, h, rows, T), 1)  # [ROWS, 1]
            acc = acc - lam * second
            gl.store(out + offsets, acc.to(v_s.dtype), mask=inside)


@jit
def load_tile(k, v, k_s, v_s, full, empty, c, b, kv_head, first_key, STAGES: gl.constexpr):
    """Producer: load keys and values from first_key on, as tile c."""
    slot = c % STAGES
    claim(full, empty, c, STAGES, k_s.shape[3] * (k_s.shape[4] + v_s.shape[4]) * 2)
    tma.async_copy_global_to_shared(k, [b, kv_head, first_key, 0], full.index(slot), k_s.index(slot))
    tma.async_copy_global_to_shared(v, [b, kv_head, first_key, 0], full.index(slot), v_s.index(slot))


@jit
def producer(descriptors, q_s, k_s, v_s, bars, place, kv_head, noise_head, STAGES: gl.constexpr):
    """The producer warp: queries, then the second map's keys with the values, then the first map's."""
    q1, q2, k1, k2, v = descriptors
    q_full, full, empty = bars
    b, h, row0, tiles = place
    BN: gl.constexpr = k_s.shape[3]
    load_queries(q1, q2, q_s, q_full, b, h, noise_head, row0)
    for i in range(tiles):
        load_tile(k2, v, k_s, v_s, full, empty, i, b, kv_head, i * BN, STAGES)
    for i in range(tiles):
        load_tile(k1, v, k_s, v_s, full, empty, tiles + i, b, kv_head, i * BN, STAGES)


@jit(do_not_specialize=FWD_NOT_SPECIALIZED)
def fwd_sequential(q1, q2, k1, k2, v, out, out1, out2, lse1, lse2, lam, stride_lam_b, stride_lam_h, stride_lam_t,
                    T, S, H, signal_per_noise, signal_per_kv, scale,
                    ROWS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
                    CAUSAL: gl.constexpr, SAVE: gl.constexpr):  # fmt: skip
    """Grid: cdiv(T, 2 ROWS) * B * H.

    q1 .. v: descriptors of [B, heads, length, width] in blocks [1, 1, ROWS or BN, width]. out, out1, out2:
    memory [B, T, H, DV]; lse1, lse2 [B, H, T]; lam [B, H, T] by strides. Without SAVE out1, lse1 and lse2 are not
    written, and out2 may be out.
    """
    b, h, row0 = own_rows(gl.program_id(0), T, H, ROWS)
    tiles = tiles_for(row0, 2 * ROWS, T, S, BN, CAUSAL)
    dtype: gl.constexpr = v.dtype
    q_s = gl.allocate_shared_memory(dtype, [4, 1, 1, ROWS, D], q1.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, D], k1.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BN, DV], v.layout)
    bars = forward_barriers(STAGES)
    pointers = (out, out1, out2, lse1, lse2, lam)
    strides = (stride_lam_b, stride_lam_h, stride_lam_t)
    place = (b, h, row0, tiles)
    kv_head = h // signal_per_kv
    noise_head = h // signal_per_noise
    gl.warp_specialize([
        (consumer, (q_s, k_s, v_s, bars, pointers, strides, place, T, S, H, scale, STAGES, CAUSAL, SAVE, 0)),
        (consumer, (q_s, k_s, v_s, bars, pointers, strides, place, T, S, H, scale, STAGES, CAUSAL, SAVE, 1)),
        (producer, ((q1, q2, k1, k2, v), q_s, k_s, v_s, bars, place, kv_head, noise_head, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
