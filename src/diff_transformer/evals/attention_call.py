"""Inputs of one attention call, in the same form for every model.

Legend: B batch, H heads of a map, G key heads, T queries, S keys, d head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 22  # logits held at a time


@dataclass(frozen=True)
class AttentionCall:
    """Inputs of one layer's attention: queries and keys after the rotary embedding. Do not modify them.

    Attributes:
        layer: index, from 0.
        q1, k1: ``[B, H, T, d]``, ``[B, G, S, d]``: the first map, or the only one.
        scale: factor of ``q k^T``.
        mask: bool (True = attend) or additive, broadcastable to ``[B, H, T, S]``, or None.
        is_causal: whether a causal mask applies too, aligned to the lower right corner.
        q2, k2, lam: the second map and lambda (broadcastable to ``[B, H, T, 1]``); None for softmax attention.
        softcap: c of ``c tanh(logits / c)``, if the model has it.
        mean: for DINT, ``mean(call, rows, first, change)``: the mean of the first map that DINT adds, for the queries
            ``rows``, whose map is ``first``.
        window: sliding window of the causal mask, as in ``diff_attention``.
        first: weight of the first map for each query and head, ``[B, H, T, 1]``; None is 1.
        v: values ``[B, g, S, dv]``; None where the layer splits them.
    """

    layer: int
    q1: Tensor
    k1: Tensor
    scale: float
    mask: Tensor | None
    is_causal: bool
    q2: Tensor | None = None
    k2: Tensor | None = None
    lam: Tensor | None = None
    softcap: float | None = None
    mean: "Mean | None" = None
    window: int | None = None
    first: Tensor | None = None
    v: Tensor | None = None

    def blocks(self, elements: int = BLOCK) -> Iterator[slice]:
        """Ranges that partition the queries, each with at most ``elements`` logits over all its maps."""
        batch, heads, queries = self.q1.shape[:3]
        maps = 1 if self.q2 is None else 2
        size = max(1, elements // (batch * heads * self.k1.shape[2] * maps))
        return (slice(start, min(start + size, queries)) for start in range(0, queries, size))

    def reach(self, rows: slice = slice(None)) -> slice:
        """The keys that some query of ``rows`` may attend to, as far as causality and the window say."""
        queries, keys = self.q1.shape[2], self.k1.shape[2]
        first, last, _ = rows.indices(queries)
        if not self.is_causal or last <= first:
            return slice(0, keys)
        start = 0 if self.window is None else max(0, keys - queries + first + 1 - self.window)
        return slice(start, keys - queries + last)

    def logits(self, rows: slice = slice(None), keys: slice = slice(None)) -> tuple[Tensor, ...]:
        """``scale q k^T`` of one map or two, each ``[B, H, t, S]`` in fp32 (fp64 for fp64 inputs), without the mask;
        S are the ``keys``."""
        scores = [_products(self.q1[:, :, rows], self.k1[:, :, keys]) * self.scale]
        if self.q2 is not None and self.k2 is not None:
            scores.append(_products(self.q2[:, :, rows], self.k2[:, :, keys]) * self.scale)
        if self.softcap is not None:
            scores = [self.softcap * (x / self.softcap).tanh() for x in scores]
        return tuple(scores)

    def allowed(self, rows: slice = slice(None)) -> Tensor:
        """True where a query may attend to a key: bool, at least ``[t, S]``, broadcastable to ``[B, H, t, S]``."""
        queries, keys = self.q1.shape[2], self.k1.shape[2]
        seen = torch.ones(len(range(queries)[rows]), keys, dtype=torch.bool, device=self.q1.device)
        if self.is_causal:
            own = torch.arange(keys - queries, keys, device=seen.device)[rows, None]
            place = torch.arange(keys, device=seen.device)
            seen = place <= own
            if self.window is not None:
                seen = seen & (place > own - self.window)
        mask = self._mask(rows)
        if mask is None:
            return seen
        return seen & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)

    def maps(self, rows: slice = slice(None), change: "Change | None" = None) -> tuple[Tensor, ...]:
        """Softmax of the (changed) logits over the allowed keys, one map or two. A fully masked row is 0."""
        allowed, logits = self.allowed(rows), self.logits(rows)
        if change is not None:
            logits = change(logits, allowed)
        mask = self._mask(rows)
        if mask is not None and mask.dtype != torch.bool:
            logits = tuple(x + mask for x in logits)
        fully_masked = ~allowed.any(-1, keepdim=True)
        hidden = ~allowed & ~fully_masked
        return tuple(x.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(fully_masked, 0.0) for x in logits)

    def attention(self, rows: slice = slice(None), change: "Change | None" = None) -> Tensor:
        """``first A1 - lambda A2`` (DINT: ``+ lambda G``), or the map of softmax attention: ``[B, H, t, S]``."""
        maps = self.maps(rows, change)
        if self.lam is None:
            return maps[0] if self.first is None else self.first[:, :, rows] * maps[0]
        difference = self.difference(maps, rows)
        if self.mean is None:
            return difference
        return difference + self.lam * self.mean(self, rows, maps[0], change)

    def difference(self, maps: tuple[Tensor, ...], rows: slice) -> Tensor:
        """``first A1 - lambda A2`` of the two maps of the queries ``rows``."""
        assert self.lam is not None
        lam = self.lam[..., rows, :] if self.lam.dim() > 1 and self.lam.shape[-2] > 1 else self.lam
        signal = maps[0] if self.first is None else self.first[:, :, rows] * maps[0]
        return signal - lam * maps[1].repeat_interleave(maps[0].shape[1] // maps[1].shape[1], dim=1)

    def _mask(self, rows: slice) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask[..., : self.k1.shape[2]]
        return mask[..., rows, :] if mask.shape[-2] > 1 else mask


Tap = Callable[[AttentionCall], None]
Change = Callable[[tuple[Tensor, ...], Tensor], tuple[Tensor, ...]]  # (logits of each map, allowed) -> logits
Mean = Callable[[AttentionCall, slice, Tensor, "Change | None"], Tensor]
Changes = Callable[[AttentionCall], Change]
Original = Callable[[], Any]
Finish = Callable[[Change], Any]  # change of logits -> the layer's result


def _products(q: Tensor, k: Tensor) -> Tensor:
    """``q k^T`` in fp32 (fp64): ``[B, H, t, d]``, ``[B, G, S, d]`` -> ``[B, H, t, S]``, without repeating k."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))  # [B, G, H/G, t, d]
    return (grouped @ k.to(wide)[:, :, None].mT).flatten(1, 2)


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """``weights [B, H, t, S]`` times ``v [B, g, S, dv]``: ``[B, H, t, dv]`` in the dtype of v."""
    grouped = weights.unflatten(1, (v.shape[1], -1))
    return (grouped @ v.to(weights.dtype)[:, :, None]).flatten(1, 2).to(v.dtype)
