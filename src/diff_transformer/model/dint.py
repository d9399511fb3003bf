"""DINT (arXiv 2501.17486): differential attention plus the mean of the first map, so that rows sum to 1.

    A = A1 - lambda A2 + lambda G,        G[t, s] = mean of A1[t', s] over queries t'

**Not causal**: the mean is over all queries. All rows of G are equal: the column means of A1.

**Causal**: row t must not depend on later queries, so its mean is over the queries t' <= t. A1[t', s] is 0 for s > t',
hence G[t, s] is 0 for s > t: G is causal. Each A1[t', :] sums to 1 and so does their mean, so the rows of A sum to
1 - lambda + lambda = 1. Since every G[t, :] is a mean of rows of A1,

    (G V)[t] = mean of (A1 V)[t'] over t' <= t,

the running mean of A1 V: no map is needed. The mean is over whole rows, so there is no cache.

Padding and fully masked queries do not count; a fully masked query gives 0. In packed documents the mean restarts in
each document. A mask does not restart it: the model rejects masks under which a later query sees less than an earlier
one; the layer alone does not check this.
"""

import torch
from torch import Tensor

from diff_transformer.model.cores import AttentionCore, Lambda
from diff_transformer.model.inputs import Visible
from diff_transformer.ops.masking import fully_masked_rows
from diff_transformer.ops.reference import DiffMaps

HIDDEN = -9900  # of additive masks: this and less; -1e4, rounded to bf16, is -9984
Counted = tuple[Tensor, Tensor | None]  # the queries that count in means, and the fully masked ones, if there are any


class DintCore(AttentionCore):
    """The core of DINT: two calls of ``diff_attention``, one for A1 - lambda A2 and one for A1."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lam: Lambda, visible: Visible, first=None) -> Tensor:
        """``(first A1 - lambda A2 + lambda G) V``, before the head norm: ``[B, h, T, dv]``. G has no weight."""
        difference = super().attend(q, k, v, lam, visible, first)
        alone = super().attend(q, k, v, 0.0, visible)
        return self.with_means(difference, alone, lam, self.counted(q, k, visible), visible.is_causal)

    def counted(self, q: Tensor, k: Tensor, visible: Visible) -> Counted:
        """Two masks of queries, bool ``[B|1, h|1, T, 1]``: those that count in means, and those that see nothing."""
        mask = visible.mask
        if mask is not None:
            mask = (mask if mask.dtype == torch.bool else mask > HIDDEN)[(None,) * (4 - mask.dim())]
        fully_masked = fully_masked_rows(q.shape[2], k.shape[2], visible.is_causal, None, mask, q.device)
        counts = torch.ones(1, 1, q.shape[2], 1, dtype=torch.bool, device=q.device)
        if visible.tokens is not None:
            counts = visible.tokens[:, None, :, None]
        return counts if fully_masked is None else counts & ~fully_masked, fully_masked

    def with_means(self, difference: Tensor, first: Tensor, lam: Lambda, counted: Counted, is_causal: bool) -> Tensor:
        """``difference + lambda mean(first)`` for (A1 - lambda A2) V and A1 V, ``[B, h, T, dv]``."""
        wide = torch.promote_types(first.dtype, torch.float32)
        out = difference.to(wide) + lam * self._mean(first.to(wide), counted, is_causal)
        if counted[1] is not None:
            out = out.masked_fill(counted[1], 0)
        return out.to(difference.dtype)

    def maps(self, q: Tensor, k: Tensor, visible: Visible, *, hidden_states: Tensor | None = None) -> DiffMaps:
        """Both maps and ``A1 - lambda A2 + lambda G``, each ``[B, h, T, S]``."""
        first, second, difference = super().maps(q, k, visible, hidden_states=hidden_states)
        counted = self.counted(q, k, visible)
        mean = self._mean(first, counted, visible.is_causal)
        if counted[1] is not None:
            mean = mean.masked_fill(counted[1], 0)
        return DiffMaps(first, second, difference + self.weights(hidden_states)[0] * mean)

    def _mean(self, rows: Tensor, counted: Counted, is_causal: bool) -> Tensor:
        """The mean of ``rows [B, h, T, ...]`` over the queries that count: those so far, or all."""
        weights = counted[0].to(rows.dtype)
        rows = rows * weights
        if self.is_causal or is_causal:
            return rows.cumsum(2) / weights.cumsum(2).clamp_min(1)
        return (rows.sum(2, keepdim=True) / weights.sum(2, keepdim=True).clamp_min(1)).expand_as(rows)
