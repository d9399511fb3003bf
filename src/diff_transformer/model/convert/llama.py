"""Llama-family softmax models: the matched Transformer has their architecture, and every tensor keeps its name."""

from pathlib import Path

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, MistralConfig

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.convert.package import SHARED_FIELDS, package_names, refuse, save_config, shapes_of
from diff_transformer.model.convert.plan import (
    HUGGING_FACE,
    Conversion,
    Names,
    Shapes,
    convert_model,
    plan_of,
    without,
)
from diff_transformer.model.modeling import DiffTransformerForCausalLM


def from_llama(model: LlamaForCausalLM) -> DiffTransformerForCausalLM:
    """The matched Transformer (``attention="softmax"``) with the weights of a Llama model and equal logits.

    Raises:
        ValueError: as ``to_package``.
    """
    return convert_model(to_package(model.config), DiffTransformerForCausalLM, model)


def to_llama(model: DiffTransformerForCausalLM) -> LlamaForCausalLM:
    """The inverse of ``from_llama``.

    Raises:
        ValueError: as ``from_package``.
    """
    return convert_model(from_package(model.config), LlamaForCausalLM, model)


def read_config(checkpoint: Checkpoint) -> LlamaConfig | MistralConfig:
    return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)


def write_config(config: LlamaConfig, folder: Path, dtype: torch.dtype) -> None:
    save_config(config, folder, dtype, LlamaForCausalLM.__name__)


def tensors(config: LlamaConfig | MistralConfig) -> Shapes:
    fields = {name: getattr(config, name) for name in SHARED_FIELDS}
    return shapes_of(LlamaForCausalLM, LlamaConfig(**fields))


def to_package(config: LlamaConfig | MistralConfig) -> Conversion:
    """To the matched Transformer (``attention="softmax"``).

    Raises:
        ValueError: for biases, or an activation other than SiLU.
    """
    biases = {name: getattr(config, name, False) for name in ("attention_bias", "mlp_bias")}
    if any(biases.values()) or config.hidden_act != "silu":
        told = ", ".join(f"{name}={value}" for name, value in biases.items())
        raise UserError(
            f"{told}, hidden_act={config.hidden_act!r}: the matched Transformer has no biases and SwiGLU with silu; "
            "convert a Llama model without them"
        )
    ours = DiffTransformerConfig(
        attention="softmax",
        sliding_window=getattr(config, "sliding_window", None),
        **{name: getattr(config, name) for name in SHARED_FIELDS},
    )
    names = package_names(ours)
    return Conversion(ours, plan_of(names, names, ours.num_hidden_layers))


def from_package(config: DiffTransformerConfig) -> Conversion:
    """The inverse.

    Raises:
        ValueError: for differential attention, head norms or a window, which Llama's architecture cannot hold.
    """
    refuse(
        config, "Llama's architecture",
        attention=("softmax",), softmax_head_norm=(False,), hidden_act=("silu",), sliding_window=(None,),
        value_head_dim=(None, config.heads.head_dim),
    )  # fmt: skip
    llama = LlamaConfig(**{name: getattr(config, name) for name in SHARED_FIELDS})
    names: Names = without(HUGGING_FACE, "head") if config.tie_word_embeddings else HUGGING_FACE
    return Conversion(llama, plan_of(names, names, config.num_hidden_layers))
