"""The variants of attention as one table, and how many heads each has.

    out = head_scale (1 - lambda_init) gate norm((A1 - lambda A2) V)        every part but A1 V is optional

A row of ``CORES`` says which parts a variant has; ``dataclasses.replace`` turns a row into an ablation.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diff_transformer.checks import require_known
from diff_transformer.errors import UserError

MATCHED = "matched"  # an initial scale that ``model/head_scale.py`` measures
_ACCEPTED = {
    "maps": (1, 2),
    "lam": (None, "learned", "fixed", "token"),
    "gate": (None, "first", "result", "normed"),
    "head_norm": (None, "plain", "weighted"),
}


@dataclass(frozen=True)
class Variant:
    """The function that the core of an attention layer computes (``model/cores.py``).

    maps: attention maps of a head, 1 or 2.
    shared_keys: both maps of a head read one key head.
    lam: weight of the second map: "learned" (a scalar for the layer), "fixed", or "token" (a sigmoid for each token and
        head); None for one map.
    lambda_init: constant of "learned" and "fixed": "depth" (0.8 - 0.6 exp(-0.3 i) in layer i) or a number below 1.
    lambda_depth_offset: added to i in that formula.
    lambda_std: standard deviation of the vectors of "learned" at initialisation.
    initial_ratio: of "token": weight of the second map over that of the first at zero logits; None is 1/2, with
        gate="first" 1.
    gate: a sigmoid for each token and head, on the "first" map, on the "result", or on the "normed" result.
    head_norm: RMSNorm of each head: "weighted" or "plain" (without a weight).
    head_norm_init: initial weight of the norm, or one for each layer.
    factor: multiply each head by 1 - lambda_init.
    signal_heads: signal heads that share a noise head.
    head_scale: constant that multiplies each head, or one for each layer; "matched" until it is measured.
    subtract: False adds the second map instead, a control with as many maps.
    means: add lambda times the mean of the first map, so that rows sum to 1 (``model/dint.py``).
    """

    maps: int = 2
    shared_keys: bool = False
    lam: str | None = None
    lambda_init: str | float = "depth"
    lambda_depth_offset: int = 0
    lambda_std: float = 0.1
    initial_ratio: float | None = None
    gate: str | None = None
    head_norm: str | None = None
    head_norm_init: float | list[float] = 1.0
    factor: bool = False
    signal_heads: int = 1
    head_scale: float | list[float] | str = 1.0
    subtract: bool = True
    means: bool = False

    @property
    def sigmoids(self) -> int:
        """Numbers that each token and head computes: a gate, a lambda, or both in this order."""
        return (self.gate is not None) + (self.lam == "token")

    def __post_init__(self):
        has_init, start, ratio = self.lam in ("learned", "fixed"), self.lambda_init, self.initial_ratio
        most = 2 if self.gate == "first" else 1
        for name, accepted in _ACCEPTED.items():
            if (value := getattr(self, name)) not in accepted:
                raise UserError(f"{name} is {value!r}; accepted: {', '.join(map(str, accepted))}")
        for name in ("initial_ratio", "lambda_std", "lambda_depth_offset"):
            if not isinstance(value := getattr(self, name), int | float | None):
                raise UserError(f"{name} is {value!r}; give a number")
        for name in ("factor", "subtract"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(f"{name} is {value!r}; give True or False")
        for wrong, sentence in (
            (self.maps == 1 and (self.lam or self.gate == "first"), "lam and gate='first' need maps=2"),
            (self.maps == 2 and self.lam is None, "the second of two maps needs a weight: give lam"),
            (self.maps == 1 and not self.subtract, "subtract=False needs maps=2"),
            (self.means and (self.gate or not self.subtract), "attention='dint' takes no gate and no other sign"),
            (self.gate == "result" and self.head_norm,
             "the head norm cancels a gate before it; give gate='normed', after the norm, or head_norm=None"),
            (self.factor and not has_init, "factor is 1 - lambda_init, which lam='token' lacks; set factor=False"),
            (start != "depth" and not isinstance(start, int | float),
             f"lambda_init is {start!r}; accepted: 'depth' or a number"),
            (start != "depth" and isinstance(start, int | float) and not -math.inf < start < 1,
             f"lambda_init is {start}; heads are multiplied by 1 - lambda_init, which must be positive: give a number "
             "below 1, or 'depth'"),
            (ratio is not None and self.lam != "token", "initial_ratio is of lam='token'; leave it out"),
            (ratio is not None and not 0 < ratio < most, f"initial_ratio is {ratio}; give one between 0 and {most}"),
            (not isinstance(self.head_scale, int | float | list | tuple) and self.head_scale != MATCHED,
             f"head_scale is {self.head_scale!r}; give a number, one for each layer, or {MATCHED!r}"),
            (not isinstance(self.head_norm_init, int | float | list | tuple),
             f"head_norm_init is {self.head_norm_init!r}; give a number, or one for each layer"),
            (self.head_norm_init != 1 and self.head_norm != "weighted",
             f"head_norm_init={self.head_norm_init} sets the weight of a head norm that has none; set head_norm=True "
             "('weighted'), or leave it out"),
        ):  # fmt: skip
            if wrong:
                raise UserError(sentence)


_V1 = Variant(lam="learned", head_norm="weighted", factor=True)
CORES: dict[str, Variant] = {
    "diff": _V1,
    "diff_v2": Variant(shared_keys=True, lam="token"),
    "diff_v3": Variant(shared_keys=True, lam="token", gate="first"),
    "gated": Variant(maps=1, gate="result"),
    "grouped_diff": replace(_V1, signal_heads=3),
    "dint": replace(_V1, means=True),
    "softmax": Variant(maps=1),
}
ATTENTIONS = tuple(CORES)
# The fields that ``core`` of a configuration may set. Others are fields of the configuration, or ``attention`` decides.
PARTS = ("lam", "initial_ratio", "gate", "head_norm", "factor", "subtract")
_HEAD_NORMS = {"True": "weighted", "False": None, "no_weight": "plain"}


def variant_of(config: Any) -> Variant:
    """The variant that the fields of ``DiffTransformerConfig`` describe; those of parts that it lacks are ignored.

    Raises:
        UserError: for unknown values, parts that exclude one another, and a window where means run over whole rows.
    """
    require_known("attention", config.attention, CORES)
    core = config.core or {}
    if not isinstance(core, dict):
        raise UserError(f"core is {core!r}; give a dictionary of parts, such as {{'gate': 'normed'}}")
    for name in core:
        require_known("field of core", name, PARTS)
    named = CORES[config.attention]
    row = replace(named, **core)
    fields: dict[str, Any] = {"head_scale": config.head_scale}
    if row.lam in ("learned", "fixed"):
        fields |= {name: getattr(config, name) for name in ("lambda_init", "lambda_depth_offset", "lambda_std")}
        fields |= {"lam": "learned" if config.lambda_learned else "fixed"}
    if named.head_norm:
        require_known("head_norm", str(config.head_norm), _HEAD_NORMS)
        fields |= {"head_norm": _HEAD_NORMS[str(config.head_norm)]}
    elif config.attention == "softmax" and config.softmax_head_norm:
        fields |= {"head_norm": "weighted"}
    if named.head_norm or "weighted" in (row.head_norm, fields.get("head_norm")):
        fields |= {"head_norm_init": config.head_norm_init}
    if row.signal_heads > 1:
        fields |= {"signal_heads": config.signal_heads_per_noise_head}
    if row.means and config.sliding_window is not None:
        raise UserError(
            f"a window of {config.sliding_window} keys is asked for, but the running mean of attention='dint' is over "
            "all earlier queries; leave out the window, or take another attention"
        )
    return replace(row, **(fields | core))


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


def count_heads(
    variant: Variant, num_heads: int, num_key_value_heads: int, head_dim: int, value_head_dim: int | None = None
) -> HeadCounts:
    """The heads of attention that replaces softmax attention with n query and m key/value heads of width d.

    ======================= =========== ======== ========== ================ =============
    attention               queries     keys     values     width of a value outputs
    ======================= =========== ======== ========== ================ =============
    one map                 n           m        m          d                n
    two maps, shared keys   n + n / r   m        m          d                n
    two maps                n           m        m / 2      2d               n r / (r + 1)
    ======================= =========== ======== ========== ================ =============

    n is ``num_heads``, m ``num_key_value_heads``, d ``head_dim`` and r ``variant.signal_heads``; ``value_head_dim``
    overrides the width of a value.

    Raises:
        UserError: for head counts that do not divide, form pairs or form groups.
    """
    n, m, d, r = num_heads, num_key_value_heads, head_dim, variant.signal_heads
    if variant.maps == 1 or variant.shared_keys:
        if n % r or n // r % m:
            raise UserError(
                f"{n} attention heads are not divisible by {m} key/value heads and {r} signal heads a noise head; give "
                f"num_key_value_heads that divides num_attention_heads{'' if r == 1 else f' / {r}, a whole number'}: a "
                "group's heads share keys and values"
            )
        return HeadCounts(n + (variant.maps == 2) * (n // r), m, m, n, d, value_head_dim or d)
    noise = n // (r + 1)
    if n % (r + 1) or m % 2 or noise % max(1, m // 2):
        kind = "pairs" if r == 1 else f"groups of {r} signal heads and 1 noise head"
        raise UserError(
            f"{n} attention heads and {m} key/value heads do not make {kind}, each with keys for both maps: {r + 1} "
            f"must divide num_attention_heads, and half of an even num_key_value_heads must divide the {noise} {kind}; "
            "count heads as in the matched softmax attention"
        )
    return HeadCounts(n, m, m // 2, n - noise, d, value_head_dim or 2 * d)


def default_key_value_heads(variant: Variant, num_heads: int) -> int:
    """Key/value heads without grouped queries: one for each head, or two for each noise head of separate keys."""
    paired = variant.maps == 2 and not variant.shared_keys
    return max(1, 2 * num_heads // (variant.signal_heads + 1) if paired else num_heads // variant.signal_heads)
