"""How heads are counted, paired and grouped; needs neither transformers nor a model."""

from typing import NamedTuple

from torch import Tensor

from diff_transformer.checks import did_you_mean

ATTENTIONS = ("diff", "diff_v2", "grouped_diff", "dint", "softmax")


class HeadCounts(NamedTuple):
    """Heads of an attention layer: ``queries`` and ``keys`` of width ``head_dim``, ``values`` of width ``value_dim``.

    outputs: heads, each ``value_dim`` wide, that reach W_O.
    """

    queries: int
    keys: int
    values: int
    outputs: int
    head_dim: int
    value_dim: int


def count_heads(
    attention: str,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    signal_heads_per_noise_head: int = 1,
) -> HeadCounts:
    """The heads of ``attention`` that stands for softmax attention with ``num_heads`` (n) and ``num_key_value_heads``
    (m) heads of width ``head_dim`` (d).

    ============== ========= ======== ========== ================ =============
    attention      queries   keys     values     width of a value outputs
    ============== ========= ======== ========== ================ =============
    softmax        n         m        m          d                n
    diff, dint     n         m        m / 2      2d               n / 2
    diff_v2        2n        m        m          d                n
    grouped_diff   n         m        m / 2      2d               n r / (r + 1)
    ============== ========= ======== ========== ================ =============

    r is ``signal_heads_per_noise_head``; ``value_head_dim`` replaces the width of a value.

    Raises:
        ValueError: for an unknown attention, and for head counts that do not divide, pair up or make groups.
    """
    check_attention(attention)
    n, m, d = num_heads, num_key_value_heads, head_dim
    if attention == "grouped_diff":
        outputs = _check_groups(n, m, signal_heads_per_noise_head)
        return HeadCounts(n, m, m // 2, outputs, d, value_head_dim or 2 * d)
    if attention == "diff_v2":
        _check_shared_keys(n, m)
        return HeadCounts(2 * n, m, m, n, d, value_head_dim or d)
    check_heads(n, m, paired=attention != "softmax")
    if attention == "softmax":
        return HeadCounts(n, m, m, n, d, value_head_dim or d)
    return HeadCounts(n, m, m // 2, n // 2, d, value_head_dim or 2 * d)


def default_key_value_heads(attention: str, num_heads: int, signal_heads_per_noise_head: int) -> int:
    """Key/value heads without grouped queries: as many as heads, or two for each noise head of ``grouped_diff``."""
    groups = signal_heads_per_noise_head + 1 if attention == "grouped_diff" else 2
    return max(1, 2 * num_heads // groups)


def check_attention(attention: str, accepted: tuple[str, ...] = ATTENTIONS):
    """Raise ValueError for an attention that is none of ``accepted``."""
    if attention not in accepted:
        hint = did_you_mean(str(attention), accepted)
        raise ValueError(f"attention is {attention!r}{hint}; accepted: {', '.join(map(repr, accepted))}")


def check_variant(attention: str, *, lambda_learned: bool, window: int | None):
    """Raise ValueError for an unknown attention, or one that lacks what is asked of it."""
    check_attention(attention)
    if attention == "diff_v2" and not lambda_learned:
        raise ValueError(
            "lambda_learned is False, but attention='diff_v2' has no lambda_init to fix lambda at: it computes lambda "
            "from each token; set lambda_learned=True, or another attention"
        )
    if attention == "dint" and window is not None:
        raise ValueError(
            f"a window of {window} keys is asked for, but the running mean of attention='dint' is over all earlier "
            "queries; leave out the window, or take another attention"
        )


def check_head_norm(head_norm: bool | str, head_norm_init: float | list[float]):
    """Raise ValueError for an unknown head norm, or an initial weight of one that has none."""
    if not isinstance(head_norm, bool) and head_norm != "no_weight":
        hint = did_you_mean(str(head_norm), ["no_weight"])
        raise ValueError(f"head_norm is {head_norm!r}{hint}; accepted: True, False, 'no_weight'")
    if head_norm is not True and head_norm_init != 1.0:
        raise ValueError(
            f"head_norm_init={head_norm_init} sets the weight of the head norm, which head_norm={head_norm!r} leaves "
            "out; set head_norm=True or head_norm_init=1.0"
        )


def check_rotary_width(head_dim: int):
    """Raise ValueError for a width of which a rotary embedding cannot turn pairs."""
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embedding needs an even width")


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


def _check_shared_keys(pairs: int, num_key_value_heads: int):
    if pairs % num_key_value_heads:
        raise ValueError(
            f"attention='diff_v2' has {pairs} pairs of query heads for {num_key_value_heads} key/value heads: the two "
            "maps of a pair would fall into different key/value groups; give num_key_value_heads that divides "
            "num_attention_heads"
        )


def _check_groups(num_heads: int, num_key_value_heads: int, signal: int) -> int:
    """The signal heads: r of every r + 1."""
    if num_heads % (signal + 1):
        raise ValueError(
            f"{num_heads} attention heads do not make groups of {signal} signal heads and 1 noise head; give "
            f"num_attention_heads that {signal + 1} divides, or another signal_heads_per_noise_head"
        )
    noise = num_heads // (signal + 1)
    if num_key_value_heads % 2 or noise % (num_key_value_heads // 2):
        raise ValueError(
            f"attention='grouped_diff' has {noise} noise heads for {num_key_value_heads} key heads, half of them for "
            "the signal map and half for the noise map; give an even num_key_value_heads of which half divides the "
            f"noise heads ({2 * noise} gives each noise head keys of its own)"
        )
    return num_heads - noise


def pair_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of the two maps' queries and keys: heads 2i and 2i+1 are the maps of differential head i.

    ``q`` is ``[B, n, T, d]``; ``k`` is ``[B, m, S, d]`` or, as a static cache has it, pairs side by side,
    ``[B, m / 2, S, 2d]``.
    """
    return q[:, 0::2], q[:, 1::2], *_pair_keys(q, k)


def group_heads(q: Tensor, k: Tensor, signal: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys of grouped differential attention: ``signal`` signal heads, then their noise head, a group.

    ``q [B, n, T, d]`` -> q1 ``[B, n r / (r + 1), T, d]``, q2 ``[B, n / (r + 1), T, d]``; ``k`` as in ``pair_heads``.
    """
    groups = q.unflatten(1, (-1, signal + 1))  # [B, noise heads, r + 1, T, d]
    return groups[:, :, :signal].flatten(1, 2), groups[:, :, signal], *_pair_keys(q, k)


def _pair_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    k1, k2 = (k[:, 0::2], k[:, 1::2]) if k.shape[-1] == q.shape[-1] else k.chunk(2, dim=-1)
    return k1, k2
