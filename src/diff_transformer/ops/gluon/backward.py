"""Launch the gradient kernels: TMA descriptors, memory for the results, and the sizes of tiles and rings."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.gluon.bwd_dkdv import bwd_dkdv
from diff_transformer.ops.gluon.bwd_dq import bwd_dq
from diff_transformer.ops.gluon.forward import OPTIONS, descriptor
from diff_transformer.ops.gluon.support import unsupported_backward_shapes, unsupported_by_tma
from diff_transformer.ops.triton.call import Call
from diff_transformer.ops.triton.deltas import row_statistics
from diff_transformer.ops.triton.launching import launch, transposed_like

TILE = 64  # queries, and keys, of a tile: the height of a wgmma tile
# Ring slots. They use at most 225 of the chip's 227 KiB of shared memory.
STAGES = 2  # for queries and dO in bwd_dkdv
KEY_STAGES, VALUE_STAGES = 2, 1  # in bwd_dq


def attend_backward(
    call: Call, dout: Tensor, saved: Sequence[Tensor]
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], list[Any]]:
    """Gradients on a Hopper GPU, which repeat bit for bit: ((dq1, dq2, dk1, dk2, dv, dlam), the compiled kernels).

    Args:
        call: as in ``attend_forward``.
        dout: [B, H, T, 2 D], the gradient of the output, in the dtype of v; any strides.
        saved: out, out2, lse1 and lse2, the results of the forward with need_gradient.

    Returns:
        dq1 [B, H, T, D], dq2 [B, Hn, T, D], dk1, dk2 [B, G, S, D] and dv [B, G, S, 2 D] in their dtypes, in memory [B,
        length, heads, width]; dlam [B, H, T, 1], fp32. Without k2, dk1 is the sum over both maps and dk2 is empty.

    Raises:
        ValueError: tensors that the kernels do not take.
    """
    reason = unsupported_backward_shapes(call)
    if reason is not None:
        raise ValueError(reason)
    q1, q2, k1, k2, v, lam, scale = call.q1, call.q2, call.k1, call.k2, call.v, call.lam, call.scale
    out, out2, lse1, lse2 = saved
    if unsupported_by_tma(dout) is not None:  # for example the gradient of a sum, whose strides are 0
        dout = dout.contiguous()
    B, H, T, D = q1.shape
    G, S = v.shape[1:3]
    delta1, lam_delta2, dlam = row_statistics(dout, out, out2, lam)
    dk1, dv = transposed_like(k1), transposed_like(v)
    dk2 = k1.new_empty(0) if k2 is None else transposed_like(k1)
    shared = H // q2.shape[1]  # signal heads of a noise head; each writes its share of dq2, in fp32
    dq1 = transposed_like(q1)
    dq2 = q1.new_empty(B, T, H, D, dtype=q1.dtype if shared == 1 else torch.float32).transpose(1, 2)
    narrow = [None if x is None else descriptor(x, TILE) for x in (q1, q2, k1, k2)]
    wide = [descriptor(x, TILE) for x in (v, dout)]
    tiles = [*narrow[:3], narrow[2] if k2 is None else narrow[3], *wide]
    statistics = [lse1, lse2, delta1, lam_delta2, lam]
    factor = scale * math.log2(math.e)
    sizes = {"BN": TILE, "D": D, "DV": 2 * D, "CAUSAL": call.is_causal, "SIGNAL_PER_NOISE": shared}
    arguments = [*tiles, *statistics]
    places = [*lam.stride()[:3], T, S]
    grid = (math.ceil(S / TILE), G, B)
    constants = {"BM": TILE, "STAGES": STAGES, "ONE_KEY": k2 is None}
    given = [*arguments, dk1, dk2, dv, *places, G, H // G, factor]
    compiled = [launch(bwd_dkdv, grid, given, sizes | constants | OPTIONS)]
    grid = (math.ceil(T / (2 * TILE)), H, B)
    constants = {"ROWS": TILE, "KEY_STAGES": KEY_STAGES, "VALUE_STAGES": VALUE_STAGES}
    given = [*arguments, dq1, dq2, *places, H, H // G, factor]
    compiled.append(launch(bwd_dq, grid, given, sizes | constants | OPTIONS))
    if shared > 1:
        dq2 = dq2.unflatten(1, (-1, shared)).sum(2)
    if dq2.dtype != q2.dtype:
        dq2 = transposed_like(q2).copy_(dq2)
    return (dq1, dq2, dk1, dk2, dv, dlam[..., None]), compiled
