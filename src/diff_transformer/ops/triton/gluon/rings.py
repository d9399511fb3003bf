"""What both gradient kernels for Hopper are made of: rings of tiles, the place of a program, sums and stores of rows.

A ring is STAGES slots of shared memory and two barriers a slot, as in steps.py: ``full`` counts those who fill it,
``empty`` those who read it. Use u of a slot completes phase u of both; who fills waits for phase u - 1 of ``empty``,
who reads for phase u of ``full``, so that neither can get two phases ahead of the other. A ring of one slot hands tiles
from one warpgroup to the other.

Two proxies. Ordinary stores to shared memory that a wgmma will read are followed by ``fence_async_shared`` in the
threads that stored, then by the arrival; the compiler puts a barrier of the warpgroup before each arrival, so that it
speaks for all four warps (metadata.py checks that it did).
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# Any: inside a kernel, names stand for values on the GPU, of which a type checker knows nothing.
gl: Any = language
jit: Any = gluon.jit
LN_2: Any = language.constexpr(0.6931471805599453)


@jit
def ring(STAGES: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """full and empty [STAGES], fresh."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=FILLERS)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


@jit
def wait_empty(empty, c, STAGES: gl.constexpr):
    """Who fills: wait until the slot of tile c is free."""
    mbarrier.wait(empty.index(c % STAGES), ((c // STAGES) & 1) ^ 1)


@jit
def fill(full, c, STAGES: gl.constexpr):
    """Who fills by ordinary stores: tile c is there."""
    mbarrier.arrive(full.index(c % STAGES), count=1)


@jit
def late(c):
    """0, which the compiler does not know: an index with it is computed where it is used.

    Otherwise the addresses of tiles that stay where they are take registers throughout the loop, and some are spilled.
    """
    return c >> 30


@jit
def store_rows(to, x, first, limit, stride, WIDTH: gl.constexpr, L: gl.constexpr):
    """Store x, in layout L, to rows first .. limit - 1 of WIDTH columns, ``stride`` elements apart."""
    rows = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    offsets = gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(rows < limit, 1)
    if x.shape[1] > WIDTH:
        inside = inside & gl.expand_dims(columns < WIDTH, 0)
    gl.store(to + offsets, x, mask=inside)


@jit
def add_rows(to, x, first, limit, COLUMN: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """Add x, in layout L, to fp32 rows of WIDTH columns from column COLUMN on; ``to`` points to row ``first``.

    What would be in rows from ``limit`` on, or beyond a row's end, is left out.
    """
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, L))
    columns = COLUMN + gl.arange(0, x.shape[1], gl.SliceLayout(0, L))
    offsets = gl.expand_dims(rows * WIDTH, 1) + gl.expand_dims(columns, 0)
    if COLUMN + x.shape[1] > WIDTH:
        inside = gl.expand_dims(first + rows < limit, 1) & gl.expand_dims(columns < WIDTH, 0)
        gl.atomic_add(to + offsets, x, mask=inside, sem="relaxed")
    else:
        if first + x.shape[0] <= limit:  # a mask makes a branch of each addition
            gl.atomic_add(to + offsets, x, sem="relaxed")
        else:
            gl.atomic_add(to + offsets, x, mask=gl.expand_dims(first + rows < limit, 1), sem="relaxed")
