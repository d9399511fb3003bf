"""The formula in ``jax.numpy`` on checked arguments, for whole maps or for one block of queries at a time.

Shapes: B batch, T queries, S keys, D query width, Dv value width. Heads are grouped by what they share: G key/value
heads, n noise heads of each, r signal heads of each of those; H = G n r and Hn = G n. A size may be 1 to broadcast.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


@partial(jax.jit, static_argnames=("is_causal", "window", "scale", "block_size", "precision"))
def attend(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, block_size, precision) -> Array:
    """(first - lam * second) v, [B, H, T, Dv] in the dtype of v."""
    (B, H, T, _), S = q1.shape, k1.shape[2]
    q1, q2, lam, attn_mask = _by_shared_head(q1, q2, k1, lam, attn_mask)
    dtype, wide = v.dtype, jnp.promote_types(v.dtype, jnp.float32)

    def rows(q1, q2, lam, attn_mask, start, keys) -> Array:  # [B, G, n, r, rows of the block, Dv]
        k1, k2, v = (x.astype(dtype) for x in keys)
        seen = _seen(start, q1.shape[4], T, S, is_causal, window)
        first = _map(q1, k1, seen, attn_mask, scale, precision)
        second = _map(q2, k2, seen, attn_mask, scale, precision)
        difference = (first - lam * second).astype(dtype)
        product = partial(jnp.einsum, precision=precision, preferred_element_type=wide)
        return product("bgnrts,bgsv->bgnrtv", difference, v).astype(dtype)

    if block_size is None or block_size >= T:
        return rows(q1, q2, lam, attn_mask, 0, (k1, k2, v)).reshape(B, H, T, v.shape[3])

    count = -(-T // block_size)
    starts = jnp.arange(count) * block_size
    by_query = [None if x is None else _blocks(x, T, count, block_size) for x in (q1, q2, lam, attn_mask)]
    sliced = [x is not None and x.ndim == 7 for x in by_query]
    keys = tuple(x.astype(wide) for x in (k1, k2, v))  # so that the gradients of all blocks are summed in fp32

    @jax.checkpoint
    def one(block) -> Array:
        start, parts = block[0], iter(block[1:])
        return rows(*(next(parts) if cut else x for cut, x in zip(sliced, by_query, strict=True)), start, keys)

    out = jax.lax.map(one, (starts, *(x for cut, x in zip(sliced, by_query, strict=True) if cut)))
    out = jnp.moveaxis(out, 0, 4)  # [B, G, n, r, blocks, rows, Dv]
    return out.reshape(B, H, count * block_size, v.shape[3])[:, :, :T]


@partial(jax.jit, static_argnames=("is_causal", "window", "scale", "precision"))
def maps(q1, q2, k1, k2, lam, attn_mask, is_causal, window, scale, precision) -> tuple[Array, Array, Array]:
    """Both maps and their difference, each [B, H, T, S] in fp32 (fp64 for fp64 inputs)."""
    (B, H, T, _), S = q1.shape, k1.shape[2]
    q1, q2, lam, attn_mask = _by_shared_head(q1, q2, k1, lam, attn_mask)
    seen = _seen(0, T, T, S, is_causal, window)
    first = _map(q1, k1, seen, attn_mask, scale, precision)
    second = jnp.broadcast_to(_map(q2, k2, seen, attn_mask, scale, precision), first.shape)
    shape = (B, H, T, S)
    return first.reshape(shape), second.reshape(shape), (first - lam * second).reshape(shape)


def _by_shared_head(q1, q2, k1, lam, attn_mask):
    """The arrays with a row for each query, heads split into [G, n, r]: [B|1, G|1, n|1, r|1, T|1, width]."""
    H, Hn, G = q1.shape[1], q2.shape[1], k1.shape[1]

    def split(x, heads):
        if x is None:
            return None
        return x.reshape(x.shape[0], *(heads if x.shape[1] > 1 else (1, 1, 1)), *x.shape[2:])

    every = (G, Hn // G, H // Hn)
    return split(q1, every), split(q2, (G, Hn // G, 1)), split(lam, every), split(attn_mask, every)


def _blocks(x: Array, T: int, count: int, size: int) -> Array:
    """[..., T, width] as [count, ..., size, width], zero-padded; an array with one row for all queries is unchanged."""
    if x.shape[4] != T:
        return x
    padded = jnp.pad(x, [(0, 0)] * 4 + [(0, count * size - T), (0, 0)])
    return jnp.moveaxis(padded.reshape(*x.shape[:4], count, size, x.shape[5]), 4, 0)


def _seen(start, rows: int, T: int, S: int, is_causal: bool, window: int | None) -> Array | None:
    """True where queries ``start`` to ``start + rows - 1`` may see a key by its position, [rows, S]; None: all."""
    if not is_causal:
        return None
    own = (start + jnp.arange(rows) + S - T)[:, None]  # a query's own key position: the last query at the last key
    key = jnp.arange(S)
    seen = key <= own
    return seen if window is None else seen & (key > own - window)


def _map(q: Array, k: Array, seen, attn_mask, scale: float, precision: str) -> Array:
    """softmax(q k^T scale) over the visible keys, in fp32 or fp64; a fully masked row is 0.

    The maximum and the sum of such a row are replaced by finite numbers before use, so that its gradients are 0 too.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bgnrtd,bgsd->bgnrts", q, k, precision=precision, preferred_element_type=wide) * scale
    if attn_mask is not None and attn_mask.dtype == bool:
        seen = attn_mask if seen is None else seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.astype(wide)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    row_max = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(row_max == -jnp.inf, 0, row_max))
    row_sum = weights.sum(-1, keepdims=True)
    return weights / jnp.where(row_sum == 0, 1, row_sum)
