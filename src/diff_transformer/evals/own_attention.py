"""This package's attention, seen from the experiments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diff_transformer.evals.attention_call import AttentionCall, Change, Mean, weighted


def own_attention(core: Any, layer: int, handle: Callable) -> Callable:
    """``core.attend`` of this package's attention, by way of ``handle``."""
    from diff_transformer.model.cores import DiffCore
    from diff_transformer.model.dint import DintCore, Rows

    before = core.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, lam: Any, mask: Tensor | None, is_causal: bool, **more: Any) -> Tensor:
        scale, window = q.shape[-1] ** -0.5, core.reach(is_causal)
        given = more.get("rows", Rows())
        if isinstance(core, DiffCore):
            q1, q2, k1, k2 = core.split(q, k)
            lam = torch.as_tensor(lam, dtype=torch.float32, device=q.device) if isinstance(lam, float) else lam
            mean = _dint_mean(core, q, k, mask, is_causal, given) if isinstance(core, DintCore) else None
            call = AttentionCall(layer, q1, k1, scale, mask, is_causal, q2, k2, lam, mean=mean, window=window)
        else:
            call = AttentionCall(layer, q, k, scale, mask, is_causal, window=window)

        def finish(change: Change) -> Tensor:
            if not isinstance(core, DintCore):
                return torch.cat([weighted(call.attention(rows, change), v) for rows in call.blocks()], dim=2)
            parts = []
            for rows in call.blocks():
                maps = call.maps(rows, change)
                parts.append((weighted(call.difference(maps, rows), v), weighted(maps[0], v)))
            difference, first = (torch.cat(blocks, dim=2) for blocks in zip(*parts, strict=True))
            counted = core.counted(q, k, mask, is_causal, given)
            return core.with_means(difference, first, lam, counted, is_causal, given)

        return handle(call, lambda: before(q, k, v, lam, mask, is_causal, **more), finish, False)

    return attend


def _dint_mean(core: Any, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, given: Any) -> Mean:
    """G of DINT's ``core``, block by block: what the queries before ``rows`` add is computed from their maps."""
    continues = given.continues(q.shape[2])

    def mean(call: AttentionCall, rows: slice, first: Tensor, change: Change | None) -> Tensor:
        if continues:
            raise ValueError(
                "the attention of 'dint' is a mean over all queries so far, and the cache does not keep their maps; "
                "give the whole sequence in one call"
            )
        weights, blind = core.counted(q, k, mask, is_causal, given)
        running = core.is_causal or is_causal
        start, stop, _ = rows.indices(q.shape[2])
        others = [(0, start)] if running else [(0, start), (stop, q.shape[2])]
        total = first.new_zeros(*first.shape[:2], 1, first.shape[3])
        for begin, end in others:
            for block in call.blocks():
                part = slice(max(begin, block.start), min(end, block.stop))
                if part.start < part.stop:
                    total = total + (call.maps(part, change)[0] * weights[:, :, part]).sum(2, keepdim=True)
        kept = first * weights[:, :, rows]
        counts = weights.to(first.dtype)
        if running:
            found = (total + kept.cumsum(2)) / counts.cumsum(2)[:, :, rows].clamp_min(1)
        else:
            found = ((total + kept.sum(2, keepdim=True)) / counts.sum(2, keepdim=True).clamp_min(1)).expand_as(first)
        return found if blind is None else found.masked_fill(blind[:, :, rows], 0)

    return mean
