"""Cross-entropy from hidden states in chunks of tokens: the logits [tokens, vocabulary] are never whole.

The gradients are computed in the forward pass, chunk by chunk, while a chunk's logits are there; so nothing is
recomputed, and three products with the output matrix are made in all, as many as without chunks.

Legend: N tokens, D hidden size, V vocabulary (of this process where the output matrix is split over processes).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.checks import require_positive

IGNORED = -100


def weighted_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """``sum_i weights[i] * loss[i]`` with ``loss[i] = -log softmax(hidden[i] head^T)[targets[i]]``.

    Args:
        hidden: [N, D], in any floating dtype.
        head: output matrix [V, D].
        targets: int64 [N], the ids to predict in the whole vocabulary; -100 for none.
        weights: [N], the weight of each token in the sum.
        chunk: tokens whose logits are held at a time; all of them if None.
        group: processes that hold one part each of a vocabulary split over them: there ``head`` is this process's
            part, the same ``hidden`` is on all, and its gradient is summed over them.
        first: id of the first row of ``head``.

    Returns:
        The sum, a scalar in fp32 (fp64 for fp64 inputs), and the loss of each token [N], without gradient, 0 where
        there is no target.

    Raises:
        ValueError: for a chunk that is not positive. RuntimeError: if differentiated twice.
    """
    require_positive(chunk=chunk)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    return _Chunked.apply(hidden, head, targets, weights, chunk or max(1, len(hidden)), group, first, wanted)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, head, targets, weights, chunk: int, group, first: int, wanted: bool):
        exact = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_head = torch.zeros_like(head, dtype=exact) if wanted else None
        kind = hidden.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        matrix = head.to(low)  # [V, D]
        for start in range(0, len(hidden), chunk):
            some = slice(start, start + chunk)
            x, weight = hidden[some].to(low), weights[some].to(exact)  # [n, D], [n]
            losses[some], slope = _rows(F.linear(x, matrix), targets[some], group, first, exact)  # [n], [n, V]
            if d_hidden is not None and d_head is not None:
                slope = slope.mul_(weight[:, None]).to(low)
                d_hidden[some] = slope @ matrix
                d_head += slope.T @ x
        if d_hidden is not None and group is not None:
            dist.all_reduce(d_hidden, group=group)
        ctx.gradients = d_hidden, d_head, head.dtype
        ctx.mark_non_differentiable(losses)
        return torch.dot(losses, weights.to(exact)), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any):
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunked cross-entropy can be taken once; compute the loss again")
        d_hidden, d_head, dtype = ctx.gradients
        ctx.gradients = None
        return d_hidden.mul_(upstream), d_head.mul_(upstream).to(dtype), None, None, None, None, None, None


def _rows(logits: Tensor, targets: Tensor, group, first: int, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss of each row [n], 0 where there is no target, and its gradient with respect to the logits, [n, V]."""
    counted = targets != IGNORED
    own = targets - first
    mine = counted & (own >= 0) & (own < logits.shape[1])
    own = own.clamp(0, logits.shape[1] - 1)[:, None]
    scores = logits.to(exact, copy=True)
    largest = scores.amax(1)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scores -= largest[:, None]
    picked = scores.gather(1, own)[:, 0] * mine
    scores.exp_()
    total = scores.sum(1)
    if group is not None:
        both = torch.stack((picked, total))
        dist.all_reduce(both, group=group)
        picked, total = both
    loss = (total.log() - picked) * counted
    scores.div_(total[:, None])
    scores.scatter_add_(1, own, -mine.to(exact)[:, None])
    return loss, scores.mul_(counted[:, None])
