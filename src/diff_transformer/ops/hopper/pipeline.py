"""Building blocks of the Hopper kernels: rings of tiles, their barriers, tile counts, the online softmax, stores.

Each program has three groups of warps. A producer warp copies tiles into shared memory by TMA. Two consumer warpgroups
multiply with wgmma. In the forward and in dQ each consumer owns ROWS = 64 query rows; in dK/dV the consumers split the
work of a tile by gradient (bwd_dkdv.py).

Rings. A ring has STAGES slots and two mbarriers a slot, ``full`` and ``empty``. c counts tiles over the life of the
program: tile c lives in slot c % STAGES, as use u = c // STAGES of that slot. A wait names the parity of the phase that
must be complete; on a fresh barrier a wait for parity 1 returns at once.

* ``full[slot]`` counts arrivals of whoever fills the slot. Use u completes phase u. A reader waits for parity u & 1.
* ``empty[slot]`` counts arrivals of all readers, each after its last read of the use has completed (it has waited for
  its wgmma). Use u completes phase u. Before use u, whoever fills waits for phase u - 1, parity (u & 1) ^ 1. For u = 0
  that is the state of a fresh barrier, so the first STAGES tiles are loaded at once.

A parity is ambiguous only if a barrier gets two phases ahead of someone who waits for it. That cannot happen: ``full``
completes phase u + 1 only after every reader has arrived at ``empty`` for use u, which each does after its wait for
phase u of ``full``; and ``empty`` completes phase u only after use u was filled, which comes after the wait for phase
u - 1 of ``empty``. For the same reason both consumers visit every tile. A consumer whose rows end before the last tile
waits for ``full`` and arrives at ``empty`` for the remaining tiles too, in that order (``skip``). Without the wait it
could arrive twice in one phase, in place of the other consumer. Nobody waits for ``empty`` after the last use, so the
program may end there.

``q_full`` is a single barrier: one arrival of the producer with the bytes of all query tiles, used once, parity 0.

Fences. TMA writes and wgmma reads both go through the asynchronous proxy, so a barrier between them is enough. Ordinary
stores to shared memory that a wgmma will read need ``fence_async_shared`` in the threads that stored, before the
arrival. The compiler puts a barrier of the warpgroup before each arrival, so that one thread's arrival stands for all
four warps (the compile checks hold this).

Shapes: B batch, H heads of q1, T queries, S keys, D query width, DV value width. Row maxima and log-sum-exps are in
base 2 and include the scale: log2(sum(exp2(scores * scale))), where ``scale`` contains log2(e).
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Any: inside a kernel, names stand for values on the GPU, of which a type checker knows nothing.
gl: Any = language
jit: Any = gluon.jit
LN_2: Any = language.constexpr(0.6931471805599453)
# Arguments of the forward kernel that must not make a new binary for each value that is 1 or a multiple of 16.
FWD_NOT_SPECIALIZED = [
    "stride_lam_b", "stride_lam_h", "stride_lam_t", "T", "S", "H", "signal_per_noise", "signal_per_kv",
]  # fmt: skip


@jit
def ring(STAGES: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """Initialise the barriers of a ring: full and empty, each [STAGES], for FILLERS and READERS arrivals a phase."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=FILLERS)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@jit
def forward_barriers(STAGES: gl.constexpr):
    """Initialise the forward's barriers: q_full, and a ring of STAGES slots with one filler and two readers."""
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    full, empty = ring(STAGES, 1, 2)
    return q_full, full, empty


