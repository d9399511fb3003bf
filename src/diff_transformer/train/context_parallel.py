"""Context parallel: one sequence over several processes (``train.parallel.context_parallel``).

A row of N tokens is cut into 2 P pieces, and process r of P computes pieces r and 2 P - 1 - r, so that all have
the same causal work. Only attention looks at other tokens: each process gathers K and V of the whole row and computes
its own queries, one call for each piece over the keys up to the piece's end. The causal limit is aligned to the lower
right, so kernels do not change and no partial results are merged. The backward pass reduces and scatters the gradients
of K and V.

Legend: B rows, N tokens of a row, P processes, S = N / P tokens of a process.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

from diff_transformer.data.mixture import IGNORED
from diff_transformer.model.cores import AttentionCore, Lambda
from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.train.config import ParallelConfig

# PyTorch 2.13 renames both.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class SequencePart:
    """This process's part of each row: pieces ``rank`` and ``2 size - 1 - rank`` of ``2 size``."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def pieces(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """This process's tokens of ``x``, which has all N along ``dim``."""
        if self.size == 1:
            return x
        pieces = x.chunk(2 * self.size, dim)
        return torch.cat([pieces[i] for i in self.pieces], dim)

    def cut(self, inputs: dict, targets: Tensor, weights: Tensor) -> tuple[dict, Tensor, Tensor]:
        """This process's part of a batch: inputs of the model, targets and weights ``[B, N - 1]`` of its tokens."""
        if self.size == 1:
            return inputs, targets, weights
        ids = inputs["input_ids"]
        if "cu_seq_lens_q" in inputs:
            documents = Packing(inputs["cu_seq_lens_q"], inputs["max_length_q"])
        else:  # each row is one document
            bounds = torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device) * ids.shape[1]
            documents = Packing(bounds, ids.shape[1])
        mine = {
            "input_ids": self.of(ids),
            "position_ids": self.of(documents.positions(ids.shape)),
            "cu_seq_lens_q": documents.cu_seqlens,
            "max_length_q": documents.longest,
        }
        last = targets.new_full((len(ids), 1), IGNORED)  # the last token of a row predicts nothing
        targets = torch.cat((targets, last), 1)
        weights = torch.cat((weights, torch.zeros_like(last, dtype=weights.dtype)), 1)
        return mine, self.of(targets), self.of(weights)

    def apply(self, model: Any) -> None:
        """Let the attention of ``model`` see the whole row."""
        if self.size == 1:
            return
        for layer in model.base_model.layers:
            core = layer.self_attn.core
            core.attend_documents = partial(_attend_own_queries, self, core, core.attend_documents)


WHOLE = SequencePart()  # of a process that has its rows to itself


def make_context(fabric: Fabric, parallel: ParallelConfig) -> SequencePart:
    """The processes that share rows with this one: ``context_parallel`` neighbours in the data-parallel group."""
    size = parallel.context_parallel
    if size == 1:
        return WHOLE
    world, inner, mine = fabric.world_size, parallel.tensor_parallel, None
    rank = fabric.global_rank // inner  # tensor parallel processes are neighbours
    for block in range(0, world, size * inner):  # every process takes part in making every group
        for first in range(block, block + inner):
            members = list(range(first, first + size * inner, inner))
            group = dist.new_group(members)
            mine = group if fabric.global_rank in members else mine
    return SequencePart(rank % size, size, mine)


@torch.compiler.disable
def _attend_own_queries(
    context: SequencePart, core: AttentionCore, attend_documents, q, k, v, lam: Lambda, visible: Visible, first=None
) -> Tensor:
    """``core.attend_documents`` of this process's ``q``, ``k``, ``v [B, heads, S, width]``: ``[B * S, h, dv]``."""
    B, width = q.shape[0], q.shape[2] // 2  # of a piece
    sizes = [x.shape[1] * x.shape[3] for x in (k, v)]
    joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (k, v)], -1)  # [B, S, numbers of a token]
    whole = _Gather.apply(joined.transpose(0, 1).contiguous(), context).transpose(0, 1)  # [B, N, numbers of a token]
    N, documents = whole.shape[1], visible.documents
    assert documents is not None
    keys, values = (
        part.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)
        for part, x in zip(whole.split(sizes, -1), (k, v), strict=True)
    )
    outs = []
    for i, piece in enumerate(context.pieces):
        own, start, end = slice(i * width, (i + 1) * width), piece * width, (piece + 1) * width
        of_piece, firsts = (x[:, :, own] if isinstance(x, Tensor) and x.dim() == 4 else x for x in (lam, first))
        inputs = q[:, :, own], keys[:, :, :end], values[:, :, :end], of_piece
        # PyTorch's own attention has this causal limit without a mask only in its form for packed documents.
        if len(documents.cu_seqlens) == B + 1 and not (q.is_cuda and core.variant.maps == 1):  # a document a row
            outs.append(core.attend(*inputs, visible._replace(documents=None), firsts).transpose(1, 2))
        else:
            of_queries, of_keys = (_clip(documents, B, N, first, end) for first in (start, 0))
            out = attend_documents(*inputs, visible._replace(documents=of_queries), firsts, of_keys)
            outs.append(out.unflatten(0, (B, width)))
    return torch.cat(outs, 1).flatten(0, 1)


def _clip(documents: Packing, rows: int, length: int, start: int, end: int) -> Packing:
    """The tokens ``start`` to ``end - 1`` of each row, as parts of the same documents; some of them are empty."""
    bounds = documents.cu_seqlens.long()
    row = bounds[:-1] // length * length
    first, last = bounds[:-1] - row, bounds[1:] - row
    sizes = (last.clamp(max=end) - first.clamp(min=start)).clamp(min=0)
    ends = torch.cat((sizes.new_zeros(1), sizes.cumsum(0))).to(torch.int32)
    return Packing(ends, min(documents.longest, end - start))


def _in_order(gathered: Tensor, context: SequencePart) -> Tensor:
    """Tokens as the processes have them one after another, ``[N, ...]``, in the order of the row."""
    pieces, last = gathered.chunk(2 * context.size), 2 * context.size - 1
    return torch.cat([pieces[2 * i if i < context.size else 2 * (last - i) + 1] for i in range(last + 1)])


def _by_process(whole: Tensor, context: SequencePart) -> Tensor:
    """The inverse of ``_in_order``."""
    pieces, last = whole.chunk(2 * context.size), 2 * context.size - 1
    return torch.cat([pieces[piece] for rank in range(context.size) for piece in (rank, last - rank)])


class _Gather(torch.autograd.Function):
    """``[S, ...]`` of each process to ``[N, ...]`` in the order of the row; the gradient is summed and cut again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: SequencePart) -> Tensor:
        ctx.context = context
        gathered = x.new_empty((len(x) * context.size, *x.shape[1:]))
        _all_gather(gathered, x, group=context.group)
        return _in_order(gathered, context)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ordered = _by_process(gradient, ctx.context).contiguous()
        mine = ordered.new_empty((len(ordered) // ctx.context.size, *ordered.shape[1:]))
        _reduce_scatter(mine, ordered, group=ctx.context.group)
        return mine, None
