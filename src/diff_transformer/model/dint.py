"""DINT (arXiv 2501.17486): differential attention plus the mean of the first map, whose rows sum to 1.

    A = A1 - lambda A2 + lambda G,        G[t, s] = mean of A1[t', s] over queries t'

**Not causal**: the mean is over all queries, the column means of A1, so all rows of G are one row.

**Causal**: a query may know nothing of later ones, so the mean of row t is over the queries t' <= t. A1[t', s] is 0 for
s > t', hence G[t, s] is 0 for s > t: G is causal. Each A1[t', :] sums to 1 and so does their mean, so the rows of A
sum to 1 - lambda + lambda = 1, as without the causal limit. Since every G[t, :] is a mean of rows of A1,

    (G V)[t] = mean of (A1 V)[t'] over t' <= t,

the running mean of the first map's products with V: no map is needed, and decoding needs the sum of A1 V over the
queries so far and their number, h (dv + 1) numbers a layer beside the key/value cache.

Queries that may attend to nothing, and padding, do not count; a query that may attend to nothing gives 0. In packed
documents the mean begins anew in each. A mask does not make it begin anew: the model refuses masks under which a later
query sees less than an earlier one; the layer alone does not look. lambda, head norm and the factor 1 - lambda_init are
those of ``DiffCore``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from diff_transformer.model.cores import DiffCore, Lambda
from diff_transformer.model.documents import Documents
from diff_transformer.model.lambdas import LambdaModule
from diff_transformer.model.layers import RMSNorm
from diff_transformer.ops.masking import rows_that_see_nothing
from diff_transformer.ops.reference import DiffMaps


class Rows(NamedTuple):
    """What the queries of a call follow, and which of them count.

    tokens: bool ``[B, T]``, False for padding; None where there is none.
    layer: layer of a cache that holds the sum of A1 V and the number of queries before, fp32 ``[B, h, dv + 1]``.
    """

    tokens: Tensor | None = None
    layer: Any = None

    @property
    def before(self) -> Tensor | None:
        held = None if self.layer is None else self.layer.conv_states[0]
        return None if held is None or not self.layer.has_previous_state[0] else held[..., -1]

    def continues(self, queries: int) -> bool:
        """Whether the cache, which already holds the keys of this call's ``queries``, began with earlier ones."""
        return self.layer is not None and bool(self.layer.get_seq_length() > queries)


