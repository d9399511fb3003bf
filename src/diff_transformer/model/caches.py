"""Write to and read from transformers' caches, dynamic and static.

A static cache needs keys and values with equally many heads. Differential attention has m key heads of width d and
g = m / 2 value heads of width 2d: the same numbers, viewed in another shape. Legend: B batch, T new tokens, S keys.
"""

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

# transformers' name for a model's cache, as an argument and in outputs: "cache" from version 5.24 on. The models here
# take both.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def is_static(cache) -> bool:
    """True for a static cache of transformers, whose unused slots need a mask."""
    return getattr(cache, "is_compileable", False)


def update_cache(cache, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Append a layer's new keys ``[B, m, T, d]`` and values ``[B, g, T, dv]``; return all keys and values.

    A dynamic cache keeps these shapes. In a static cache, which the first call allocates, the two keys of a value head
    lie side by side: its keys are ``[B, g, S, 2d]``.
    """
    if v.shape[1] != k.shape[1] and is_static(cache):
        k = k.unflatten(1, (v.shape[1], -1)).transpose(2, 3).flatten(-2)  # [B, g, T, 2d]
    return cache.update(k, v, layer_idx)
