"""How heads are counted and paired; needs neither transformers nor a model."""

from torch import Tensor


def check_heads(num_heads: int, num_key_value_heads: int, *, paired: bool):
    """Raise ValueError unless the head counts divide (and, for differential attention, pair up)."""
    if num_heads % num_key_value_heads:
        raise ValueError(
            f"{num_heads} attention heads are not divisible by {num_key_value_heads} key/value heads; "
            "give num_key_value_heads that divides num_attention_heads"
        )
    if paired and (num_heads % 2 or num_key_value_heads % 2):
        raise ValueError(
            f"differential attention pairs heads, so {num_heads} attention heads and {num_key_value_heads} key/value "
            "heads must both be even; they count the heads of the matched softmax attention"
        )


def pair_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the two maps' queries and keys: heads 2i and 2i+1 are the maps of differential head i.

    ``q`` is ``[B, n, T, d]``; ``k`` is ``[B, m, S, d]`` or, as a static cache has it, pairs side by side,
    ``[B, m / 2, S, 2d]``.
    """
    k1, k2 = (k[:, 0::2], k[:, 1::2]) if k.shape[-1] == q.shape[-1] else k.chunk(2, dim=-1)
    return q[:, 0::2], q[:, 1::2], k1, k2
