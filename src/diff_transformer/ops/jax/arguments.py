"""Checks the arguments of the JAX operator and brings lam, attn_mask and scale into one form."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from diff_transformer.ops.arguments import broadcasts, check_head_counts, check_options, flag, integer, real

DTYPES = ("float32", "bfloat16", "float16", "float64")


def check(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, block_size):
    """The canonical arguments (q1, q2, k1, k2, v, lam, attn_mask, window, scale).

    Raises what ``diff_attention`` documents.

    lam is 4-dimensional and broadcasts to [B, H, T, 1], in fp32 (fp64 for fp64 inputs). attn_mask is None or
    4-dimensional and broadcasts to [B, H, T, S].
    """
    arrays = {"q1": q1, "q2": q2, "k1": k1, "k2": k2} | ({} if v is None else {"v": v})
    arrays = {name: _array(name, x) for name, x in arrays.items()}
    _check_shapes(arrays)
    q1 = arrays["q1"]
    flag("is_causal", is_causal)
    lengths = q1.shape[2], arrays["k1"].shape[2]
    window, scale = check_options(is_causal, window, scale, lengths, q1.shape[3])
    if block_size is not None and integer("block_size", block_size, "an int or None") < 1:
        raise ValueError(f"block_size is {block_size}; give at least 1 or None")
    tensors = *(arrays[name] for name in ("q1", "q2", "k1", "k2")), arrays.get("v")
    return *tensors, _lam(lam, q1), _mask(attn_mask, (*q1.shape[:2], *lengths)), window, scale


def _array(name: str, x) -> Array:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name} is a {type(x).__name__}; give a jax.Array of shape [batch, heads, length, width]")
    return jnp.asarray(x)


def _check_shapes(arrays: dict[str, Array]) -> None:
    q1 = arrays["q1"]
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(
                f"{name} has {x.ndim} dimensions (shape {list(x.shape)}); give [batch, heads, length, width]"
            )
        if 0 in (x.shape[1], x.shape[3]):
            raise ValueError(f"{name} has shape {list(x.shape)}; give at least 1 head of width 1 or more")
    for name, x in arrays.items():
        if x.dtype.name not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; give {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        if x.dtype != q1.dtype:
            raise TypeError(f"q1 is {q1.dtype} and {name} is {x.dtype}; cast them to one dtype")
    like = {"q2": ("q1", (0, 2, 3)), "k1": ("q1", (0, 3)), "k2": ("k1", (0, 1, 2, 3)), "v": ("k1", (0, 1, 2))}
    words = ("batch", "number of heads", "length", "width")
    for name, (other, dimensions) in like.items():
        for i in dimensions if name in arrays else ():
            mine, needed = arrays[name].shape[i], arrays[other].shape[i]
            if mine != needed:
                raise ValueError(f"{other} has {words[i]} {needed} and {name} has {words[i]} {mine}; make them equal")
    check_head_counts(q1.shape[1], arrays["q2"].shape[1], arrays["k1"].shape[1])


def _lam(lam, q1: Array) -> Array:
    B, H, T, _ = q1.shape
    dtype = jnp.promote_types(q1.dtype, jnp.float32)
    if not isinstance(lam, jax.Array | np.ndarray):
        return jnp.full((1, 1, 1, 1), real("lam", lam, "a number or an array"), dtype)
    if not jnp.issubdtype(lam.dtype, jnp.floating):
        raise TypeError(f"lam has dtype {lam.dtype}; give a floating-point array (float32 is what is computed with)")
    given, lam = lam.shape, jnp.asarray(lam).astype(dtype)
    if lam.ndim == 0:
        return lam.reshape(1, 1, 1, 1)
    if lam.ndim == 1 and given[0] in (1, H):
        return lam[None, :, None, None]
    if lam.ndim > 1 and broadcasts(given, (B, H, T, 1)):
        return lam[(None,) * (4 - lam.ndim)]
    raise ValueError(
        f"lam has shape {list(given)}; give a number, a scalar, [{H}] (one per head) "
        f"or dimensions that broadcast to [{B}, {H}, {T}, 1]"
    )


def _mask(attn_mask, full: tuple[int, ...]) -> Array | None:
    if attn_mask is None:
        return None
    if not isinstance(attn_mask, jax.Array | np.ndarray):
        raise TypeError(f"attn_mask is a {type(attn_mask).__name__}; give an array or None")
    if attn_mask.dtype != bool and not jnp.issubdtype(attn_mask.dtype, jnp.floating):
        raise TypeError(
            f"attn_mask has dtype {attn_mask.dtype}; give bool (True = attend) or a floating-point mask that is added"
        )
    if not broadcasts(attn_mask.shape, full):
        raise ValueError(f"attn_mask has shape {list(attn_mask.shape)}, which does not broadcast to {list(full)}")
    return jnp.asarray(attn_mask)[(None,) * (4 - attn_mask.ndim)]
