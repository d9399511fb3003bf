"""Launch the gradient kernels: TMA descriptors, memory for the results, and the sizes of tiles and rings."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.hopper.bwd_dkdv import bwd_dkdv
from diff_transformer.ops.hopper.bwd_dq import bwd_dq
from diff_transformer.ops.hopper.forward import OPTIONS, descriptor
from diff_transformer.ops.hopper.support import read_by_tma
from diff_transformer.ops.triton.deltas import plan_statistics
from diff_transformer.ops.triton.launching import Launch, transposed_like

TILE = 64  # queries, and keys, of a tile: the height of a wgmma tile
# Ring slots. They use at most 225 of the chip's 227 KiB of shared memory.
STAGES = 2  # for queries and dO in bwd_dkdv
KEY_STAGES, VALUE_STAGES = 2, 1  # in bwd_dq


def plan_backward(call: Call, dout: Tensor, saved: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Launch]]:
    """Gradients (dq1, dq2, dk1, dk2, dv, dlam), not yet computed nor ``summed``, and what computes them.

    They repeat bit for bit.

    Args:
        call: as in ``forward.plan_forward``.
        dout: [B, H, T, 2 D], the gradient of the output, in the dtype of v; any strides.
        saved: out1, out2, lse1 and lse2, results of the forward with need_gradient.

    Returns:
        dq1 [B, H, T, D], dq2 [B, Hn, T, D], dk1, dk2 [B, G, S, D] and dv [B, G, S, 2 D] in their dtypes, in memory [B,
        length, heads, width]; dlam [B, H, T, 1], fp32. Without k2, dk1 is the sum over both maps and dk2 is empty.
    """
    q1, q2, k1, k2, v, lam = call.q1, call.q2, call.k1, call.k2, call.v, call.lam
    out1, out2, lse1, lse2 = saved
    if not read_by_tma(dout):  # strides of 0, as the gradient of a sum has, or a start between 16 bytes
        dout = dout.clone(memory_format=torch.contiguous_format)
    B, H, T, D = q1.shape
    G, S = v.shape[1:3]
    (delta1, lam_delta2, dlam), of_statistics = plan_statistics(dout, out1, out2, lam)
    dk1, dv = transposed_like(k1), transposed_like(v)
    dk2 = k1.new_empty(0) if k2 is None else transposed_like(k1)
    shared = H // q2.shape[1]  # signal heads of a noise head; each writes its share of dq2, in fp32
    dq1 = transposed_like(q1)
    dq2 = q1.new_empty(B, T, H, D, dtype=q1.dtype if shared == 1 else torch.float32).transpose(1, 2)
    first_keys = descriptor(k1, TILE)
    stride_lam_b, stride_lam_h, stride_lam_t = lam.stride()[:3]
    arguments = {
        "q1": descriptor(q1, TILE), "q2": descriptor(q2, TILE), "k1": first_keys,
        "k2": first_keys if k2 is None else descriptor(k2, TILE), "v": descriptor(v, TILE),
        "do": descriptor(dout, TILE), "lse1": lse1, "lse2": lse2, "delta1": delta1, "lam_delta2": lam_delta2,
        "lam": lam, "stride_lam_b": stride_lam_b, "stride_lam_h": stride_lam_h, "stride_lam_t": stride_lam_t, "T": T,
        "S": S, "factor": call.scale * math.log2(math.e), "BN": TILE, "D": D, "DV": 2 * D, "CAUSAL": call.is_causal,
        "SIGNAL_PER_NOISE": shared, **OPTIONS,
    }  # fmt: skip
    of_keys = arguments | {
        "dk1": dk1, "dk2": dk2, "dv": dv, "G": G, "members": H // G, "BM": TILE, "STAGES": STAGES,
        "ONE_KEY": k2 is None,
    }  # fmt: skip
    of_queries = arguments | {
        "dq1": dq1, "dq2": dq2, "H": H, "signal_per_kv": H // G, "ROWS": TILE, "KEY_STAGES": KEY_STAGES,
        "VALUE_STAGES": VALUE_STAGES,
    }  # fmt: skip
    launches = [
        of_statistics,
        Launch(bwd_dkdv, (math.ceil(S / TILE), G, B), of_keys),
        Launch(bwd_dq, (math.ceil(T / (2 * TILE)), H, B), of_queries),
    ]
    return (dq1, dq2, dk1, dk2, dv, dlam[..., None]), launches


def summed(call: Call, results: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results, with dq2 summed over the signal heads that share a noise head, in the dtype of q2."""
    dq1, dq2, dk1, dk2, dv, dlam = results
    q2 = call.q2
    if dq2.shape[1] != q2.shape[1]:
        dq2 = transposed_like(q2).copy_(dq2.unflatten(1, (q2.shape[1], -1)).sum(2))
    return dq1, dq2, dk1, dk2, dv, dlam
