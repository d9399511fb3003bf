"""DINT (arXiv 2501.17486): differential attention plus the mean of the first map, so that rows sum to 1.

    A = A1 - lambda A2 + lambda G,        G[t, s] = mean of A1[t', s] over queries t'

**Not causal**: the mean is over all queries. All rows of G are equal: the column means of A1.

**Causal**: row t must not depend on later queries, so its mean is over the queries t' <= t. A1[t', s] is 0 for s > t',
hence G[t, s] is 0 for s > t: G is causal. Each A1[t', :] sums to 1 and so does their mean, so the rows of A sum to
1 - lambda + lambda = 1. Since every G[t, :] is a mean of rows of A1,

    (G V)[t] = mean of (A1 V)[t'] over t' <= t,

the running mean of A1 V: no map is needed. Decoding needs the sum of A1 V over the queries so far and their number,
h (dv + 1) numbers for each layer beside the key/value cache.

Padding and fully masked queries do not count; a fully masked query gives 0. In packed documents the mean restarts in
each document. A mask does not restart it: the model rejects masks under which a later query sees less than an earlier
one; the layer alone does not check this. Lambda, head norm and the factor 1 - lambda_init are those of ``DiffCore``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from diff_transformer.model.cores import DiffCore, Lambda
from diff_transformer.model.inputs import Visible, as_boolean
from diff_transformer.model.lambdas import LambdaModule
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops.arguments import exporting, traced
from diff_transformer.ops.masking import fully_masked_rows
from diff_transformer.ops.reference import DiffMaps


class RunningMean(NamedTuple):
    """The mean over earlier queries, which a cache keeps, and which queries of this call count.

    tokens: bool ``[B, T]``, False for padding; None if there is no padding.
    layer: layer of a cache that keeps the sum of A1 V over the earlier queries and their number, fp32
        ``[B, h, dv + 1]``.
    """

    tokens: Tensor | None = None
    layer: Any = None

    @property
    def before(self) -> Tensor | None:
        held = None if self.layer is None else self.layer.conv_states[0]
        return None if held is None or not self.layer.has_previous_state[0] else held[..., -1]

    def continues(self, queries: int) -> bool:
        """Whether the cache, which already has the keys of this call's ``queries``, also has earlier ones."""
        return self.layer is not None and bool(self.layer.get_seq_length() > queries)


