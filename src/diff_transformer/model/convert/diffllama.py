"""Hugging Face ``DiffLlama``: pairs heads i and i + n/2, splits values the same way, and has no head-norm weight.

In transformers' ``modeling_diffllama.py``, queries and keys of differential head i are heads i and i + n/2. Its value
is the pair of half-heads i // r and i // r + m/2. The group norm has no weight and uses the model's ``rms_norm_eps``.
The rotary embedding rotates halves, as in this package.
"""

from functools import partial
from pathlib import Path

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.convert.package import SHARED_FIELDS, package_names, refuse, save_config, shapes_of
from diff_transformer.model.convert.plan import (
    HUGGING_FACE,
    LAMBDAS,
    Change,
    Conversion,
    Names,
    Shapes,
    adjacent_from_split,
    convert_model,
    fold_head_norm,
    plan_of,
    split_from_adjacent,
    without,
)
from diff_transformer.model.modeling import DiffTransformerForCausalLM

_NAMES: Names = {**HUGGING_FACE, **{name: f"model.layers.{{i}}.self_attn.{name}" for name in LAMBDAS}}


def from_diffllama(model: DiffLlamaForCausalLM) -> DiffTransformerForCausalLM:
    """A model with ``head_norm="no_weight"``, the weights of a Hugging Face ``DiffLlama`` and equal logits.

    Raises:
        ValueError: as ``to_package``.
    """
    return convert_model(to_package(model.config), DiffTransformerForCausalLM, model)


def to_diffllama(model: DiffTransformerForCausalLM) -> DiffLlamaForCausalLM:
    """The inverse of ``from_diffllama``; a head-norm weight is folded into W_O.

    Raises:
        ValueError: as ``from_package``.
    """
    return convert_model(from_package(model.config), DiffLlamaForCausalLM, model)


def read_config(checkpoint: Checkpoint) -> DiffLlamaConfig:
    return parse(DiffLlamaConfig.get_config_dict(checkpoint.folder)[0], str(checkpoint.folder))


def parse(told: dict, file: str) -> DiffLlamaConfig:
    return DiffLlamaConfig.from_dict(told)


def write_config(config: DiffLlamaConfig, folder: Path, dtype: torch.dtype) -> None:
    save_config(config, folder, dtype, DiffLlamaForCausalLM.__name__)


def tensors(config: DiffLlamaConfig) -> Shapes:
    return shapes_of(DiffLlamaForCausalLM, config)


def to_package(config: DiffLlamaConfig) -> Conversion:
    """To ``attention="diff"``, ``head_norm="no_weight"``; rows of W_Q, W_K and W_V move, nothing else changes.

    Raises:
        ValueError: for biases, or an activation other than SiLU.
    """
    if config.attention_bias or config.hidden_act != "silu":
        raise UserError(
            f"attention_bias={config.attention_bias}, hidden_act={config.hidden_act!r}: the DIFF Transformer has no "
            "biases and SwiGLU with silu; convert a DiffLlama model without them"
        )
    ours = DiffTransformerConfig(
        attention="diff",
        head_norm="no_weight",
        lambda_std=config.lambda_std_dev or 0.0,
        **{name: getattr(config, name) for name in SHARED_FIELDS},
    )
    move = Change(partial(adjacent_from_split, head_dim=ours.heads.head_dim))
    plan = plan_of(_names(ours), package_names(ours), ours.num_hidden_layers, dict.fromkeys("qkv", move))
    return Conversion(ours, plan)


def from_package(config: DiffTransformerConfig) -> Conversion:
    """The inverse; a head-norm weight is folded into W_O, exact but for the rounding of that product.

    Raises:
        ValueError: for what ``DiffLlama`` cannot hold: another attention, a lambda_init other than the published one,
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
