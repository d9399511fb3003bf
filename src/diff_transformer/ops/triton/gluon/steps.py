"""What both forward kernels for Hopper are made of: the ring of tiles in shared memory, its barriers, the softmax.

The gradient kernels (rings.py) take what is not the softmax from here too.

A program makes 2 ROWS rows of the output of one head with three groups of warps. One warp loads: it copies tiles of BN
keys and values into a ring of STAGES slots by TMA. Two warpgroups compute (the "halves"): each owns ROWS = 64 query
rows, multiplies with wgmma, and does one tile's softmax while the tensor cores work on the product of an earlier one.

Barriers. A wait names the parity of the phase that must be complete; on a fresh barrier a wait for parity 1 returns at
once. c counts tiles over the life of the program: tile c lives in slot c % STAGES, as that slot's use u = c // STAGES.

* ``q_full``: one arrival, the loader's, with the bytes of all query tiles. Used once: both halves wait for parity 0.
* ``full[slot]``: one arrival a use, the loader's, with the bytes of the slot; use u completes phase u. A half waits for
  parity u & 1 before it reads.
* ``empty[slot]``: two arrivals a use, one of each half, made when the half's last read of that use is complete (it has
  waited for its wgmma); use u completes phase u. Before it fills use u the loader waits for phase u - 1, of parity
  (u & 1) ^ 1, which for u = 0 is the state of a fresh barrier: the first STAGES tiles are loaded at once.

A parity is ambiguous only if a barrier can get two phases away from one who waits for it, and none can: ``full`` cannot
complete phase u + 1 before both halves arrived at ``empty`` for use u, which each does after its wait for phase u of
``full``; and ``empty`` cannot complete phase u before the loader filled use u, which it does after its wait for phase
u - 1 of ``empty``. For the same reason both halves visit every tile: one whose rows end before the last tile waits for
``full`` and arrives at ``empty`` for the rest too, in that order (``skip``). Without the wait it could arrive twice in
one phase, in place of the other half. Nobody waits for ``empty`` after the last use, so the program may end there.

No fence is needed: queries, keys and values are written by TMA and read by wgmma only, both of the asynchronous proxy,
with a barrier in between; results leave by ordinary stores of registers.

Shapes: B batch, H heads of q1, T queries, S keys, D query width, DV value width. Maxima and log-sum-exps are in base 2
and include the scale: log2(sum(exp2(scores * scale))), where scale has log2(e) in it.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

# Any: inside a kernel, names stand for values on the GPU, of which a type checker knows nothing.
gl: Any = language
jit: Any = gluon.jit
# Arguments that should not make a new binary for each value that is 1 or a multiple of 16.
NOT_SPECIALIZED = ["stride_lam_b", "stride_lam_h", "stride_lam_t", "T", "S", "H", "signal_per_noise", "signal_per_kv"]


@jit
def barriers(STAGES: gl.constexpr):
    """q_full, full [STAGES] and empty [STAGES], fresh."""
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return q_full, full, empty


@jit
def place_of(program, T, H, ROWS: gl.constexpr):
    """Batch entry, head and first row of a program: the tiles of a head side by side, the last (longest) first."""
    per_head = (T + 2 * ROWS - 1) // (2 * ROWS)
    head = program // per_head
    return head // H, head % H, (per_head - 1 - program % per_head) * (2 * ROWS)


@jit
def tile(ring, slot):
    """A slot of a ring [slots, 1, 1, rows, width] as [rows, width]."""
    return ring.index(slot).reshape([ring.shape[3], ring.shape[4]])


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
def wait_full(full, c, STAGES: gl.constexpr):
    """A half: wait until tile c is there."""
    mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)


@jit
def release(empty, c, STAGES: gl.constexpr):
    """A half: it will not read tile c again."""
    mbarrier.arrive(empty.index(c % STAGES), count=1)


@jit
def skip(full, empty, first, end, STAGES: gl.constexpr):
    """A half: let go of tiles first .. end - 1 unread."""
    for c in range(first, end):
        wait_full(full, c, STAGES)
        release(empty, c, STAGES)


@jit
def claim(full, empty, c, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """The loader: wait until the slot of tile c is free and announce the bytes that will fill it."""
    slot = c % STAGES
    mbarrier.wait(empty.index(slot), ((c // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)


@jit
def load_queries(q1, q2, q_s, q_full, b, h, noise_head, row0, PARTS: gl.constexpr):
    """The loader: the query tiles of both maps and both halves.

    They go to q_s [(2 * map + half) * PARTS + part, 1, 1, ROWS, D / PARTS].
    """
    ROWS: gl.constexpr = q_s.shape[3]
    WIDTH: gl.constexpr = q_s.shape[4]
    mbarrier.expect(q_full, 4 * PARTS * ROWS * WIDTH * 2)
    for half in gl.static_range(2):
        row = row0 + half * ROWS
        for part in gl.static_range(PARTS):
            place = half * PARTS + part
            tma.async_copy_global_to_shared(q1, [b, h, row, part * WIDTH], q_full, q_s.index(place))
            tma.async_copy_global_to_shared(q2, [b, noise_head, row, part * WIDTH], q_full,
                                            q_s.index(2 * PARTS + place))  # fmt: skip


@jit
def tiles_for(first_row, ROWS: gl.constexpr, T, S, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys rows first_row .. first_row + ROWS - 1 need, at least one (lower right alignment)."""
    seen = S
    if CAUSAL:
        seen = gl.minimum(first_row + ROWS, T) + (S - T)
        seen = gl.where(first_row < T, gl.maximum(seen, 1), 1)
    return (seen + BN - 1) // BN