class _Following:
    """Mixin of a dynamic cache's layer: what changes its batch also changes the running mean.

    transformers repeats and selects keys and values alone.
    """

    conv_states: dict[int, Tensor | None]

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # ty: ignore[missing-attribute]
        self._change(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # ty: ignore[missing-attribute]
        self._change(lambda state: state[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.conv_states = {i: None if x is None else change(x) for i, x in self.conv_states.items()}

    def __reduce__(self):
        return _follow, (type(self).__mro__[2], self.__dict__)


@cache
def _following(kind: type) -> type:
    return type(kind.__name__, (_Following, kind), {})


def _follow(kind: type, state: dict) -> Any:
    """A layer of ``kind`` with this state, which it shares, whose running mean follows its batch."""
    layer = object.__new__(_following(kind))
    layer.__dict__ = state
    return layer


class DintCore(DiffCore):
    """The core of DINT: two calls of ``diff_attention``, one for A1 - lambda A2 and one for A1.

    ``is_causal``: always take running means, even if a call expresses its causal limit by a mask. Otherwise the mean is
    over all queries unless the call itself is causal.
    """

    def __init__(
        self, lam: LambdaModule, head_norm: RMSNorm | None = None, backend: str = "auto", *, is_causal: bool = True
    ):
        super().__init__(lam, head_norm, backend)
        self.is_causal = is_causal

    def call_state(self, cache, layer_idx: int, tokens: Tensor | None) -> dict[str, RunningMean]:
        """The running mean that ``cache`` keeps for this layer.

        Raises:
            ValueError: for a cache that cannot keep it (in an exported program, a static one), or attention that is not
                causal.
        """
        if cache is None:
            return {"running": RunningMean(tokens)}
        layers = getattr(cache, "layers", None)  # a paged cache has none
        layer = layers[layer_idx] if isinstance(layers, list) else None
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            raise ValueError(
                f"attention='dint' keeps a running mean beside keys and values, for which this {type(cache).__name__} "
                "has no place; make the cache with DynamicCache(config=model.config) or "
                "StaticCache(config=model.config, max_cache_len=...)"
            )
        if exporting() and getattr(cache, "is_compileable", False):
            raise ValueError(
                "attention='dint' keeps a running mean beside keys and values, which an exported program with a static "
                "cache would lose after its first step; export it with use_cache=False"
            )
        if hasattr(layer, "batch_select_indices") and not isinstance(layer, _Following) and not traced():
            layer = cache.layers[layer_idx] = _follow(type(layer), layer.__dict__)
        if not self.is_causal:
            raise ValueError("attention='dint' without causal limit needs all queries at once; leave out the cache")
        return {"running": RunningMean(tokens, layer)}

    def attend(self, q, k, v, lam: Lambda, visible: Visible, running: RunningMean = RunningMean()) -> Tensor:  # noqa: B008
        """``(A1 - lambda A2 + lambda G) V``, before the head norm: ``[B, h, T, dv]``."""
        difference = super().attend(q, k, v, lam, visible)
        first = super().attend(q, k, v, 0.0, visible)
        counted = self.counted(q, k, visible, running)
        return self.with_means(difference, first, lam, counted, visible.is_causal, running)

    def counted(self, q: Tensor, k: Tensor, visible: Visible, running: RunningMean) -> "Counted":
        """Which queries of a call count."""
        mask = None if visible.mask is None else as_boolean(visible.mask)
        mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
        fully_masked = fully_masked_rows(q.shape[2], k.shape[2], visible.is_causal, None, mask, q.device)
        counts = torch.ones(1, 1, q.shape[2], 1, dtype=torch.bool, device=q.device)
        if running.tokens is not None:
            counts = running.tokens[:, None, :, None]
        return Counted(counts if fully_masked is None else counts & ~fully_masked, fully_masked)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, hidden_states: Tensor | None) -> None:
        """The CPU kernel has no means of maps: the modules run."""
        return None

    def with_means(
        self, difference: Tensor, first: Tensor, lam: Lambda, counted: "Counted", is_causal: bool, running: RunningMean
    ) -> Tensor:
        """``difference + lambda mean(first)`` for (A1 - lambda A2) V and A1 V, ``[B, h, T, dv]``; updates the cache."""
        wide = torch.promote_types(first.dtype, torch.float32)
        weights = counted.weights.to(wide)  # [B|1, h|1, T, 1]
        sums = torch.cat((first.to(wide) * weights, weights.expand(*first.shape[:3], 1)), dim=-1)  # [B, h, T, dv + 1]
        if self.is_causal or is_causal:
            sums = sums.cumsum(2)
            if running.before is not None:
                sums = sums + running.before[:, :, None]
            if running.layer is not None:
                # Kept where a convolution's last input would be: unlike a recurrent state, a cache can crop it.
                running.layer.update_conv_state(sums.transpose(2, 3), conv_kernel_size=1)
        else:
            sums = sums.sum(2, keepdim=True)
        out = difference.to(wide) + lam * (sums[..., :-1] / sums[..., -1:].clamp_min(1))
        if counted.fully_masked is not None:
            out = out.masked_fill(counted.fully_masked, 0)
        return out.to(difference.dtype)

    def attend_documents(self, q, k, v, lam: Lambda, visible: Visible) -> Tensor:
        """``attend`` within each packed document: ``[B * T, h, dv]``.

        Running sums over all documents, in fp64, minus the sum at the document's start: exact to fp32's rounding.
        """
        assert visible.documents is not None
        difference = super().attend_documents(q, k, v, lam, visible)
        first = super().attend_documents(q, k, v, 0.0, visible)
        ends, total = visible.documents.cu_seqlens.long(), len(first)
        lengths = ends.diff()
        sums = torch.cat((first.new_zeros(1, *first.shape[1:], dtype=torch.float64), first.double().cumsum(0)))
        starts = torch.repeat_interleave(ends[:-1], lengths, output_size=total)  # [B * T]
        if self.is_causal or visible.is_causal:
            last = torch.arange(1, total + 1, device=first.device)
        else:
            last = torch.repeat_interleave(ends[1:], lengths, output_size=total)
        mean = (sums[last] - sums[starts]) / (last - starts)[:, None, None]
        wide = torch.promote_types(first.dtype, torch.float32)
        return (difference.to(wide) + lam * mean.to(wide)).to(difference.dtype)

    def forward_with_maps(self, q, k, v, visible: Visible, **state) -> tuple:
        """As in ``Core``; where the output follows from the maps, ``forward`` still updates the mean in the cache."""
        if self.output_follows_maps() and state["running"].layer is not None:
            self(q, k, v, visible, **state)
        return super().forward_with_maps(q, k, v, visible, **state)

    def maps(
        self,
        q,
        k,
        visible: Visible,
        *,
        hidden_states: Tensor | None = None,
        running: RunningMean = RunningMean(),  # noqa: B008
    ) -> DiffMaps:
        """Both maps and ``A1 - lambda A2 + lambda G``, each ``[B, h, T, S]``.

        Raises:
            ValueError: if the cache has earlier queries, since their first maps are not kept.
        """
        if running.continues(q.shape[2]):
            raise ValueError(
                "the attention map of attention='dint' is a mean over all queries so far, and the cache does not keep "
                "their maps; give the whole sequence in one call"
            )
        first, second, difference = super().maps(q, k, visible)
        mean = self.mean_map(first, self.counted(q, k, visible, running), visible.is_causal)
        return DiffMaps(first, second, difference + self.lam() * mean)

    def mean_map(self, first: Tensor, counted: "Counted", is_causal: bool) -> Tensor:
        """G for the first map ``[B, h, T, S]``; 0 in fully masked rows."""
        weights = counted.weights.to(first.dtype)
        kept = first * weights
        if self.is_causal or is_causal:
            mean = kept.cumsum(2) / weights.cumsum(2).clamp_min(1)
        else:
            mean = (kept.sum(2, keepdim=True) / weights.sum(2, keepdim=True).clamp_min(1)).expand_as(first)
        return mean if counted.fully_masked is None else mean.masked_fill(counted.fully_masked, 0)


class Counted(NamedTuple):
    """Queries of a call, bool ``[B|1, h|1, T, 1]``.

    weights: True for queries that count in means.
    fully_masked: True for queries that may attend to nothing; None if there are none.
    """

    weights: Tensor
    fully_masked: Tensor | None
