"""Which cores of the model can decode on the CPU in one native call, and what that call needs to know of them."""

from typing import TYPE_CHECKING

import torch
from torch.nn import Parameter

from diff_transformer.model.lambdas import FixedLambda, LearnedLambda
from diff_transformer.ops.blockwise.layer import Head

if TYPE_CHECKING:
    from diff_transformer.model.cores import DiffCore


def decoding_head(core: "DiffCore") -> Head | None:
    """The weights of a ``DiffCore`` whose whole computation ``ops.blockwise.layer.decode`` does; None for one whose
    parts somebody watches or has replaced, another backend, or while gradients of its weights are wanted.

    It is asked for every token and layer, and takes microseconds: hence no loops over generators.
    """
    lam, norm = core._modules["lam"], core._modules.get("head_norm")
    if core.backend not in ("auto", "blockwise") or "attend" in core.__dict__:
        return None
    if type(lam) is LearnedLambda:
        of = lam._parameters
        vectors = (of.get("lambda_q1"), of.get("lambda_k1"), of.get("lambda_q2"), of.get("lambda_k2"))
        for x in vectors:
            if type(x) is not Parameter or x.dtype is not torch.float32:
                return None
    elif type(lam) is FixedLambda:
        vectors = ()
    else:
        return None
    if lam._forward_hooks or lam._forward_pre_hooks:
        return None
    weight, eps = None, 0.0
    if norm is not None:
        if norm._forward_hooks or norm._forward_pre_hooks:
            return None
        weight, eps = norm._parameters.get("weight"), norm.eps
        if weight is not None and weight.dtype not in (torch.float32, torch.bfloat16):
            return None
    if torch.is_grad_enabled():
        for x in (*vectors, weight):
            if x is not None and x.requires_grad:
                return None
    return Head(vectors, lam.initial, weight, norm is not None, eps, 1.0 - lam.initial)  # ty: ignore[invalid-argument-type]
