"""The loss that training minimises: from rows of tokens to the weighted sum of their cross-entropies.

Legend: B rows, T tokens a row, N tokens, D hidden size, V vocabulary (of this process, if the output matrix is split
over processes).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diff_transformer.data.mixture import IGNORED
from diff_transformer.errors import UserError


class Objective(nn.Module):
    """``sum_i weights[i] * loss[i]`` over the predicted tokens of a batch.

    Training calls, compiles, wraps and shards this module rather than the model, so that hidden states become a loss
    inside the one forward in which a sharded output matrix is whole.

    Args:
        model: a causal language model with the interface of Hugging Face.
        chunk: number of tokens whose logits are held at a time (``train.loss_chunk``); 0 for all.
    """

    def __init__(self, model: nn.Module, chunk: int = 0):
        super().__init__()
        self.model: Any = model
        self.chunk = chunk

    def forward(
        self, inputs: dict, targets: Tensor, weights: Tensor, dense: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of a batch, a scalar, and the sum of nats of each row [B], without gradient.

        Args:
            inputs: keyword arguments of the model's forward.
            targets: int64 [B, n], what the first n tokens of each row predict (n = T - 1 for whole rows), -100 for
                none.
            weights: [B, n], fp32 at least, which no precision of ``train.precision`` rounds.
            dense: whether most tokens have a loss, so that all get logits; None to count, for which the host waits.
        """
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state[:, : targets.shape[1]]
        loss, losses = self._losses(hidden.flatten(0, 1), targets.flatten(), weights.flatten(), dense)
        return loss, losses.detach().view(len(targets), -1).sum(1)

    def compile_loss(self) -> None:
        """Compile what follows the last layer. All tokens get logits: the number of those with a loss varies."""
        compiled = torch.compile(self._losses)
        self._losses = lambda hidden, targets, weights, dense: compiled(hidden, targets, weights, True)

    def _losses(self, hidden: Tensor, targets: Tensor, weights: Tensor, dense: bool | None) -> tuple[Tensor, Tensor]:
        """``hidden [N, D]``, ``targets [N]``, ``weights [N]`` -> the weighted sum, and each token's loss [N]."""
        output = self.model.get_output_embeddings()
        head, chunk = output.weight, self.chunk or None
        if isinstance(head, DTensor):  # the vocabulary is split over a group of processes
            part, mesh = head.to_local(), head.device_mesh
            split = {"group": mesh.get_group(), "first": mesh.get_local_rank() * len(part)}
            return weighted_cross_entropy(hidden, part, targets, weights, chunk=chunk, **split)
        if chunk:
            return weighted_cross_entropy(hidden, head, targets, weights, chunk=chunk)
        wanted = targets != IGNORED
        if mostly(wanted) if dense is None else dense:
            losses = F.cross_entropy(_wide(output(hidden)), targets, reduction="none", ignore_index=IGNORED)
        else:  # logits of the tokens that have a loss
            few = F.cross_entropy(_wide(output(hidden[wanted])), targets[wanted], reduction="none")
            losses = few.new_zeros(len(targets)).masked_scatter(wanted, few)
        return (losses * weights).sum(), losses


def _wide(logits: Tensor) -> Tensor:
    """The logits in fp32, or in fp64 if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mostly(wanted: Tensor) -> bool:
    """True if most of ``wanted`` is true."""
    return bool(2 * wanted.sum() > wanted.numel())


def predicted(labels: Tensor) -> Tensor:
    """True if each of the tokens 1 to T - 1 of a row is predicted: bool [B, T - 1] for labels [B, T]."""
    return labels[:, 1:] != IGNORED


def count_by_source(labels: Tensor, source: Tensor, sources: int) -> Tensor:
    """Predicted tokens of each source, fp32 [sources] (exact up to 2^24); ``source``, int64 [B], is the row's."""
    counts = torch.zeros(sources, device=labels.device)
    return counts.index_add_(0, source, predicted(labels).sum(1).to(counts))


