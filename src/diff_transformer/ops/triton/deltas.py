"""Sums of each row that both backward kernels need: delta1, lam delta2, and lambda's gradient -delta2.

delta_i is rowsum(dO * O_i); the formulas are in backward.py. Shapes: B batch, H signal heads, T queries, Dv value
width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diff_transformer.ops.triton.configurations import chunks
from diff_transformer.ops.triton.launching import launch, strides
from diff_transformer.ops.triton.tiles import load_tile

ROWS = 32  # of a program


@triton.jit(do_not_specialize=["T", "tiles"])
def delta_kernel(
    dout, out, out2, lam, delta1, lam_delta2, dlam,
    dout_b, dout_h, dout_t, out_b, out_h, out_t, lam_b, lam_h, lam_t, T, tiles,
    H: tl.constexpr, DV: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta1, lam delta2 and dlam of BLOCK_M rows of one head, each [B, H, T]."""
    program = tl.program_id(0)
    first = program % tiles * BLOCK_M
    head_in_all = (program // tiles).to(tl.int64)
    batch = head_in_all // H
    head = head_in_all % H
    rows = tl.arange(0, BLOCK_M)
    here = first + rows < T
    row = tl.cast(first, tl.int64)
    dout += batch * dout_b + head * dout_h + row * dout_t
    out += batch * out_b + head * out_h + row * out_t
    out2 += batch * out_b + head * out_h + row * out_t
    lam += batch * lam_b + head * lam_h + row * lam_t
    da, db = load_tile(dout, rows, dout_t, T - first, VA, VB, DV, True)
    oa, ob = load_tile(out, rows, out_t, T - first, VA, VB, DV, True)
    na, nb = load_tile(out2, rows, out_t, T - first, VA, VB, DV, True)
    delta = tl.sum(da.to(tl.float32) * oa.to(tl.float32), 1)
    delta2 = tl.sum(da.to(tl.float32) * na.to(tl.float32), 1)
    if VB > 0:
        delta += tl.sum(db.to(tl.float32) * ob.to(tl.float32), 1)
        delta2 += tl.sum(db.to(tl.float32) * nb.to(tl.float32), 1)
    weight = tl.load(lam + rows.to(tl.int64) * lam_t, mask=here, other=0.0)
    to = head_in_all * T + row + rows
    tl.store(delta1 + to, delta + weight * delta2, mask=here)
    tl.store(lam_delta2 + to, weight * delta2, mask=here)
    tl.store(dlam + to, -delta2, mask=here)


def row_statistics(dout: Tensor, out: Tensor, out2: Tensor, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """delta1, lam delta2 and dlam, each [B, H, T] in fp32; dout, out, out2 [B, H, T, Dv]; out and out2 have equal
    strides."""
    B, H, T, Dv = dout.shape
    VA, VB = chunks(Dv)
    results = [dout.new_empty((B, H, T), dtype=torch.float32) for _ in range(3)]
    tiles = triton.cdiv(T, ROWS)
    arguments = [dout, out, out2, lam, *results, *strides(dout, out, lam), T, tiles]
    launch(delta_kernel, (tiles * B * H,), arguments, {"H": H, "DV": Dv, "VA": VA, "VB": VB, "BLOCK_M": ROWS})
    delta1, lam_delta2, dlam = results
    return delta1, lam_delta2, dlam
