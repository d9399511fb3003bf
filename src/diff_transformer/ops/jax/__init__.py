"""The operator in JAX: the names, shapes and meaning of ``diff_transformer.ops``, for jit, grad and vmap.

It is written in ``jax.numpy``, so that XLA compiles it for CPU, GPU and TPU. No other module of the package imports it,
and importing the package does not import JAX.
"""

import importlib.util

if importlib.util.find_spec("jax") is None:
    raise ImportError(
        "diff_transformer.ops.jax needs JAX, which is not installed; install it (pip install 'diff-transformer[jax]'), "
        "or use diff_transformer.diff_attention, the same operator in PyTorch"
    )

from jax import Array

from diff_transformer.ops.jax.arguments import check
from diff_transformer.ops.jax.compute import attend, maps
from diff_transformer.ops.reference import DiffMaps

__all__ = ["DiffMaps", "diff_attention", "diff_attention_maps"]


def diff_attention(
    q1: Array,
    q2: Array,
    k1: Array,
    k2: Array,
    v: Array,
    lam: float | Array,
    *,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    block_size: int | None = None,
    precision: str = "highest",
) -> Array:
    """Differential attention: softmax(q1 k1^T scale) v - lam softmax(q2 k2^T scale) v (arXiv 2410.05258, eq. 1).

    The same operator as ``diff_transformer.diff_attention``: the maps are subtracted in fp32 (fp64 for fp64 inputs).
    The paper's head norm and its factor 1 - lambda_init are not part of it.

    Args:
        q1: queries of the signal map, [B, H, T, D]; float32, bfloat16, float16 or float64, like all arrays but lam.
        q2: queries of the noise map, [B, Hn, T, D]. Hn divides H; signal head j uses noise head j // (H // Hn).
        k1, k2: keys, [B, G, S, D]; k2 may be k1. G divides Hn; head j of n uses key/value head j // (n // G).
        v: values, [B, G, S, Dv]; Dv may differ from D (the paper has Dv = 2 D).
        lam: a number, or an array that is scalar, [H] or broadcastable to [B, H, T, 1]; computed with in fp32 (fp64).
        attn_mask: bool (True = attend) or floating (added to the scaled scores), broadcastable to [B, H, T, S], the
            same for both maps. A floating one has a gradient.
        is_causal: mask later keys; the last query is aligned to the last key (lower right corner).
        window: each query sees the last ``window`` keys up to its own position; needs is_causal.
        scale: factor of the scores, D ** -0.5 by default.
        block_size: None computes whole T x S maps. A number computes that many queries at a time, so that memory grows
            with block_size x S instead of T x S; the backward recomputes the maps. For long sequences.
        precision: of products of fp32 arrays, a name of ``jax.default_matmul_precision``; "default" lets a GPU or TPU
            round their inputs to fewer digits, which is faster. No effect on half-precision arrays.

    Flags and sizes are static arguments: close over them, or name them in ``jax.jit(..., static_argnames=)``.

    Returns:
        [B, H, T, Dv] in the dtype of v. A fully masked row is 0, and so are its gradients.

    Raises:
        TypeError: an argument of a wrong type or dtype. ValueError: shapes, head counts or sizes that do not fit.
    """
    q1, q2, k1, k2, v, lam, attn_mask, window, scale = check(
        q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, block_size
    )
    return attend(q1, q2, k1, k2, v, lam, attn_mask, bool(is_causal), window, scale, block_size, precision)


def diff_attention_maps(
    q1: Array,
    q2: Array,
    k1: Array,
    k2: Array,
    lam: float | Array,
    *,
    attn_mask: Array | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    precision: str = "highest",
) -> DiffMaps:
    """The maps themselves: first = softmax(q1 k1^T scale), second, and first - lam * second.

    Arguments and errors as in ``diff_attention``. Each map is [B, H, T, S] in fp32 (fp64 for fp64 inputs). Rows of the
    difference sum to 1 - lam.
    """
    q1, q2, k1, k2, _, lam, attn_mask, window, scale = check(
        q1, q2, k1, k2, None, lam, attn_mask, is_causal, window, scale, None
    )
    return DiffMaps(*maps(q1, q2, k1, k2, lam, attn_mask, bool(is_causal), window, scale, precision))
