"""The keys that the tokens of a forward pass see: causal masks, padding, packed documents.

Legend: B batch, T queries, S keys (cached and new).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from diff_transformer.model.caches import is_static
from diff_transformer.model.heads import CORES
from diff_transformer.ops.arguments import traced

# Masks.


class Visible(NamedTuple):
    """The keys that the queries of a call see; a model builds it once for all layers, a layer alone by itself."""

    mask: Tensor | None = None  # bool (True = see) or additive, broadcastable to [B, heads, T, S]; None for all keys
    is_causal: bool = True  # of these, those up to the query's own position, aligned to the lower right corner
    window: int | None = None  # of these, the last; only with ``is_causal``
    documents: "Packing | None" = None  # packed: of these, those of the query's own document; excludes a mask
    tokens: Tensor | None = None  # queries that are not padding, bool [B, T], where only "dint" needs to know


def visible_of(
    config, inputs_embeds: Tensor, attention_mask: Tensor | None, cache, position_ids: Tensor | None
) -> Visible:
    """The keys that the tokens of a model's forward pass see, without packed documents.

    The causal limit and the window of the operator are enough if no token is padding: each query sees every key up to
    its own position, and the last query is aligned with the last key. Padding adds a mask of the keys,
    ``[B, 1, 1, S]``, which ``diff_attention`` takes beside them. For one map the mask is complete, bool or additive
    ``[B, 1, T, S]``.

    Args:
        attention_mask: ``[B, S]``, 0 where a token is padding; or a ready mask of four dimensions, used as it is.
        cache: the transformers ``Cache`` of the earlier tokens, or None. The unused slots of a static cache need a
            complete mask.
        position_ids: ``[B, T]`` if the caller gave them: without mask and cache they may describe packed documents.
    """
    queries, tokens = inputs_embeds.shape[1], None
    if CORES[config.attention].means and attention_mask is not None and attention_mask.dim() == 2:
        tokens = attention_mask.bool()
    packed = position_ids is not None and cache is None and attention_mask is None
    packed = packed and (traced() or restarts(position_ids))  # in a graph, positions cannot be read
    if not is_static(cache) and not packed:
        keys = None if _keeps_all(attention_mask) else _key_mask(config, queries, attention_mask, cache)
        if keys is not None or _keeps_all(attention_mask):
            return Visible(keys, True, config.sliding_window, None, tokens)
    create = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    mask: Any = create(
        config,
        inputs_embeds,
        attention_mask,
        cache,
        position_ids=position_ids if packed else None,
        allow_is_causal_skip=False,
    )
    return Visible(mask, mask is None, config.sliding_window if mask is None else None, None, tokens)


def _key_mask(config, queries: int, attention_mask: Tensor | None, cache) -> Tensor | None:
    """The keys that are not padding, bool ``[B, 1, 1, S]``; None for one map, or a mask that is not of the keys."""
    if attention_mask is None or attention_mask.dim() != 2 or CORES[config.attention].maps == 1:
        return None
    keys, first = (queries, 0) if cache is None else cache.get_mask_sizes(queries, 0)
    if attention_mask.shape[1] != first + keys:
        return None
    return attention_mask[:, first:].bool()[:, None, None]


def _keeps_all(attention_mask: Tensor | None) -> bool:
    """True if no token is padding; while a graph is traced a mask cannot be read, so it counts as padding."""
    if attention_mask is None:
        return True
    return attention_mask.dim() == 2 and not traced() and bool(attention_mask.all())


# Packed documents: several documents in one row of tokens; no token attends to another document.


class Packing(NamedTuple):
    """The bounds of a batch's documents, its rows concatenated.

    cu_seqlens: int32 [documents + 1], 0 and then the end of each document.
    longest: tokens of the longest document.
    """

    cu_seqlens: Tensor
    longest: int

    def positions(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Each token's position in its document, int64 of ``shape`` [B, T]."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
        return (torch.arange(len(starts), device=starts.device) - starts).view(shape)


def split_documents(ids: Tensor, eos_id: int) -> Packing:
    """The documents of ``ids [B, T]``: each ends with the token ``eos_id`` or at the end of its row."""
    ends = ids == eos_id
    ends[:, -1] = True
    return _ending_at(ends)


def documents_at(position_ids: Tensor, batch: int) -> Packing:
    """The documents that ``position_ids [B or 1, T]`` describe in ``batch`` rows; none spans two rows."""
    ends = torch.ones_like(position_ids, dtype=torch.bool)
    ends[:, :-1] = position_ids.diff(dim=-1) != 1
    return _ending_at(ends.expand(batch, -1))


def restarts(position_ids: Tensor) -> bool:
    """True if ``position_ids [B, T]`` do not increase by one somewhere in a row: there another document begins."""
    return bool((position_ids.diff(dim=-1) != 1).any())


def _ending_at(ends: Tensor) -> Packing:
    after = ends.flatten().nonzero().flatten() + 1
    bounds = torch.cat((after.new_zeros(1), after)).to(torch.int32)
    return Packing(bounds, int(bounds.diff().max()))
