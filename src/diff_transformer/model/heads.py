"""How many heads each attention has, and which combinations of settings are valid."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from diff_transformer.checks import did_you_mean

ATTENTIONS = ("diff", "diff_v2", "grouped_diff", "dint", "softmax")


class HeadCounts(NamedTuple):
    """Heads of an attention layer: ``queries`` and ``keys`` of width ``head_dim``, ``values`` of width ``value_dim``.

    outputs: heads of width ``value_dim`` that reach W_O.
    """

    queries: int
    keys: int
    values: int
    outputs: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class AttentionSettings:
    """What the core of one layer is made of; the fields mean what they mean in ``DiffTransformerConfig``."""

    attention: str
    hidden_size: int
    heads: HeadCounts
    lambda_init: str | float = "depth"
    lambda_depth_offset: int = 0
    lambda_learned: bool = True
    lambda_std: float = 0.1
    head_norm: bool | str = True
    head_norm_init: float = 1.0
    head_norm_eps: float = 1e-5
    softmax_head_norm: bool = False
    sliding_window: int | None = None

    @classmethod
    def of_layer(cls, config, layer_index: int) -> "AttentionSettings":
        """The settings of layer ``layer_index`` of a model of ``config``."""
        made = {field.name: getattr(config, field.name) for field in fields(cls)}
        if isinstance(config.head_norm_init, list | tuple):
            made["head_norm_init"] = config.head_norm_init[layer_index]
        return cls(**{**made, "head_norm_eps": config.head_norm_eps or config.rms_norm_eps})


def count_heads(
    attention: str,
    num_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    signal_heads_per_noise_head: int = 1,
) -> HeadCounts:
    """The heads of an ``attention`` that replaces softmax attention with n query and m key/value heads of width d.

    ============== ========= ======== ========== ================ =============
    attention      queries   keys     values     width of a value outputs
    ============== ========= ======== ========== ================ =============
    softmax        n         m        m          d                n
    diff, dint     n         m        m / 2      2d               n / 2
    diff_v2        2n        m        m          d                n
    grouped_diff   n         m        m / 2      2d               n r / (r + 1)
    ============== ========= ======== ========== ================ =============

    n is ``num_heads``, m ``num_key_value_heads``, d ``head_dim`` and r ``signal_heads_per_noise_head``;
    ``value_head_dim`` overrides the width of a value.

    Raises:
        ValueError: for an unknown attention, or head counts that do not divide, form pairs or form groups.
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
    """Key/value heads without grouped queries: one for each head, or two for each noise head of ``grouped_diff``."""
    groups = signal_heads_per_noise_head + 1 if attention == "grouped_diff" else 2
    return max(1, 2 * num_heads // groups)


def check_attention(attention: str, accepted: tuple[str, ...] = ATTENTIONS):
    """Raise ValueError for an attention that is not in ``accepted``."""
    if attention not in accepted:
        hint = did_you_mean(str(attention), accepted)
        raise ValueError(f"attention is {attention!r}{hint}; accepted: {', '.join(map(repr, accepted))}")


def check_variant(attention: str, *, lambda_learned: bool, window: int | None):
    """Raise ValueError for an unknown attention, or a setting that this attention does not have."""
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
    """Raise ValueError for an unknown head norm, or an initial weight for a norm without a weight."""
    if not isinstance(head_norm, bool) and head_norm != "no_weight":
        hint = did_you_mean(str(head_norm), ["no_weight"])
        raise ValueError(f"head_norm is {head_norm!r}{hint}; accepted: True, False, 'no_weight'")
    if head_norm is not True and head_norm_init != 1.0:
        raise ValueError(
            f"head_norm_init={head_norm_init} sets the weight of the head norm, which head_norm={head_norm!r} leaves "
            "out; set head_norm=True or head_norm_init=1.0"
        )


def check_rotary_width(head_dim: int):
    """Raise ValueError for an odd width: a rotary embedding rotates pairs of channels."""
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary embedding needs an even width")


def check_heads(num_heads: int, num_key_value_heads: int, *, paired: bool):
    """Raise ValueError unless the head counts divide (and, for differential attention, form pairs)."""
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
    """The number of signal heads: r of every r + 1."""
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