def token_weights(labels: Tensor, source: Tensor, counts: Tensor, shares: list[float], loss: str) -> Tensor:
    """Weight of each token in the loss, fp32 [B, T - 1], 0 where there is no label. A whole batch sums to 1.

    Args:
        labels, source: int64 [B, T] and [B], of the whole batch or of a process's part of it.
        counts: predicted tokens of each source [sources] in the whole batch.
        shares: share of each source in the mixture.
        loss: ``data.loss``. "tokens" weights all tokens equally; "sources" gives each source that has
            such tokens its share.
    """
    if loss == "tokens":
        each = (1 / counts.sum()).expand_as(counts)
    else:
        share = torch.tensor(shares, device=counts.device) / sum(shares)
        whole = torch.where((counts > 0).all(), 1.0, (share * (counts > 0)).sum().clamp(min=1e-9))
        each = share / whole / counts.clamp(min=1)
    return predicted(labels) * each[source][:, None]


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

    The logits [N, V] are never held as a whole. The forward pass computes the gradients too, chunk by chunk, while a
    chunk's logits exist. So nothing is recomputed, and there are three products with the output matrix, as many as
    without chunks.

    Args:
        hidden: [N, D], any floating dtype.
        head: output matrix [V, D].
        targets: int64 [N], the ids to predict in the whole vocabulary; -100 for none.
        weights: [N], the weight of each token in the sum.
        chunk: number of tokens whose logits are held at a time; None for all.
        group: processes over which the vocabulary is split. ``head`` is then this process's part, ``hidden`` is the
            same on all of them, and its gradient is summed over them.
        first: id of the first row of ``head``.

    Returns:
        The sum, a scalar in fp32 (fp64 for fp64 inputs), and the loss of each token [N], without gradient, 0 where
        there is no target.

    Raises:
        UserError: if differentiated twice.
    """
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    return _Chunked.apply(hidden, head, targets, weights, chunk or max(1, len(hidden)), group, first, wanted)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, head, targets, weights, chunk: int, group, first: int, wanted: bool):
        exact = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_head = torch.zeros_like(head, dtype=exact) if wanted and ctx.needs_input_grad[1] else None
        kind = hidden.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        matrix = head.to(low)  # [V, D]
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            x, weight = hidden[rows].to(low), weights[rows].to(exact)  # [n, D], [n]
            losses[rows], d_logits = _loss_and_gradient(F.linear(x, matrix), targets[rows], group, first, exact)
            if d_hidden is not None:
                d_logits = d_logits.mul_(weight[:, None]).to(low)  # [n, V]
                d_hidden[rows] = d_logits @ matrix
                if d_head is not None:
                    d_head += d_logits.T @ x
        if d_hidden is not None and group is not None:
            dist.all_reduce(d_hidden, group=group)
        ctx.gradients = d_hidden, d_head, head.dtype
        ctx.mark_non_differentiable(losses)
        return torch.dot(losses, weights.to(exact)), losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Any):
        if ctx.gradients is None:
            raise UserError("the gradients of a chunked cross-entropy can be taken once; compute the loss again")
        d_hidden, d_head, dtype = ctx.gradients
        ctx.gradients = None
        d_head = None if d_head is None else d_head.mul_(upstream).to(dtype)
        return d_hidden.mul_(upstream), d_head, None, None, None, None, None, None


def _loss_and_gradient(logits: Tensor, targets: Tensor, group, first: int, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss of each token [n], 0 where there is no target, and its gradient with respect to the logits [n, V]."""
    has_target = targets != IGNORED
    column = targets - first
    in_this_part = has_target & (column >= 0) & (column < logits.shape[1])
    column = column.clamp(0, logits.shape[1] - 1)[:, None]
    scores = logits.to(exact, copy=True)
    row_max = scores.amax(1)
    if group is not None:
        dist.all_reduce(row_max, dist.ReduceOp.MAX, group=group)
    scores -= row_max[:, None]
    target_score = scores.gather(1, column)[:, 0] * in_this_part
    scores.exp_()
    row_sum = scores.sum(1)
    if group is not None:
        both = torch.stack((target_score, row_sum))
        dist.all_reduce(both, group=group)
        target_score, row_sum = both
    loss = (row_sum.log() - target_score) * has_target
    scores.div_(row_sum[:, None])
    scores.scatter_add_(1, column, -in_this_part.to(exact)[:, None])
    return loss, scores.mul_(has_target[:, None])