@jit
def whole_tiles_for(first_row, T, S, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles every row from first_row on sees in full, so that they need no mask."""
    seen = S
    if CAUSAL:
        seen = gl.maximum(gl.minimum(first_row + 1 + S - T, S), 0)
    return seen // BN


@jit
def last_seen_by(rows, T, S, CAUSAL: gl.constexpr):
    """The last key that each row may see, negative for a row that sees nothing; one number for all if not CAUSAL."""
    if CAUSAL:
        return gl.minimum(rows + (S - T), S - 1)
    else:
        return S - 1


@jit
def softmax_step(s, m, l, scale, first_key, last_seen,
                 SL: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """One step of the online softmax over scores s [ROWS, BN] of the keys from first_key on.

    m [ROWS] is the maximum of s * scale so far, -inf as long as a row has seen nothing, and l the sum of weights
    relative to it. Returns the weights p, the factor by which earlier sums shrink, and the new m and l.
    """
    if MASK:
        keys = first_key + gl.arange(0, BN, gl.SliceLayout(0, SL))
        if CAUSAL:
            seen = gl.expand_dims(keys, 0) <= gl.expand_dims(last_seen, 1)
        else:
            seen = gl.expand_dims(keys <= last_seen, 0)
        s = gl.where(seen, s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 1) * scale)
    shift = top
    if MASK:
        shift = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(s * scale - gl.expand_dims(shift, 1))
    shrink = gl.exp2(m - shift)
    return p, shrink, top, l * shrink + gl.sum(p, 1)


@jit
def finish(acc, m, l, lse, rows, T, OL: gl.constexpr, SAVE: gl.constexpr):
    """acc / l, 0 for rows that saw nothing; stores the log-sum-exp (+inf for those) to lse + rows if SAVE."""
    m = gl.convert_layout(m, gl.SliceLayout(1, OL))
    l = gl.convert_layout(l, gl.SliceLayout(1, OL))
    seen = l > 0.0
    l = gl.where(seen, l, 1.0)
    if SAVE:
        gl.store(lse + rows, gl.where(seen, m + gl.log2(l), float("inf")), mask=rows < T)
    return acc * gl.expand_dims(gl.where(seen, 1.0 / l, 0.0), 1)


@jit
def output_offsets(b, h, H, T, rows, DV: gl.constexpr, COLUMN: gl.constexpr, WIDTH: gl.constexpr, OL: gl.constexpr):
    """Offsets of WIDTH columns from COLUMN on, in rows [ROWS] of head h, in memory [B, T, H, DV]; [ROWS, WIDTH]."""
    columns = COLUMN + gl.arange(0, WIDTH, gl.SliceLayout(0, OL))
    starts = ((b.to(gl.int64) * T + rows) * H + h) * DV
    return gl.expand_dims(starts, 1) + gl.expand_dims(columns, 0)


@jit
def load_lam(lam, lam_strides, b, h, rows, T):
    """lam of each row [ROWS], fp32."""
    stride_b, stride_h, stride_t = lam_strides
    start = lam + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    return gl.load(start + rows.to(gl.int64) * stride_t, mask=rows < T, other=0.0)
