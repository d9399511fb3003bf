"""Context parallel: one sequence over several processes (``train.parallel.context_parallel``).

A row of N tokens is cut into 2 P pieces, and process r of P computes pieces r and 2 P - 1 - r, so that all have
the same causal work. Only attention looks at other tokens. There are two exact methods:

- "gather": each process gathers K and V of the whole row and computes its own queries, one call for each piece over the
  keys up to the piece's end. The causal limit is aligned to the lower right, so kernels do not change and no partial
  results are merged. The backward pass reduces and scatters the gradients of K and V.
- "heads": two all-to-all exchanges turn N / P tokens of all heads into N tokens of a share of the heads, and back
  (DeepSpeed-Ulysses, arXiv 2309.14509).

Legend: B rows, N tokens of a row, P processes, S = N / P tokens of a process.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from diff_transformer.data.mixture import IGNORED
from diff_transformer.errors import UserError
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
    method: str = "gather"

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
        """Let the attention of ``model`` see the whole row.

        Raises:
            ValueError: for a model whose attention the method cannot compute.
        """
        if self.size == 1:
            return
        check_context(model.config, self.size, self.method)
        attend = _attend_own_queries if self.method == "gather" else _attend_own_heads
        for layer in model.base_model.layers:
            core = layer.self_attn.core
            core.attend_documents = partial(attend, self, core, core.attend_documents)


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
    return SequencePart(rank % size, size, mine, parallel.context_parallel_method)


def check_context(config: Any, size: int, method: str) -> None:
    """Raise ValueError unless ``size`` processes can share a row of a model with this configuration."""
    asked = f"train.parallel.context_parallel is {size}"
    if method == "gather" and config.attention == "dint":
        raise UserError(
            f"{asked}, but attention='dint' takes a running mean over the whole row, which no process has; give "
            f"train.parallel.context_parallel_method='heads', or another attention"
        )
    heads = config.heads
    if method == "heads" and heads.values % size:
        raise UserError(
            f"{asked} with context_parallel_method 'heads', which does not divide the {heads.values} value heads of "
            f"this model; give a context_parallel that divides them, or context_parallel_method='gather'"
        )


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


@torch.compiler.disable
def _attend_own_heads(
    context: SequencePart, core: AttentionCore, attend_documents, q, k, v, lam: Lambda, visible: Visible, first=None
) -> Tensor:
    """As ``_attend_own_queries``, by exchanging tokens for heads."""
    B, S = q.shape[0], q.shape[2]
    q, k, v = (_to_heads(x.transpose(1, 2), context).transpose(1, 2) for x in (q, k, v))
    lam, first = (
        _to_heads(x.transpose(1, 2), context).transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x
        for x in (lam, first)
    )
    out = attend_documents(q, k, v, lam, visible, first).unflatten(0, (B, S * context.size))
    return _to_tokens(out, context).flatten(0, 1)


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


class _Exchange(torch.autograd.Function):
    """Part i of ``x``'s first dimension, of size P, goes to process i; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: SequencePart) -> Tensor:
        ctx.context = context
        return _exchanged(x, context)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.context), None


def _exchanged(x: Tensor, context: SequencePart) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=context.group)
    return received


def _to_heads(x: Tensor, context: SequencePart) -> Tensor:
    """``[B, S, heads, width]`` to ``[B, N, heads / P, width]``."""
    parts = x.unflatten(2, (context.size, -1)).permute(2, 1, 0, 3, 4)  # [P, S, B, heads / P, width]
    return _in_order(_Exchange.apply(parts, context).flatten(0, 1), context).transpose(0, 1)


def _to_tokens(x: Tensor, context: SequencePart) -> Tensor:
    """The inverse of ``_to_heads``."""
    parts = _by_process(x.transpose(0, 1), context).unflatten(0, (context.size, -1))  # [P, S, B, heads / P, width]
    return _Exchange.apply(parts, context).permute(2, 1, 0, 3, 4).flatten(2, 3)
