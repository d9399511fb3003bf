"""Cached decoding between a layer's projections in one call of the CPU kernel.

The attention of one token takes microseconds, less than the PyTorch calls for lambda, head norm and gate that this
replaces.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from diff_transformer.ops.arguments import active_transform, passes_fast_check, traced
from diff_transformer.ops.cpu import in_memory
from diff_transformer.ops.cpu.kernel import MAX_DECODE_ROWS, MAX_WIDTH, check, matrix, threads_of
from diff_transformer.ops.cpu.library import LAMBDA_VECTORS, HeadOutput, Matrix, Problem, available, library


def can_decode(q: Tensor) -> bool:
    """True for a few queries [B, heads, T, D] on a CPU, if nothing records, transforms or casts what is called here."""
    if traced() or active_transform() is not None or _functions_replaced() or q.device.type != "cpu":
        return False
    if torch.is_autocast_enabled("cpu") and q.dtype != torch.get_autocast_dtype("cpu"):
        return False
    return q.shape[2] <= MAX_DECODE_ROWS and available()


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
    """``gain * gate * RMSNorm((first A1 - lambda A2) V)``, for queries that ``can_decode``.

    None where the modules have to run: for shapes and dtypes that the kernel does not take, and for weights that are
    not plain tensors in memory.

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
    if not passes_fast_check(q1, q2, k1, k2, v):
        return None
    (B, H, T, D), (G, S), Dv = q1.shape, k1.shape[1:3], v.shape[3]
    if H // G * T > MAX_DECODE_ROWS or max(D, Dv) > MAX_WIDTH or q1.dtype not in (torch.float32, torch.bfloat16):
        return None
    per_row = [x for x in (lam, first, gate) if isinstance(x, Tensor)]
    weights = lambda_vectors if norm_weight is None else (norm_weight, *lambda_vectors)
    if not (_readable((q1, q2, k1, k2, v, *per_row)) and _readable(weights)):
        return None
    if any(x.stride() != (1,) for x in weights) or any(x.dtype != torch.float32 for x in lambda_vectors):
        return None
    if len({x.shape for x in lambda_vectors}) > 1:
        return None
    if norm_weight is not None and (norm_weight.shape != (Dv,) or norm_weight.dtype not in _WEIGHTS):
        return None
    out = v.new_empty(B, T, H, Dv)
    kept: list[Tensor] = []
    keys, shape = matrix(k1, kept), (B, H, T, 1)
    lam_is_number = not isinstance(lam, Tensor)
    problem = Problem(
        q1=matrix(q1, kept), k1=keys, v=matrix(v, kept), out=Matrix(out.data_ptr(), T * H * Dv, Dv, H * Dv),
        q2=matrix(q2, kept), k2=keys if k2 is k1 else matrix(k2, kept),
        B=B, H=H, Hn=q2.shape[1], G=G, T=T, S=S, D=D, Dv=Dv, causal=is_causal, window=window or 0,
        threads=threads_of(B * H * T * S * (D + Dv)), rows=T, parts=1, bf16=q1.dtype == torch.bfloat16, scale=D**-0.5,
    )  # fmt: skip
    if not lam_is_number:
        problem.lam = matrix(lam.expand(shape), kept)
    if first is not None:
        problem.first = matrix(first.expand(shape), kept)
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
        output.gate = matrix(gate.expand(shape), kept)
    native = library()
    assert native is not None  # ``available``
    check(native.diff_attention_decode(problem, output))
    return out


_WEIGHTS = (torch.float32, torch.bfloat16)


def _readable(tensors: Sequence[Tensor]) -> bool:
    """True if the values lie at the tensors' addresses and need no gradient."""
    differentiable = torch.is_grad_enabled()
    for x in tensors:  # noqa: SIM110 (a generator takes twice as long)
        if not in_memory(x) or (differentiable and x.requires_grad):
            return False
    return True


def _functions_replaced() -> bool:
    """True if a mode of torch.overrides may change what functions compute; a default device changes none here."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
