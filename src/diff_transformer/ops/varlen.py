"""The public operator for packed documents: rows of several documents, and no document sees another.

Shapes: total_q and total_k rows of all documents, H signal heads, Hn noise heads, G key/value heads, D and Dv widths.
"""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.errors import UserError
from diff_transformer.ops.arguments import autocast_off, described
from diff_transformer.ops.backends import BACKENDS, resolve
from diff_transformer.ops.call import Call, check, is_empty, replace, zeros


def diff_attention_varlen(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: float | Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    first: float | Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """``diff_attention`` within each of several packed documents.

    "triton" computes all documents at once. The other backends are called once for each document and read cu_seqlens
    on the host: there torch.compile breaks the graph, and raises with fullgraph=True.

    Args:
        q1: queries of the signal map, [total_q, H, D].
        q2: queries of the noise map, [total_q, Hn, D]; heads as in ``diff_attention``.
        k1, k2: keys, [total_k, G, D]; k2 may be k1.
        v: values, [total_k, G, Dv].
        lam: a float, or a tensor that is scalar, [H] or broadcastable to [total_q, H, 1]; computed with in fp32.
        cu_seqlens_q, cu_seqlens_k: int32 [documents + 1] on the device of q1: 0, then where each document ends.
            Document i has rows cu_seqlens[i] to cu_seqlens[i + 1] - 1, and may have none.
        first: weight of the first map, as lam; 1 if None.
        is_causal, window, scale, backend: as in ``diff_attention``; each document is aligned to its own lower right
            corner. On a GPU "auto" is "triton" where it can, on the CPU "blockwise".

    Returns:
        [total_q, H, Dv] in the dtype of v. Rows of a document without keys are 0.

    Raises:
        UserError: as ``diff_attention``; cu_seqlens of another shape or device.
        RuntimeError: from PyTorch, where cu_seqlens are read on the host and do not split the rows.
    """
    for name, x in {"q1": q1, "q2": q2, "k1": k1, "k2": k2, "v": v}.items():
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise UserError(f"{name} is {described(x)}; give a tensor of shape [rows, heads, width]")
    keys = _as_batch(k1)
    tensors = (_as_batch(q1), _as_batch(q2), keys, keys if k2 is k1 else _as_batch(k2), _as_batch(v))
    lam, first = _weight_as_batch(lam), _weight_as_batch(first)
    call = check(*tensors, lam, None, is_causal, window, scale, backend, first)
    ends = cu_seqlens_q, cu_seqlens_k
    fit = [isinstance(x, Tensor) and (x.dtype, x.dim(), x.device) == (torch.int32, 1, q1.device) for x in ends]
    if not all(fit) or len(cu_seqlens_q) < 2 or cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise UserError(
            f"cu_seqlens_q is {described(cu_seqlens_q)} and cu_seqlens_k {described(cu_seqlens_k)}; give both int32 "
            f"[documents + 1] on {q1.device}: 0, then the end of each document"
        )
    call = resolve(replace(call, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k))
    at_once = BACKENDS[call.backend].unsupported_reason(call) is None
    if is_empty(call):
        return zeros(call)[0].transpose(0, 1)
    with autocast_off(q1.device.type):
        out = BACKENDS[call.backend].attend(call) if at_once else _one_by_one(call)
    return out[0].transpose(0, 1)


def _as_batch(x: Tensor) -> Tensor:
    """[rows, heads, width] as [1, heads, rows, width]."""
    return x.transpose(0, 1)[None]


def _weight_as_batch(x: Any) -> Any:
    """The weight of a map in the layout of a batch, if it has dimensions of rows and heads."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    return _as_batch(x if x.dim() == 3 else x[None])


def _one_by_one(call: Call) -> Tensor:
    """[1, H, total_q, Dv] from one call of the backend for each document with queries and keys."""
    assert call.documents is not None
    lengths_q, lengths_k = (cu_seqlens.diff().tolist() for cu_seqlens in call.documents)
    lengths = {name: lengths_k if name in ("k1", "k2", "v") else lengths_q for name in Call._fields[:7]}
    parts: list[Any] = [
        [None] * len(each) if x is None else x.split(each, dim=2)
        for x, each in zip(call[:7], lengths.values(), strict=True)
    ]
    outs = []
    for tensors in zip(*parts, strict=True):
        alone = replace(call, **dict(zip(lengths, tensors, strict=True)), cu_seqlens_q=None, cu_seqlens_k=None)
        outs.append(zeros(alone) if is_empty(alone) else BACKENDS[call.backend].attend(alone))
    return torch.cat(outs, dim=2)
