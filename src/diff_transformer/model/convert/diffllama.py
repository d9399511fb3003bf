"""Hugging Face ``DiffLlama``: pairs heads i and i + n/2, splits values the same way, and has no head-norm weight.

In transformers' ``modeling_diffllama.py``, queries and keys of differential head i are heads i and i + n/2. Its value
is the pair of half-heads i // r and i // r + m/2. The group norm has no weight and uses the model's ``rms_norm_eps``.
The rotary embedding rotates halves, as in this package.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.conversion import (
    SHARED_FIELDS,
    Conversion,
    NamedTensors,
    adjacent_from_split,
    refuse,
    renamed,
    split_from_adjacent,
)

MODEL = DiffLlamaForCausalLM
_LAMBDA, _PACKAGE_LAMBDA = "self_attn.lambda_", "self_attn.core.lam.lambda_"


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
    move = partial(adjacent_from_split, head_dim=package.heads.head_dim)
    moves = dict.fromkeys(("q_proj", "k_proj", "v_proj"), move)
    return Conversion(package, partial(renamed, names={_LAMBDA: _PACKAGE_LAMBDA}, moves=moves))


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
    move = partial(split_from_adjacent, head_dim=config.heads.head_dim)
    moves = dict.fromkeys(("q_proj", "k_proj", "v_proj"), move)

    def tensors(package: NamedTensors) -> NamedTensors:
        return renamed(_without_head_norms(dict(package)).items(), {_PACKAGE_LAMBDA: _LAMBDA}, moves)

    note = "DiffLlama has no head-norm weight: it is folded into W_O, which is rounded once"
    return Conversion(diffllama, tensors, (note,) if config.head_norm is True else ())


def _without_head_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiply each head norm's weight into W_O: column ``c`` times ``weight[c % 2d]``, in fp32 or wider.

    The layer computes the product of the two anyway, so a norm without a weight gives the same output with this
    matrix, up to the rounding of the product.
    """
    for name in [name for name in tensors if name.endswith("core.head_norm.weight")]:
        output, norm = name.replace("core.head_norm", "o_proj"), tensors.pop(name)
        wide = torch.promote_types(norm.dtype, torch.float32)
        columns = tensors[output].to(wide).unflatten(1, (-1, norm.numel())) * norm.to(wide)
        tensors[output] = columns.flatten(1)
    return tensors
