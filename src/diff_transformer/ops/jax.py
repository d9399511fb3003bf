"""The operator in JAX: the names, shapes and meaning of ``diff_transformer.ops``, for jit, grad and vmap.

It is written in ``jax.numpy``, so that XLA compiles it for CPU, GPU and TPU. No other module of the package imports it,
and importing the package does not import JAX: pip install 'diff-transformer[jax]'.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from diff_transformer.errors import UserError
from diff_transformer.ops.arguments import FITTING, broadcasts, check_options, shapes_fit

DTYPES = ("float32", "bfloat16", "float16", "float64")


def diff_attention(
    q1: Array,
    q2: Array,
    k1: Array,
    k2: Array,
    v: Array,
    lam: float | Array,
    *,
    first: float | Array | None = None,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    precision: str = "highest",
) -> Array:
    """Differential attention: softmax(q1 k1^T scale) v - lam softmax(q2 k2^T scale) v (arXiv 2410.05258, eq. 1).

    The same operator as ``diff_transformer.diff_attention``: the maps are subtracted in fp32 (fp64 for fp64 inputs).
    The paper's head norm and its factor 1 - lambda_init are not part of it.

    Args:
        q1, q2, k1, k2, v, first, is_causal, window, scale: as there.
        lam: a number, or an array that is scalar, [H] or broadcastable to [B, H, T, 1]; computed with in fp32 (fp64).
        attn_mask: bool (True = attend) or floating, broadcastable to [B, H, T, S]. A floating one has a gradient.
        precision: of products of fp32 arrays, a name of ``jax.default_matmul_precision``; "default" lets a GPU or TPU
            round their inputs to fewer digits, which is faster. No effect on half-precision arrays.

    Flags and sizes are static arguments: close over them, or name them in ``jax.jit(..., static_argnames=)``.

    Returns:
        [B, H, T, Dv] in the dtype of v. A fully masked row is 0, and so are its gradients.

    Raises:
        UserError: arguments of a wrong type, or that do not fit together.
    """
    arrays, weights, mask, window, scale = _check((q1, q2, k1, k2, v), lam, first, attn_mask, is_causal, window, scale)
    return _attend(*arrays, *weights, mask, bool(is_causal), window, scale, precision)


def _check(tensors, lam, first, attn_mask, is_causal, window, scale):
    """(arrays, lam and first, mask, window, scale) of the arguments; raises what ``diff_attention`` documents.

    The weights are 4-dimensional and broadcast to [B, H, T, 1], in fp32 (fp64 for fp64 inputs); first may be None. The
    mask is None or 4-dimensional and broadcasts to [B, H, T, S].
    """
    q1, _, k1, _, _ = arrays = tuple(map(jnp.asarray, tensors))
    if not shapes_fit(*(x.shape for x in arrays)) or {x.dtype for x in arrays} not in [{jnp.dtype(x)} for x in DTYPES]:
        shapes = "; ".join(f"{x.shape}, {x.dtype}" for x in arrays)
        raise UserError(f"q1, q2, k1, k2 and v are {shapes}: give {FITTING}; all one of {', '.join(DTYPES)}")
    lengths = q1.shape[2], k1.shape[2]
    window, scale = check_options(is_causal, window, scale, lengths, q1.shape[3])
    weights = _weight("lam", lam, q1), None if first is None else _weight("first", first, q1)
    return arrays, weights, _mask(attn_mask, (*q1.shape[:2], *lengths)), window, scale


def _weight(name: str, x, q1: Array) -> Array:
    B, H, T, _ = q1.shape
    x = jnp.asarray(x, jnp.promote_types(q1.dtype, jnp.float32))
    if x.ndim == 1 and x.shape[0] in (1, H):
        return x[None, :, None, None]
    if x.ndim != 1 and broadcasts(x.shape, (B, H, T, 1)):
        return x[(None,) * (4 - x.ndim)]
    raise UserError(
        f"{name} has shape {list(x.shape)}; give a number, a scalar, [{H}] (one per head) "
        f"or dimensions that broadcast to [{B}, {H}, {T}, 1]"
    )


def _mask(attn_mask, full: tuple[int, ...]) -> Array | None:
    if attn_mask is None:
        return None
    attn_mask = jnp.asarray(attn_mask)
    if attn_mask.dtype != bool and not jnp.issubdtype(attn_mask.dtype, jnp.floating):
        raise UserError(f"attn_mask has dtype {attn_mask.dtype}; give bool (True = attend) or a floating-point mask")
    if not broadcasts(attn_mask.shape, full):
        raise UserError(f"attn_mask has shape {list(attn_mask.shape)}, which does not broadcast to {list(full)}")
    return attn_mask[(None,) * (4 - attn_mask.ndim)]


@partial(jax.jit, static_argnames=("is_causal", "window", "scale", "precision"))
def _attend(q1, q2, k1, k2, v, lam, weight, attn_mask, is_causal, window, scale, precision) -> Array:
    """(weight A1 - lam A2) v, [B, H, T, Dv] in the dtype of v."""
    H, wide = q1.shape[1], jnp.promote_types(v.dtype, jnp.float32)
    # repeated in fp32 (fp64), so that gradients of shared heads are summed in it
    q2, k1, k2, values = (jnp.repeat(x.astype(wide), H // x.shape[1], 1).astype(x.dtype) for x in (q2, k1, k2, v))
    seen = _seen(q1.shape[2], k1.shape[2], is_causal, window)
    first, second = (_map(q, k, seen, attn_mask, scale, precision) for q, k in ((q1, k1), (q2, k2)))
    difference = ((first if weight is None else weight * first) - lam * second).astype(v.dtype)
    product = partial(jnp.einsum, precision=precision, preferred_element_type=wide)
    return product("bhts,bhsv->bhtv", difference, values).astype(v.dtype)


def _seen(T: int, S: int, is_causal: bool, window: int | None) -> Array | None:
    """True where a query may see a key by its position, [T, S]; None: all."""
    if not is_causal:
        return None
    own = (jnp.arange(T) + S - T)[:, None]  # a query's own key position: the last query at the last key
    key = jnp.arange(S)
    seen = key <= own
    return seen if window is None else seen & (key > own - window)


def _map(q: Array, k: Array, seen, attn_mask, scale: float, precision: str) -> Array:
    """softmax(q k^T scale) over the visible keys, in fp32 or fp64; a fully masked row is 0.

    The maximum and the sum of such a row are replaced by finite numbers before use, so that its gradients are 0 too.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, precision=precision, preferred_element_type=wide) * scale
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
