"""Llama-family softmax models: the matched Transformer has their architecture, and every tensor keeps its name."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.conversion import SHARED_FIELDS, Conversion, convert_model, refuse, renamed
from diff_transformer.model.loading import read_model
from diff_transformer.model.modeling import DiffTransformerForCausalLM


def from_llama(model: LlamaForCausalLM) -> DiffTransformerForCausalLM:
    """The matched Transformer (``attention="softmax"``) with the weights of a Llama model and equal logits.

    Raises:
        UserError: as ``to_package``.
    """
    return convert_model(to_package(model.config), DiffTransformerForCausalLM, model)


def to_llama(model: DiffTransformerForCausalLM, dtype: torch.dtype | None = None) -> LlamaForCausalLM:
    """The inverse of ``from_llama``.

    Raises:
        UserError: as ``from_package``.
    """
    return convert_model(from_package(model.config), LlamaForCausalLM, model, dtype)


def read(folder: Path) -> DiffTransformerForCausalLM:
    """The model of a folder, as ``from_llama``."""
    return from_llama(read_model(folder, dtype="auto"))


def write(model: DiffTransformerForCausalLM, folder: Path, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Write ``to_llama`` of a model to a folder."""
    to_llama(model, dtype).save_pretrained(folder)
    return ()


def to_package(config: LlamaConfig | MistralConfig) -> Conversion:
    """To the matched Transformer (``attention="softmax"``).

    Raises:
        UserError: for biases, or an activation other than SiLU.
    """
    biases = {name: getattr(config, name, False) for name in ("attention_bias", "mlp_bias")}
    if any(biases.values()) or config.hidden_act != "silu":
        settings = ", ".join(f"{name}={value}" for name, value in biases.items())
        raise UserError(
            f"{settings}, hidden_act={config.hidden_act!r}: the matched Transformer has no biases and SwiGLU with "
            "silu; convert a Llama model without them"
        )
    fields: dict[str, Any] = {name: getattr(config, name) for name in SHARED_FIELDS}
    window = getattr(config, "sliding_window", None)
    return Conversion(DiffTransformerConfig(attention="softmax", sliding_window=window, **fields), renamed)


def from_package(config: DiffTransformerConfig) -> Conversion:
    """The inverse.

    Raises:
        UserError: for differential attention, head norms or a window, which Llama's architecture cannot hold.
    """
    refuse(
        config, "Llama's architecture",
        attention=("softmax",), softmax_head_norm=(False,), hidden_act=("silu",), sliding_window=(None,),
        value_head_dim=(None, config.heads.head_dim),
    )  # fmt: skip
    return Conversion(LlamaConfig(**{name: getattr(config, name) for name in SHARED_FIELDS}), renamed)
