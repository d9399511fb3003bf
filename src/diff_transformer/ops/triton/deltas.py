"""Sums of each row that both backward kernels need: delta1, lam delta2, and lambda's gradient -delta2.

delta_i is rowsum(dO * O_i) of each map's output O_i; the formulas are in backward.py. Shapes: B batch, H signal heads,
T queries, Dv value width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diff_transformer.ops.triton.launching import Launch, strides
from diff_transformer.ops.triton.tile_sizes import chunks
from diff_transformer.ops.triton.tiles import load_tile

ROWS = 32  # of a program


@triton.jit(do_not_specialize=["T", "tiles"])
def delta_kernel(
    inputs, results, dout_strides, out_strides, lam_strides, T, tiles,
    H: tl.constexpr, DV: tl.constexpr, VA: tl.constexpr, VB: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta1, lam delta2 and dlam of BLOCK_M rows of one head, each [B, H, T], from dO, O1, O2 and lambda."""
    dout, out1, out2, lam_at = inputs
    delta1, lam_delta2, dlam = results
    program = tl.program_id(0)
    first = program % tiles * BLOCK_M
    head_in_all = (program // tiles).to(tl.int64)
    batch = head_in_all // H
    head = head_in_all % H
    rows = tl.arange(0, BLOCK_M)
    here = first + rows < T
    row = tl.cast(first, tl.int64)
    dout += batch * dout_strides[0] + head * dout_strides[1] + row * dout_strides[2]
    out1 += batch * out_strides[0] + head * out_strides[1] + row * out_strides[2]
    out2 += batch * out_strides[0] + head * out_strides[1] + row * out_strides[2]
    lam_at += batch * lam_strides[0] + head * lam_strides[1] + row * lam_strides[2]
    da, db = load_tile(dout, rows, dout_strides[2], T - first, VA, VB, DV, True)  # [BLOCK_M, VA], [BLOCK_M, VB]
    oa, ob = load_tile(out1, rows, out_strides[2], T - first, VA, VB, DV, True)  # [BLOCK_M, VA or VB]
    na, nb = load_tile(out2, rows, out_strides[2], T - first, VA, VB, DV, True)  # [BLOCK_M, VA or VB]
    first_delta = tl.sum(da.to(tl.float32) * oa.to(tl.float32), 1)  # [BLOCK_M]
    delta2 = tl.sum(da.to(tl.float32) * na.to(tl.float32), 1)
    if VB > 0:
        first_delta += tl.sum(db.to(tl.float32) * ob.to(tl.float32), 1)
        delta2 += tl.sum(db.to(tl.float32) * nb.to(tl.float32), 1)
    lam = tl.load(lam_at + rows.to(tl.int64) * lam_strides[2], mask=here, other=0.0)  # [BLOCK_M]
    to = head_in_all * T + row + rows
    tl.store(delta1 + to, first_delta, mask=here)
    tl.store(lam_delta2 + to, lam * delta2, mask=here)
    tl.store(dlam + to, -delta2, mask=here)


def plan_statistics(dout: Tensor, out1: Tensor, out2: Tensor, lam: Tensor) -> tuple[tuple[Tensor, ...], Launch]:
    """(delta1, lam delta2 and dlam, each [B, H, T] in fp32) and what computes them; dout, out1, out2 [B, H, T, Dv];
    out1 and out2 have equal strides."""
    B, H, T, Dv = dout.shape
    VA, VB = chunks(Dv)
    results = tuple(dout.new_empty((B, H, T), dtype=torch.float32) for _ in range(3))
    tiles = triton.cdiv(T, ROWS)
    dout_strides, out_strides, lam_strides = strides(dout, out1, lam)
    arguments = {
        "inputs": (dout, out1, out2, lam), "results": results, "dout_strides": dout_strides, "out_strides": out_strides,
        "lam_strides": lam_strides, "T": T, "tiles": tiles, "H": H, "DV": Dv, "VA": VA, "VB": VB, "BLOCK_M": ROWS,
    }  # fmt: skip
    return results, Launch(delta_kernel, (tiles * B * H,), arguments)
