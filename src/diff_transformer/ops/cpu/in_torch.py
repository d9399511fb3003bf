"""The implementation in PyTorch calls, for machines without a compiler, for fp64, and for devices other than the CPU.

The scores of both maps for a block of query rows stay in cache. The maps are subtracted once in fp32, and one product
with v follows. The backward recomputes the maps from the inputs, so nothing else is saved. It needs one product dO v^T
and one for dv, where two attention calls need two of each. Keys that no row of a block sees are skipped. Memory is
O(T + S).

Shapes: B batch, G key/value heads, r = H / G signal and rn = Hn / G noise heads of a key/value head, m = H / Hn,
c (batch, key/value head) pairs computed together, R query rows of a block, n keys they can see. Heads that share keys
are stacked in the rows of one matrix, [c, r * R, D]; keys and values are not repeated.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.masking import key_range

BLOCK_SCORES = 2**20  # scores of a block, both maps and all pairs: 4 MB in fp32, a core's share of the cache
NEGATIVE_INFINITY = float("-inf")


class Block(NamedTuple):
    """Queries start to stop - 1, and the range of keys that they may see, first to last - 1."""

    start: int
    stop: int
    first: int
    last: int


class Buffers(NamedTuple):
    """Flat memory for one block; scores and dp in the dtype of the inputs, the rest in fp32 (fp64 for fp64 inputs)."""

    maps: Tensor  # both maps
    scores: Tensor  # scores of both maps; the same memory as maps if the dtypes agree
    dp: Tensor  # dO v^T
    dp_wide: Tensor  # dp in fp32; the same memory as dp if the dtypes agree
    work: Tensor  # one map


def buffers(both: int, one: int, dtype: torch.dtype, device: torch.device, backward: bool) -> Buffers:
    """One allocation, split into the five parts. PyTorch's allocator reuses its memory in the next call."""
    wide = torch.promote_types(dtype, torch.float32)
    narrow = wide != dtype
    sizes = [both, (both + 1) // 2 * narrow, (one + 1) // 2 * (narrow and backward), one * backward, one * backward]
    maps, scores, dp, dp_wide, work = torch.empty(sum(sizes), dtype=wide, device=device).split(sizes)
    return (
        Buffers(maps, scores.view(dtype), dp.view(dtype), dp_wide, work)
        if narrow
        else Buffers(maps, maps, dp_wide, dp_wide, work)
    )


class Division:
    """The sizes of a call, and its division into chunks of (batch, key/value head) pairs and blocks of queries."""

    def __init__(self, call: Call, backward: bool):
        q1, q2, k1, window = call.q1, call.q2, call.k1, call.window
        self.B, H, self.T, D = q1.shape
        self.G, self.S = k1.shape[1:3]
        self.r, self.rn, self.m = H // self.G, q2.shape[1] // self.G, H // q2.shape[1]
        self.is_causal, self.window = call.is_causal, window
        self.rows = min(self.T, rows_of_a_block(self.T, D, q1.dtype))
        longest = self.S if window is None else min(self.S, window + self.rows)
        one_pair = self.rows * longest
        self.pairs = min(max(1, BLOCK_SCORES // ((self.r + self.rn) * one_pair)), self.B * self.G)
        one_map = self.pairs * self.r * one_pair
        self.buffers = buffers(one_map // self.r * (self.r + self.rn), one_map, q1.dtype, q1.device, backward)

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Slices of batches and of key/value heads: some heads of one batch, or all heads of some batches."""
        b, g = max(1, self.pairs // self.G), min(self.pairs, self.G)
        for batch in range(0, self.B, b):
            for group in range(0, self.G, g):
                yield slice(batch, batch + b), slice(group, group + g)

    def blocks(self) -> Iterator[Block]:
        """The blocks of queries that see at least one key."""
        for start in range(max(0, self.T - self.S) if self.is_causal else 0, self.T, self.rows):
            stop = min(start + self.rows, self.T)
            yield Block(start, stop, *key_range(start, stop, self.T, self.S, self.is_causal, self.window))


def rows_of_a_block(T: int, D: int, dtype: torch.dtype) -> int:
    """Measured: small blocks waste less work above the causal diagonal, large ones multiply faster."""
    return 128 if T >= 1024 or (D >= 64 and dtype == torch.bfloat16) else 64


class Chunk:
    """The tensors of some (batch, key/value head) pairs, folded, and the two maps of a block of their queries."""

    def __init__(self, division: Division, at: tuple[slice, slice], call: Call):
        self.division, self.scale = division, call.scale
        (q1, q2, k1, k2, v, lam), attn_mask = call.inputs, call.attn_mask
        q1_by_group = q1.unflatten(1, (division.G, division.r))[at]
        self.pairs = q1_by_group.shape[:2]  # (b, g) with b * g = c
        self.q1 = q1_by_group.flatten(0, 1)  # [c, r, T, D]
        self.q2 = q2.unflatten(1, (division.G, division.rn))[at].flatten(0, 1)  # [c, rn, T, D]
        self.k1, self.k2, self.v = (x[at].flatten(0, 1) for x in (k1, k2, v))  # [c, S, D or Dv]
        self.k1t, self.k2t, self.vt = self.k1.mT, self.k2.mT, self.v.mT  # [c, D or Dv, S]
        if v.dtype == torch.bfloat16 and division.is_causal and division.rows < division.T:
            # oneDNN copies a transposed slice in every product; a slice of a transposed copy is cheaper.
            self.k1t, self.k2t, self.vt = self.k1t.contiguous(), self.k2t.contiguous(), self.vt.contiguous()
        self.minus_lam = -lam.unflatten(1, (division.G, division.rn, division.m))[at].flatten(0, 1)  # [c, rn, m, T, 1]
        self.attn_mask = None
        if attn_mask is not None:  # [b|1, g|1, heads of a group|1, T|1, S|1]
            mask = attn_mask[at[0]] if attn_mask.shape[0] > 1 else attn_mask
            one_head = mask.shape[1] == 1
            self.attn_mask = mask[:, None] if one_head else mask.unflatten(1, (division.G, division.r))[:, at[1]]
        triangle = q1.new_full((division.rows, division.rows), NEGATIVE_INFINITY)
        self.after, self.before = triangle.triu(1), triangle.tril(-1)

    def rows(self, x: Tensor, block: Block) -> Tensor:
        """Query rows of the block, with the heads of a group stacked: [c, heads, T, D] -> [c, heads * R, D]."""
        return x[:, :, block.start : block.stop].flatten(1, 2)

    def lam_rows(self, block: Block) -> Tensor:
        """-lam of the block, [c, rn, m, R, 1]."""
        return self.minus_lam[..., block.start : block.stop, :]

    def maps(self, block: Block) -> tuple[Tensor, Tensor]:
        """Both attention maps of the block, [c, r * R, n] and [c, rn * R, n], in fp32 (fp64 for fp64 inputs)."""
        division, (start, stop, first, last) = self.division, block
        c, R, n = len(self.k1), stop - start, last - first
        sizes = [c * division.r * R * n, c * division.rn * R * n]
        scores, p = (x[: sum(sizes)].view(-1, n) for x in (division.buffers.scores, division.buffers.maps))
        for s, q, kt in zip(scores.view(-1).split(sizes), (self.q1, self.q2), (self.k1t, self.k2t), strict=True):
            s = s.view(c, -1, n)
            if self.scale:
                torch.baddbmm(s, self.rows(q, block), kt[..., first:last], beta=0, alpha=self.scale, out=s)
            else:  # with alpha=0, baddbmm leaves bf16 memory unchanged
                s.zero_()
            self.mask_scores(s.view(*self.pairs, -1, R, n), block)
        if p.dtype != scores.dtype:
            p.copy_(scores)
        if self.attn_mask is not None and self.attn_mask.dtype != torch.bool:
            mask = self.mask_of(block)
            for s in p.view(-1).split(sizes):
                s.view(*self.pairs, -1, R, n).add_(mask)  # fp32: a large value would round bf16 scores away
        fully_masked = None if self.attn_mask is None else p.amax(-1) == NEGATIVE_INFINITY
        torch.softmax(p, -1, out=p)
        if fully_masked is not None:
            p[fully_masked] = 0
        p1, p2 = p.view(-1).split(sizes)
        return p1.view(c, -1, n), p2.view(c, -1, n)

    def mask_scores(self, scores: Tensor, block: Block) -> None:
        """Set scores [b, g, heads, R, n] to -inf where positions or a boolean mask hide a key."""
        start, stop, first, last = block
        R, n = stop - start, last - first
        if self.division.is_causal:
            own = start + self.division.S - self.division.T  # the position of the first query
            scores[..., own - first :] += self.after[:R, :R]
            if self.division.window is not None:
                edge = self.before[:R, first - (own - self.division.window + 1) : R][:, :n]
                scores[..., : edge.shape[1]] += edge
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            scores.masked_fill_(~self.mask_of(block), NEGATIVE_INFINITY)

    def mask_of(self, block: Block) -> Tensor:
        """attn_mask (not None) of the block, [b|1, g|1, heads of a group|1, R|1, n|1]."""
        assert self.attn_mask is not None
        mask = self.attn_mask
        mask = mask[..., block.start : block.stop, :] if mask.shape[-2] > 1 else mask
        return mask[..., block.first : block.last] if mask.shape[-1] > 1 else mask

    def narrowed(self, x: Tensor) -> Tensor:
        """x in the dtype of the inputs, in the memory of the scores, which are no longer needed."""
        scores = self.division.buffers.scores
        return x if x.dtype == scores.dtype else scores[: x.numel()].view_as(x).copy_(x)


def subtract(p1: Tensor, p2: Tensor, minus_lam: Tensor, out: Tensor) -> Tensor:
    """p1 - lam * p2 into ``out``, [c, r * R, n]; minus_lam [c, rn, m, R, 1]."""
    c, rn, m, R, _ = minus_lam.shape
    torch.addcmul(p1.view(c, rn, m, R, -1), p2.view(c, rn, 1, R, -1), minus_lam, out=out.view(c, rn, m, R, -1))
    return out


def accumulate(total: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> None:
    """total += alpha a^T b; total [c, n, D] in fp32 or fp64, a [c, rows, n] and b [c, rows, D] perhaps narrower."""
    if a.dtype == total.dtype:
        total.baddbmm_(a.mT, b, alpha=alpha)
    else:
        total.add_(torch.bmm(a.mT, b), alpha=alpha)


def forward(call: Call, out: Tensor) -> None:
    """Write the output to ``out``, [B, H, T, Dv]."""
    division = Division(call, backward=False)
    out.zero_()
    for at in division.chunks():
        chunk = Chunk(division, at, call)
        out_chunk = out.unflatten(1, (division.G, division.r))[at]
        for block in division.blocks():
            p1, p2 = chunk.maps(block)
            difference = chunk.narrowed(subtract(p1, p2, chunk.lam_rows(block), out=p1))
            rows = torch.bmm(difference, chunk.v[:, block.first : block.last])  # [c, r * R, Dv]
            out_rows = out_chunk[..., block.start : block.stop, :]
            out_rows.copy_(rows.view(out_rows.shape))


def backward(call: Call, dout: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q1, q2, k1, k2, v and lam; dout [B, H, T, Dv] is that of the output."""
    division = Division(call, backward=True)
    gradients = tuple(x.new_zeros(x.shape) for x in call.inputs)
    for at in division.chunks():
        chunk = Chunk(division, at, call)
        dq1, dq2, dlam, dout_chunk = (
            x.unflatten(1, (division.G, -1))[at] for x in (*(gradients[i] for i in (0, 1, 5)), dout)
        )
        dk1, dk2, dv = (torch.zeros_like(x, dtype=call.lam.dtype) for x in (chunk.k1, chunk.k2, chunk.v))
        for block in division.blocks():
            differentiate_block(chunk, block, dout_chunk, dq1, dq2, dk1, dk2, dv, dlam)
        for gradient, total in zip(gradients[2:5], (dk1, dk2, dv), strict=True):
            gradient[at] = total.unflatten(0, chunk.pairs)
    return gradients


def differentiate_block(chunk: Chunk, block: Block, dout, dq1, dq2, dk1, dk2, dv, dlam) -> None:
    """Write the block's rows of dq1, dq2 and dlam, and add its share to dk1, dk2 and dv.

    dout, dq1, dq2, dlam [b, g, heads, T, width]; dk1, dk2, dv [c, S, width]. With P = P1 - lam P2 and dP = dout v^T:
    dv = P^T dout, dlam = -rowsum(P2 * dP), and the score gradients are the softmax gradients of dP and of -lam dP.
    """
    start, stop, first, last = block
    buffers = chunk.division.buffers
    minus_lam = chunk.lam_rows(block)
    dout = chunk.rows(dout.flatten(0, 1), block)  # [c, r * R, Dv]
    p1, p2 = chunk.maps(block)
    dp, dp_wide, work = (x[: p1.numel()].view_as(p1) for x in (buffers.dp, buffers.dp_wide, buffers.work))
    torch.bmm(dout, chunk.vt[..., first:last], out=dp)
    if dp.dtype != dp_wide.dtype:
        dp_wide.copy_(dp)
    accumulate(dv[:, first:last], chunk.narrowed(subtract(p1, p2, minus_lam, out=work)), dout)

    def through_softmax(dp, p, q, k, dq, dk):
        ds = work.view(-1)[: p.numel()].view_as(p)
        torch.ops.aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=ds)
        ds = chunk.narrowed(ds)
        at = dq[..., start:stop, :]
        at.copy_(torch.bmm(ds, k[:, first:last]).mul_(chunk.scale).view(at.shape))
        accumulate(dk[:, first:last], ds, chunk.rows(q, block), chunk.scale)

    through_softmax(dp_wide, p1, chunk.q1, chunk.k1, dq1, dk1)
    dp_by_noise_head = dp_wide.view(*minus_lam.shape[:-1], -1)  # [c, rn, m, R, n]
    p2_by_noise_head = p2.view(*minus_lam.shape[:2], 1, *dp_by_noise_head.shape[3:])  # [c, rn, 1, R, n]
    at = dlam[..., start:stop, 0]
    at.copy_(-torch.linalg.vecdot(p2_by_noise_head, dp_by_noise_head).view(at.shape))
    dp_by_noise_head.mul_(minus_lam)
    dp2 = dp_wide if chunk.division.m == 1 else dp_by_noise_head.sum(2).view_as(p2)
    through_softmax(dp2, p2, chunk.q2, chunk.k2, dq2, dk2)
