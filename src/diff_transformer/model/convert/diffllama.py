"""Hugging Face ``DiffLlama``: pairs heads i and i + n/2, splits values the same way, and has no head-norm weight.

In transformers' ``modeling_diffllama.py``, queries and keys of differential head i are heads i and i + n/2. Its value
is the pair of half-heads i // r and i // r + m/2. The group norm has no weight and uses the model's ``rms_norm_eps``.
The rotary embedding rotates halves, as in this package.
"""

from functools import partial
from typing import Any

from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.plan import (
    HUGGING_FACE,
    LAMBDAS,
    SHARED_FIELDS,
    Change,
    Conversion,
    Names,
    adjacent_from_split,
    convert_model,
    fold_head_norm,
    package_names,
    plan_of,
    refuse,
    split_from_adjacent,
    without,
)
from diff_transformer.model.modeling import DiffTransformerForCausalLM

_NAMES: Names = {**HUGGING_FACE, **{name: f"model.layers.{{i}}.self_attn.{name}" for name in LAMBDAS}}


def from_diffllama(model: DiffLlamaForCausalLM) -> DiffTransformerForCausalLM:
    """A model with ``head_norm="no_weight"``, the weights of a Hugging Face ``DiffLlama`` and equal logits.

    Raises:
        UserError: as ``to_package``.
    """
    return convert_model(to_package(model.config), DiffTransformerForCausalLM, model)


def to_diffllama(model: DiffTransformerForCausalLM) -> DiffLlamaForCausalLM:
    """The inverse of ``from_diffllama``; a head-norm weight is folded into W_O.

    Raises:
        UserError: as ``from_package``.
    """
    return convert_model(from_package(model.config), DiffLlamaForCausalLM, model)


def to_package(config: DiffLlamaConfig) -> Conversion:
    """To ``attention="diff"``, ``head_norm="no_weight"``; rows of W_Q, W_K and W_V move, nothing else changes.

    Raises:
        UserError: for biases, or an activation other than SiLU.
    """
    if config.attention_bias or config.hidden_act != "silu":
        raise UserError(
            f"attention_bias={config.attention_bias}, hidden_act={config.hidden_act!r}: the DIFF Transformer has no "
            "biases and SwiGLU with silu; convert a DiffLlama model without them"
        )
    fields: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    package = DiffTransformerConfig(
        attention="diff", head_norm="no_weight", lambda_std=config.lambda_std_dev or 0.0, **fields
    )
    move = Change(partial(adjacent_from_split, head_dim=package.heads.head_dim))
    plan = plan_of(_names(package), package_names(package), package.num_hidden_layers, dict.fromkeys("qkv", move))
    return Conversion(package, plan)


def from_package(config: DiffTransformerConfig) -> Conversion:
    """The inverse; a head-norm weight is folded into W_O, exact but for the rounding of that product.

    Raises:
        UserError: for what ``DiffLlama`` cannot hold: another attention, a lambda_init other than the published one,
            a model without head norm or with a separate epsilon for it, a window.
    """
    refuse(
        config, "DiffLlama",
        attention=("diff",), head_norm=(True, "no_weight"), lambda_init=("depth",), lambda_depth_offset=(0,),
        lambda_learned=(True,), value_head_dim=(None, 2 * config.heads.head_dim), hidden_act=("silu",),
        head_norm_eps=(None, config.rms_norm_eps), sliding_window=(None,),
    )  # fmt: skip
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    diffllama = DiffLlamaConfig(lambda_std_dev=config.lambda_std, **fields)
    changes = dict.fromkeys("qkv", Change(partial(split_from_adjacent, head_dim=config.heads.head_dim)))
    notes = []
    if config.head_norm is True:
        changes["o"] = Change(fold_head_norm, ("head_norm",))
        notes.append("DiffLlama has no head-norm weight: it is folded into W_O, which is rounded once")
    plan = plan_of(package_names(config), _names(config), config.num_hidden_layers, changes)
    return Conversion(diffllama, plan, notes)


def _names(config) -> Names:
    return without(_NAMES, "head") if config.tie_word_embeddings else _NAMES
