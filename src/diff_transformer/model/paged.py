"""The paged cache of transformers' continuous batching: keys and values are equally many heads of one width."""

from torch import Tensor

HOW = "continuous batching needs attn_implementation='sdpa' or 'eager'"


def update_paged(
    cache, k: Tensor, v: Tensor, layer_idx: int, mask: Tensor | None, options: dict
) -> tuple[Tensor, Tensor]:
    """Write a layer's new keys and values, and read those of all requests, one request after another.

    Args:
        cache: transformers' ``PagedAttentionCache``.
        k: ``[1, m, T, d]``, T new tokens of all requests in a row. v: ``[1, g, T, dv]`` with ``g dv = m d``.
        mask: which of the keys that come back each token sees.
        options: what continuous batching passes beside them: where to write and what to read.

    Returns:
        ``k [1, m, S, d]`` and ``v [1, g, S, dv]``.

    Raises:
        ValueError: if values are more than keys, or for an attention implementation that has no mask here.
    """
    heads, parts = v.shape[1], v.shape[3] // k.shape[3]
    if mask is None:
        raise ValueError(f"no mask came with the paged cache; {HOW}")
    if heads * parts != k.shape[1]:
        raise ValueError(
            f"{k.shape[1]} key heads of width {k.shape[3]} and {heads} value heads of width {v.shape[3]}; the paged "
            "cache holds as many numbers for values as for keys"
        )
    narrow = v.unflatten(-1, (parts, -1)).transpose(2, 3).flatten(1, 2)  # [1, m, T, d]
    k, narrow = cache.update(k, narrow, layer_idx, options)
    return k, narrow.unflatten(1, (heads, parts)).transpose(2, 3).flatten(-2)
