"""Configurations of equal cost: each variant of differential attention and the Transformer it is compared with."""

import copy
from typing import Any

from diff_transformer.errors import UserError
from diff_transformer.model.cost import count_parameters
from diff_transformer.model.heads import MATCHED, count_heads, default_key_value_heads
from diff_transformer.settings import parse

# Choices of ``compare --variants`` and ``info --attention``: the fields that turn a configuration into the variant.
# ``NAME+FIELD=VALUE+...`` changes parts of a core, as in diff_v2+gate=normed+head_norm=weighted, or one of ``_SCALES``.
VARIANTS: dict[str, dict[str, Any]] = {
    "diff": {"attention": "diff"},
    "diff_v2": {"attention": "diff_v2", "lambda_learned": True},
    "diff_v3": {"attention": "diff_v3", "lambda_learned": True},
    "gated": {"attention": "gated"},
    "grouped_diff": {"attention": "grouped_diff"},
    "dint": {"attention": "dint"},
    "fixed_lambda": {"attention": "diff", "lambda_learned": False},
    "softmax_norm": {"attention": "softmax", "softmax_head_norm": True},
    "softmax": {"attention": "softmax", "softmax_head_norm": False},
}
_SCALES = ("head_scale", "head_norm_init", "lambda_init")
_LARGEST_STEP = 64
_TOLERANCE = 0.005  # of all parameters: half of what a matched pair may differ by


def variant_fields(name: str) -> dict[str, Any]:
    """The fields of the configuration that make it the variant ``name``, ``"gated"`` or ``"gated+head_norm=weighted"``.

    Raises:
        UserError: for an unknown name, and a part that is no ``FIELD=VALUE`` (values as ``--set`` takes them).
    """
    base, *parts = name.split("+")
    if base not in VARIANTS:
        raise UserError(f"no variant {base!r}; there are: {', '.join(VARIANTS)}")
    fields, core = dict(VARIANTS[base]), {}
    for part in parts:
        if "=" not in part:
            raise UserError(f"variant {name!r} has the part {part!r}; give FIELD=VALUE, as in {base}+gate=normed")
        key, value = parse(part)
        (fields if key in _SCALES else core)[key] = value
    return {**fields, "core": core} if core else fields


def variant(config, name: str):
    """The variant ``name`` (``variant_fields``) at the cost of ``config``.

    Raises:
        UserError: as ``variant_fields``, and for parts or head counts that do not fit together.
    """
    return cost_matched(config, **variant_fields(name))


def cost_matched(config, **fields: Any):
    """``config`` with ``fields`` (``attention="diff_v2"``, ...) and sizes adjusted where needed to keep the cost.

    - Between ``"diff"``, ``"dint"``, a fixed lambda and ``"softmax"``, whose projections have equal size, nothing else
      changes. ``softmax_head_norm`` is kept for softmax attention only.
    - For ``"diff_v2"``, ``"diff_v3"`` and ``"grouped_diff"``, and where the number of gates differs, the width of the
      feed-forward pays: ``intermediate_size`` changes in the largest step (64, 32, ... 1) that keeps the total
      parameters within 0.5 %. FLOPs and the key/value cache may then differ; ``model_cost`` reports them.
    - Without grouped queries, ``num_key_value_heads`` becomes the attention's default. With them it stays, or becomes
      the next smaller valid number.
    - ``value_head_dim`` is halved or doubled with the value heads.

    Raises:
        UserError: for head counts that do not fit the attention, or a feed-forward without any width left.
    """
    changed = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(changed, name, value)
    if changed.attention != config.attention:  # parts and scale of another core
        changed.core = fields.get("core")
        changed.head_scale = fields.get("head_scale", MATCHED if config.head_scale == MATCHED else 1.0)
    if changed.attention != "softmax":
        changed.softmax_head_norm = False
    if changed.attention == config.attention and changed.core == config.core:
        return changed
    changed.num_key_value_heads = _key_value_heads(config, changed)
    changed.value_head_dim = _value_head_dim(config, changed)
    before, after = count_parameters(config), count_parameters(changed)
    if before["attention"] != after["attention"] or config.variant.sigmoids != changed.variant.sigmoids:
        spare = sum(before.values()) - sum(after.values())
        changed.intermediate_size += _widening(spare, sum(before.values()), config)
        if changed.intermediate_size < 1:
            raise UserError(
                f"attention={changed.attention!r} has more parameters than {config.attention!r} by more than the whole "
                f"feed-forward (intermediate_size {config.intermediate_size}); give a wider one"
            )
    return changed


def _widening(spare: int, total: int, config) -> int:
    """The change of the feed-forward's width that uses ``spare`` parameters, in the largest exact enough step."""
    unit = 3 * config.hidden_size * config.num_hidden_layers  # parameters of one unit of width
    step = _LARGEST_STEP
    while step > 1 and abs(spare - unit * step * round(spare / (unit * step))) > _TOLERANCE * total:
        step //= 2
    return step * round(spare / (unit * step))


def _key_value_heads(config, changed) -> int:
    n, m = config.num_attention_heads, config.num_key_value_heads
    if m == default_key_value_heads(config.variant, n):
        return default_key_value_heads(changed.variant, n)
    for candidate in range(m, 1, -1):
        try:
            count_heads(changed.variant, n, candidate, 1)
        except ValueError:
            continue
        return candidate
    return m


def _value_head_dim(config, changed) -> int | None:
    # half as many value heads as key heads, twice as wide
    wide, was_wide = (x.variant.maps == 2 and not x.variant.shared_keys for x in (changed, config))
    width = config.value_head_dim
    if width is None or wide == was_wide:
        return width
    if was_wide and width % 2:
        raise UserError(f"value_head_dim {width} of {config.attention!r} is odd; {changed.attention!r} needs its half")
    return 2 * width if wide else width // 2
