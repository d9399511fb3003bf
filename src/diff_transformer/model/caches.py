"""Write to and read from transformers' caches, dynamic and static.

A static cache needs keys and values with equally many heads. Differential attention has m key heads of width d and
g = m / 2 value heads of width 2d: the same numbers, viewed in another shape. Legend: B batch, T new tokens, S keys.
"""

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from diff_transformer.ops.masking import one_mask

# transformers' name for a model's cache, as an argument and in outputs: "cache" from version 5.24 on. The models here
# take both.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def is_static(cache) -> bool:
    """True for a static cache of transformers, whose unused slots need a mask."""
    return getattr(cache, "is_compileable", False)


def mask_unused_slots(
    cache, layer_idx: int, queries: int, mask: Tensor | None, is_causal: bool, window: int | None, device
) -> tuple[Tensor | None, bool]:
    """Add the unused slots of a static cache to ``mask``, and the causal limit if ``is_causal``; call before updating.

    Returns:
        The mask and whether the operator must still apply its causal limit. Both are returned as given for a dynamic
        cache, which has no unused slots, and for a complete mask.
    """
    if not is_static(cache) or not (is_causal or mask is None):
        return mask, is_causal
    keys, first = cache.get_mask_sizes(queries, layer_idx)
    start = cache.get_seq_length(layer_idx)
    key = torch.arange(keys, device=device)[None] + first  # [1, S]
    if is_causal:
        own = torch.arange(queries, device=device)[:, None] + start  # [T, 1]
        used = key <= own if window is None else (key <= own) & (key > own - window)
    else:
        used = key < start + queries
    return one_mask(used, mask), False


def update_cache(cache, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Append a layer's new keys ``[B, m, T, d]`` and values ``[B, g, T, dv]``; return all keys and values.

    A dynamic cache keeps these shapes. In a static cache, which the first call allocates, the two keys of a value head
    lie side by side: its keys are ``[B, g, S, 2d]``.
    """
    if v.shape[1] != k.shape[1] and is_static(cache):
        k = k.unflatten(1, (v.shape[1], -1)).transpose(2, 3).flatten(-2)  # [B, g, T, 2d]
    return cache.update(k, v, layer_idx)
