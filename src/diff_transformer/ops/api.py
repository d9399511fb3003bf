"""The public operator, top-down: check the arguments, take a backend, let it attend."""

from torch import Tensor

from diff_transformer.ops import reference
from diff_transformer.ops.arguments import autocast_off
from diff_transformer.ops.backends import BACKENDS, resolve
from diff_transformer.ops.call import Call, check, is_empty, zeros
from diff_transformer.ops.cpu.decode import can_decode as can_decode
from diff_transformer.ops.cpu.decode import decode_heads as decode_heads
from diff_transformer.ops.reference import DiffMaps


def diff_attention(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    v: Tensor,
    lam: float | Tensor,
    *,
    first: float | Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention: softmax(q1 k1^T scale) v - lam softmax(q2 k2^T scale) v (arXiv 2410.05258, eq. 1).

    With ``first``, the first map has a weight too: first softmax(q1 k1^T scale) v - lam softmax(q2 k2^T scale) v.

    The maps are subtracted in fp32 (fp64 for fp64 inputs). The paper's head norm and its factor 1 - lambda_init are not
    part of the operator.

    Args:
        q1: queries of the signal map, [B, H, T, D]; float32, bfloat16, float16 or float64, like all tensors but lam.
        q2: queries of the noise map, [B, Hn, T, D]. Hn divides H; signal head j uses noise head j // (H // Hn).
        k1, k2: keys, [B, G, S, D]; k2 may be k1. G divides Hn; head j of n uses key/value head j // (n // G).
        v: values, [B, G, S, Dv]; Dv may differ from D (the paper has Dv = 2 D).
        lam: a float, or a tensor that is scalar, [H] or broadcastable to [B, H, T, 1], as [H, 1, 1] is. Used in fp32
            (fp64 for fp64 inputs).
        first: weight of the first map, as lam; 1 if None. It may be 0: its gradient is that of the map's output.
        attn_mask: bool (True = attend) or floating (added to the scaled scores), broadcastable to [B, H, T, S], the
            same for both maps. Only "reference" computes its gradient, and "auto" then chooses it. Use -inf to mask:
            in a row masked by large finite values, gradients of "triton" and "sdpa" are wrong from about -1e6 on, and
            for finfo.min "triton" and "blockwise" return 0, the others the mean of the values.
        is_causal: mask later keys. The last query is aligned to the last key (lower right corner), as decoding over a
            cache needs. Where T differs from S, SDPA's flag aligns differently. Combines with attn_mask.
        window: each query sees the last ``window`` keys up to its own position; needs is_causal.
        scale: factor of the scores, D ** -0.5 by default.
        backend: "auto" or one of ``available_backends``. A named backend never falls back to another. On a GPU "auto"
            takes what records say is the fastest (ops/table.py).

    Returns:
        [B, H, T, Dv] in the dtype of v. A fully masked row is 0, and so are its gradients. B, T and S may be 0. Under
        autocast, q, k and v are first cast to the autocast dtype, as SDPA does; lam is not.

    Raises:
        UserError: tensors of a wrong dtype; shapes, head counts, devices or names that do not fit; a named
            backend that cannot work here, cannot compute a needed gradient, or does not support forward-mode AD or a
            transform of torch.func (vmap, jvp, ...), where "auto" is "reference".
    """
    return compute(check(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale, backend, first))


def compute(call: Call) -> Tensor:
    """[B, H, T, Dv] of a call, by the backend that it names or by the one that "auto" takes."""
    call = resolve(call)
    if is_empty(call):
        return zeros(call)
    with autocast_off(call.q1.device.type):
        return BACKENDS[call.backend].attend(call)


def diff_attention_maps(
    q1: Tensor,
    q2: Tensor,
    k1: Tensor,
    k2: Tensor,
    lam: float | Tensor,
    *,
    first: float | Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> DiffMaps:
    """The attention maps themselves: softmax(q1 k1^T scale), the second, and their weighted difference.

    Arguments and errors as in ``diff_attention``. Each map is [B, H, T, S] in fp32 (fp64 for fp64 inputs), so memory
    holds several T x S maps. Rows of the difference sum to 1 - lam, or first - lam.
    """
    call = check(q1, q2, k1, k2, k1, lam, attn_mask, is_causal, window, scale, first=first)  # there are no values
    if is_empty(call):
        empty = zeros(call, call.k1.shape[2])
        return DiffMaps(empty, empty, empty)
    with autocast_off(call.q1.device.type):
        return reference.maps(call)