@jit
def claim(full, empty, c, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """Producer: wait until the slot of tile c is free, and announce the bytes that TMA will write to it."""
    slot = c % STAGES
    mbarrier.wait(empty.index(slot), ((c // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), BYTES)


@jit
def wait_empty(empty, c, STAGES: gl.constexpr):
    """Wait until the slot of tile c is free, before ordinary stores to it."""
    mbarrier.wait(empty.index(c % STAGES), ((c // STAGES) & 1) ^ 1)


@jit
def signal_full(full, c, STAGES: gl.constexpr):
    """Signal that the ordinary stores of tile c are done."""
    mbarrier.arrive(full.index(c % STAGES), count=1)


@jit
def wait_full(full, c, STAGES: gl.constexpr):
    """Reader: wait until tile c is complete."""
    mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)


@jit
def release(empty, c, STAGES: gl.constexpr):
    """Reader: signal that it will not read tile c again."""
    mbarrier.arrive(empty.index(c % STAGES), count=1)


@jit
def skip(full, empty, first, end, STAGES: gl.constexpr):
    """Reader: release tiles first .. end - 1 without reading them."""
    for c in range(first, end):
        wait_full(full, c, STAGES)
        release(empty, c, STAGES)


@jit
def tile(buffer, slot):
    """One slot of ``buffer`` [slots, 1, 1, rows, width] as [rows, width]."""
    return buffer.index(slot).reshape([buffer.shape[3], buffer.shape[4]])


@jit
def own_rows(program, T, H, ROWS: gl.constexpr):
    """(batch entry, head, first row) of a forward program. The tiles of a head are adjacent, the longest rows first."""
    per_head = (T + 2 * ROWS - 1) // (2 * ROWS)
    head = program // per_head
    return head // H, head % H, (per_head - 1 - program % per_head) * (2 * ROWS)


@jit
def tiles_for(first_row, ROWS: gl.constexpr, T, S, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Number of key tiles that rows first_row .. first_row + ROWS - 1 need, at least one (lower right alignment)."""
    seen = S
    if CAUSAL:
        seen = gl.minimum(first_row + ROWS, T) + (S - T)
        seen = gl.where(first_row < T, gl.maximum(seen, 1), 1)
    return (seen + BN - 1) // BN


@jit
def unmasked_tiles_for(first_row, T, S, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Number of leading key tiles that every row from first_row on sees in full, so that they need no mask."""
    seen = S
    if CAUSAL:
        seen = gl.maximum(gl.minimum(first_row + 1 + S - T, S), 0)
    return seen // BN


@jit
def last_visible_key(rows, T, S, CAUSAL: gl.constexpr):
    """Last visible key of each row, [ROWS]; negative for a fully masked row. Without CAUSAL one number for all rows."""
    if CAUSAL:
        return gl.minimum(rows + (S - T), S - 1)
    else:
        return S - 1


@jit
def recompute_here(c):
    """0, in a form that the compiler cannot fold (c < 2^30); what it is for: ops/triton/tiles.py.

    Here it is added to the indices of tiles that do not move in a loop, and to places after one.
    """
    return c >> 30


@jit
def load_queries(q1, q2, q_s, q_full, b, h, noise_head, row0):
    """Producer: load the query tiles of both maps for both consumers to q_s [2 * map + consumer, 1, 1, ROWS, D]."""
    ROWS: gl.constexpr = q_s.shape[3]
    mbarrier.expect(q_full, 4 * ROWS * q_s.shape[4] * 2)
    for consumer in gl.static_range(2):
        row = row0 + consumer * ROWS
        tma.async_copy_global_to_shared(q1, [b, h, row, 0], q_full, q_s.index(consumer))
        tma.async_copy_global_to_shared(q2, [b, noise_head, row, 0], q_full, q_s.index(2 + consumer))


@jit
def softmax_step(s, m, l, scale, first_key, last_seen,
                 SL: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """One step of the online softmax over scores s [ROWS, BN] of the keys from first_key on.

    m [ROWS] is the running row maximum of s * scale, -inf for a row that has seen no key yet. l [ROWS] is the running
    row sum of exp2(s * scale - m). Returns the probabilities p [ROWS, BN], not yet divided by l, the factor that
    rescales earlier sums [ROWS], and the new m and l.
    """
    if MASK:
        keys = first_key + gl.arange(0, BN, gl.SliceLayout(0, SL))
        if CAUSAL:
            seen = gl.expand_dims(keys, 0) <= gl.expand_dims(last_seen, 1)
        else:
            seen = gl.expand_dims(keys <= last_seen, 0)
        s = gl.where(seen, s, -float("inf"))
    row_max = gl.maximum(m, gl.max(s, 1) * scale)
    shift = row_max
    if MASK:
        shift = gl.where(row_max == -float("inf"), 0.0, row_max)
    p = gl.exp2(s * scale - gl.expand_dims(shift, 1))  # [ROWS, BN]
    rescale = gl.exp2(m - shift)  # [ROWS]
    return p, rescale, row_max, l * rescale + gl.sum(p, 1)


@jit
def finalize(acc, m, l, lse, rows, T, OL: gl.constexpr, SAVE: gl.constexpr):
    """acc / l, 0 for fully masked rows. If SAVE, store the log-sum-exp (+inf for those rows) to lse + rows."""
    m = gl.convert_layout(m, gl.SliceLayout(1, OL))
    l = gl.convert_layout(l, gl.SliceLayout(1, OL))
    seen = l > 0.0
    l = gl.where(seen, l, 1.0)
    if SAVE:
        gl.store(lse + rows, gl.where(seen, m + gl.log2(l), float("inf")), mask=rows < T)
    return acc * gl.expand_dims(gl.where(seen, 1.0 / l, 0.0), 1)


@jit
def output_offsets(b, h, H, T, rows, DV: gl.constexpr, OL: gl.constexpr):
    """Offsets [ROWS, DV] of the rows [ROWS] of head h, in memory [B, T, H, DV]."""
    columns = gl.arange(0, DV, gl.SliceLayout(0, OL))
    starts = ((b.to(gl.int64) * T + rows) * H + h) * DV
    return gl.expand_dims(starts, 1) + gl.expand_dims(columns, 0)


@jit
def load_lam(lam, lam_strides, b, h, rows, T):
    """lam of each row, [ROWS], fp32."""
    stride_b, stride_h, stride_t = lam_strides
    start = lam + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    return gl.load(start + rows.to(gl.int64) * stride_t, mask=rows < T, other=0.0)  # [ROWS]


@jit
def store_rows(to, x, first, limit, stride, L: gl.constexpr):
    """Store x [rows, width] in layout L to rows first .. limit - 1, ``stride`` elements apart."""
    rows = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    offsets = gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(columns, 0)
    gl.store(to + offsets, x, mask=gl.expand_dims(rows < limit, 1))
