"""Which cores of the model can decode on the CPU in one native call, and what that call needs to know of them."""

from typing import TYPE_CHECKING

import torch

from diff_transformer.model.lambdas import FixedLambda, LearnedLambda
from diff_transformer.ops.blockwise.layer import Head

if TYPE_CHECKING:
    from diff_transformer.model.cores import DiffCore

_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def decoding_head(core: "DiffCore") -> Head | None:
    """The weights of a core whose whole computation ``ops.blockwise.layer.decode`` does; None for any other core, one
    whose parts somebody watches or has replaced, another backend, or while gradients of its weights are wanted."""
    from diff_transformer.model.cores import DiffCore

    lam, norm = core.lam, core.head_norm
    if type(core) is not DiffCore or core.backend not in ("auto", "blockwise") or "attend" in core.__dict__:
        return None
    if type(lam) is LearnedLambda:
        vectors = tuple(lam._parameters.get(name) for name in _VECTORS)
        if any(type(x) is not torch.nn.Parameter or x.dtype != torch.float32 for x in vectors):
            return None
    elif type(lam) is FixedLambda:
        vectors = ()
    else:
        return None
    weight = None if norm is None else norm._parameters.get("weight")
    if weight is not None and weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*vectors, weight)):
        return None
    if any(part is not None and (part._forward_hooks or part._forward_pre_hooks) for part in (lam, norm)):
        return None
    return Head(vectors, lam.initial, weight, norm is not None, norm.eps if norm else 0.0, 1.0 - lam.initial)  # ty: ignore[invalid-argument-type]
