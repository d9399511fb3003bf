"""Cached decoding between a layer's projections in one call of the CPU kernel.

The attention of one token takes microseconds, less than the PyTorch calls for lambda, head norm and gate that this
replaces.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diff_transformer.ops.arguments import active_transform, traced
from diff_transformer.ops.cpu import in_memory
from diff_transformer.ops.cpu.kernel import MAX_DECODE_ROWS, MAX_WIDTH, check, matrix, threads_of
from diff_transformer.ops.cpu.library import LAMBDA_VECTORS, HeadOutput, Matrix, Problem, available, library


def can_decode(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True for a few queries [B, heads, T, D] over plain tensors in the CPU's memory, if nothing records, transforms
    or casts what is called here."""
    if traced():  # before the length, on which an exported program must not depend
        return False
    if q.shape[2] > MAX_DECODE_ROWS or not q.is_cpu or q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return False
    if active_transform() is not None or not available():
        return False
    if torch.is_autocast_enabled("cpu") and q.dtype != torch.get_autocast_dtype("cpu"):
        return False
    return _readable((q, k, v))


def decode_heads(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: float | Tensor = 0.0,
    lambda_vectors: Sequence[Tensor] = (),
    first: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    gain: float = 1.0,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor | None:
    """``gain * gate * RMSNorm((first A1 - lambda A2) V)``, for tensors that ``can_decode``.

    None where the modules have to run: for shapes that the kernel does not take, and for weights that are not plain
    tensors in memory.

    Args:
        q1: [B, H, T, D], fp32 or bf16, like all tensors but the weights; H / G * T at most 8.
        q2: [B, Hn, T, D].
        k1, k2: [B, G, S, D]; k2 may be k1.
        v: [B, G, S, Dv].
        lam: a number, or fp32 [B, H, T, 1].
        lambda_vectors: lambda_q1, lambda_k1, lambda_q2, lambda_k2, fp32 [n]: exp(q1 . k1) - exp(q2 . k2) is added to
            lam (arXiv 2410.05258, equation 2).
        first, gate: fp32 [B, H, T, 1].
        norm_weight: [Dv], fp32 or bf16.
        norm_eps: epsilon of the head norm; None without one.

    Returns:
        [B, T, H, Dv] in the dtype of v.
    """
    (B, H, T, D), Hn, (_, G, S, _), Dv = q1.shape, q2.shape[1], k1.shape, v.shape[3]
    if q2.shape != (B, Hn, T, D) or not k1.shape == k2.shape == (B, G, S, D) or v.shape != (B, G, S, Dv):
        return None
    if H % Hn or Hn % G or H // G * T > MAX_DECODE_ROWS or max(D, Dv) > MAX_WIDTH or not B * S:
        return None
    weights = lambda_vectors if norm_weight is None else (*lambda_vectors, norm_weight)
    numbers = [x for x in (lam, first, gate) if isinstance(x, Tensor)]
    if not _readable((*numbers, *weights)) or not all(x.is_contiguous() for x in weights):
        return None
    for x in lambda_vectors:
        if x.dtype != torch.float32 or x.numel() != lambda_vectors[0].numel():
            return None
    if norm_weight is not None and (norm_weight.shape != (Dv,) or norm_weight.dtype not in _DTYPES):
        return None
    out = v.new_empty(B, T, H, Dv)
    copies: list[Tensor] = []
    keys, shape = matrix(k1, copies), (B, H, T, 1)
    lam_is_number = not isinstance(lam, Tensor)
    problem = Problem(
        q1=matrix(q1, copies), k1=keys, v=matrix(v, copies), out=Matrix(out.data_ptr(), T * H * Dv, Dv, H * Dv),
        q2=matrix(q2, copies), k2=keys if k2 is k1 else matrix(k2, copies),
        B=B, H=H, Hn=Hn, G=G, T=T, S=S, D=D, Dv=Dv, causal=is_causal, window=window or 0,
        threads=threads_of(B * H * T * S * (D + Dv)), rows=T, parts=1, bf16=q1.dtype == torch.bfloat16, scale=D**-0.5,
    )  # fmt: skip
    if not lam_is_number:
        problem.lam = matrix(lam.expand(shape), copies)
    if first is not None:
        problem.first = matrix(first.expand(shape), copies)
    output = HeadOutput(gain=gain, lambda_init=lam if lam_is_number else 0.0)
    if lambda_vectors:
        for name, x in zip(LAMBDA_VECTORS, lambda_vectors, strict=True):
            setattr(output, name, x.data_ptr())
        output.lambda_size = lambda_vectors[0].shape[0]
    if norm_eps is not None:
        output.normed, output.eps = True, norm_eps
    if norm_weight is not None:
        output.norm_weight, output.norm_weight_bf16 = norm_weight.data_ptr(), norm_weight.dtype == torch.bfloat16
    if gate is not None:
        output.gate = matrix(gate.expand(shape), copies)
    native = library()
    assert native is not None  # ``available``
    check(native.diff_attention_decode(problem, output))
    return out


_DTYPES = (torch.float32, torch.bfloat16)


def _readable(tensors: Sequence[Tensor]) -> bool:
    """True if the values lie at the tensors' addresses and need no gradient."""
    return in_memory(tensors) and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