class DintCore(DiffCore):
    """The core of DINT: through the backends of ``diff_attention``, called once for A1 - lambda A2 and once for A1.

    ``is_causal``: running means, however a call expresses its causal limit; else means over all queries, unless a call
    is causal.
    """

    def __init__(
        self, lam: LambdaModule, head_norm: RMSNorm | None = None, backend: str = "auto", *, is_causal: bool = True
    ):
        super().__init__(lam, head_norm, backend)
        self.is_causal = is_causal

    def rows(self, cache, layer_idx: int, tokens: Tensor | None) -> dict[str, Rows]:
        if cache is None:
            return {"rows": Rows(tokens)}
        layers = getattr(cache, "layers", None)  # a paged cache has none
        layer = layers[layer_idx] if isinstance(layers, list) else None
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            raise ValueError(
                f"attention='dint' keeps a running mean beside keys and values, for which this {type(cache).__name__} "
                "has no place; make the cache with DynamicCache(config=model.config) or "
                "StaticCache(config=model.config, max_cache_len=...)"
            )
        if not self.is_causal:
            raise ValueError("attention='dint' without causal limit needs all queries at once; leave out the cache")
        return {"rows": Rows(tokens, layer)}

    def attend(self, q, k, v, lam: Lambda, attn_mask, is_causal: bool, rows: Rows = Rows()) -> Tensor:  # noqa: B008
        """``(A1 - lambda A2 + lambda G) V``, before the head norm: ``[B, h, T, dv]``."""
        difference = super().attend(q, k, v, lam, attn_mask, is_causal)
        first = super().attend(q, k, v, 0.0, attn_mask, is_causal)
        return self.with_means(difference, first, lam, self.counted(q, k, attn_mask, is_causal, rows), is_causal, rows)

    def counted(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, rows: Rows) -> "Counted":
        """Which queries of a call count."""
        if attn_mask is not None:
            attn_mask = _seen(attn_mask)
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        blind = rows_that_see_nothing(q.shape[2], k.shape[2], is_causal, None, attn_mask, q.device)
        counts = torch.ones(1, 1, q.shape[2], 1, dtype=torch.bool, device=q.device)
        if rows.tokens is not None:
            counts = rows.tokens[:, None, :, None]
        return Counted(counts if blind is None else counts & ~blind, blind)

    def with_means(
        self, difference: Tensor, first: Tensor, lam: Lambda, counted: "Counted", is_causal: bool, rows: Rows
    ) -> Tensor:
        """``difference + lambda mean(first)`` of (A1 - lambda A2) V and A1 V, ``[B, h, T, dv]``; keeps the sums."""
        wide = torch.promote_types(first.dtype, torch.float32)
        weights = counted.weights.to(wide)  # [B|1, h|1, T, 1]
        sums = torch.cat((first.to(wide) * weights, weights.expand(*first.shape[:3], 1)), dim=-1)  # [B, h, T, dv + 1]
        if self.is_causal or is_causal:
            sums = sums.cumsum(2)
            if rows.before is not None:
                sums = sums + rows.before[:, :, None]
            if rows.layer is not None:
                # In the place of a convolution's last input: unlike a recurrent state, a cache can cut that back.
                rows.layer.update_conv_state(sums.transpose(2, 3), conv_kernel_size=1)
        else:
            sums = sums.sum(2, keepdim=True)
        out = difference.to(wide) + lam * (sums[..., :-1] / sums[..., -1:].clamp_min(1))
        return (out if counted.blind is None else out.masked_fill(counted.blind, 0)).to(difference.dtype)

    def attend_documents(self, q, k, v, lam: Lambda, documents: Documents, is_causal: bool) -> Tensor:
        """The same within each of the packed documents: ``[B * T, h, dv]``.

        The sums run over all documents, in fp64, and each document's begin is taken off: exact to fp32's rounding.
        """
        difference = super().attend_documents(q, k, v, lam, documents, is_causal)
        first = super().attend_documents(q, k, v, 0.0, documents, is_causal)
        ends, total = documents.cu_seqlens.long(), len(first)
        lengths = ends.diff()
        sums = torch.cat((first.new_zeros(1, *first.shape[1:], dtype=torch.float64), first.double().cumsum(0)))
        starts = torch.repeat_interleave(ends[:-1], lengths, output_size=total)  # [B * T]
        if self.is_causal or is_causal:
            last = torch.arange(1, total + 1, device=first.device)
        else:
            last = torch.repeat_interleave(ends[1:], lengths, output_size=total)
        mean = (sums[last] - sums[starts]) / (last - starts)[:, None, None]
        wide = torch.promote_types(first.dtype, torch.float32)
        return (difference.to(wide) + lam * mean.to(wide)).to(difference.dtype)

    def maps(
        self,
        q,
        k,
        attn_mask,
        is_causal: bool,
        *,
        hidden_states: Tensor | None = None,
        rows: Rows = Rows(),  # noqa: B008
    ) -> DiffMaps:
        """Both maps and ``A1 - lambda A2 + lambda G``, each ``[B, h, T, S]``.

        Raises:
            ValueError: where earlier queries, whose first map is not kept, are in the cache.
        """
        if rows.continues(q.shape[2]):
            raise ValueError(
                "the attention map of attention='dint' is a mean over all queries so far, and the cache does not keep "
                "their maps; give the whole sequence in one call"
            )
        first, second, difference = super().maps(q, k, attn_mask, is_causal)
        mean = self.mean_map(first, self.counted(q, k, attn_mask, is_causal, rows), is_causal)
        return DiffMaps(first, second, difference + self.lam() * mean)

    def mean_map(self, first: Tensor, counted: "Counted", is_causal: bool) -> Tensor:
        """G of the first map ``[B, h, T, S]``; 0 in rows that may attend to nothing."""
        weights = counted.weights.to(first.dtype)
        kept = first * weights
        if self.is_causal or is_causal:
            mean = kept.cumsum(2) / weights.cumsum(2).clamp_min(1)
        else:
            mean = (kept.sum(2, keepdim=True) / weights.sum(2, keepdim=True).clamp_min(1)).expand_as(first)
        return mean if counted.blind is None else mean.masked_fill(counted.blind, 0)


class Counted(NamedTuple):
    """weights: bool ``[B|1, h|1, T, 1]``, True for queries that enter means. blind: True for those that may attend to
    nothing, None where there are none."""

    weights: Tensor
    blind: Tensor | None


def padding_of(attention_mask: Any, queries: int) -> tuple[Any, Tensor | None]:
    """The model's ``attention_mask`` as its layers take it, and which of the ``queries`` newest positions are tokens.

    transformers gives a mask ``[B, past + T]``, one of four dimensions, or (preparing a step of generation) both in a
    dictionary.

    Raises:
        ValueError: for a mask of four dimensions under which a later query sees less than an earlier one.
    """
    if isinstance(attention_mask, dict):
        attention_mask, padding = attention_mask["full_attention"], attention_mask["linear_attention"]
        return attention_mask, None if padding is None else padding[:, -queries:].bool()
    if attention_mask is None or attention_mask.dim() != 2:
        if attention_mask is not None and queries > 1 and not torch.compiler.is_compiling():
            _refuse_loss_of_sight(attention_mask)
        return attention_mask, None
    return attention_mask, attention_mask[:, -queries:].bool()


def _seen(attn_mask: Tensor) -> Tensor:
    """True where a mask, bool or additive, lets a query see a key; transformers' hide by the smallest number."""
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask > torch.finfo(attn_mask.dtype).min / 2


def _refuse_loss_of_sight(attention_mask: Tensor) -> None:
    seen = _seen(attention_mask)
    lost = ~seen & (seen.cumsum(-2) > 0)
    if (lost & seen.any(-1, keepdim=True)).any():
        raise ValueError(
            "the mask lets a later query see less than an earlier one, but the running mean of attention='dint' is "
            "over all earlier queries; give packed documents as cu_seq_lens_q or as position_ids that begin anew, or "
            "take another attention"
        )
