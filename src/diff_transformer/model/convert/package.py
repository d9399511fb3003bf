"""This package's own layout, and what converters to other layouts need to know about it."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.convert.plan import HUGGING_FACE, LAMBDAS, Names, Shapes, without
from diff_transformer.model.modeling import DiffTransformerForCausalLM

SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "rms_norm_eps",
    "tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
_CORE = "model.layers.{i}.self_attn.core"
PACKAGE_NAMES: Names = {
    **HUGGING_FACE,
    **{name: f"{_CORE}.lam.{name}" for name in LAMBDAS},
    "lambda_proj": f"{_CORE}.lam.proj.weight",
    "head_norm": f"{_CORE}.head_norm.weight",
    "activation_weight": "model.layers.{i}.mlp.act_fn.weight",
    "activation_bias": "model.layers.{i}.mlp.act_fn.bias",
}


def read_config(checkpoint: Checkpoint) -> DiffTransformerConfig:
    return DiffTransformerConfig.from_pretrained(checkpoint.folder)


def write_config(config: DiffTransformerConfig, folder: Path, dtype: torch.dtype) -> None:
    save_config(config, folder, dtype, DiffTransformerForCausalLM.__name__)


def tensors(config: DiffTransformerConfig) -> Shapes:
    return shapes_of(DiffTransformerForCausalLM, config)


def save_config(config, folder: Path, dtype: torch.dtype, architecture: str) -> None:
    """Write ``config.json`` as ``save_pretrained`` of the model would."""
    config.architectures = [architecture]
    config.dtype = dtype
    config.save_pretrained(folder)


def shapes_of(model: type[PreTrainedModel], config) -> Shapes:
    """Names and shapes of a checkpoint's tensors, computed on the meta device; a tied head is not stored."""
    with torch.device("meta"):
        state = model(config).state_dict()
    tied = "lm_head.weight" if config.tie_word_embeddings else None
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name != tied}


def package_names(config: DiffTransformerConfig) -> Names:
    """Name templates of the tensors in a model of ``config``."""
    absent = ["head"] if config.tie_word_embeddings else []
    if config.variant.lam != "learned":
        absent += LAMBDAS
    if not config.variant.sigmoids:
        absent.append("lambda_proj")
    if config.variant.head_norm != "weighted":
        absent.append("head_norm")
    if config.hidden_act != "poly_norm":
        absent += ["activation_weight", "activation_bias"]
    return without(PACKAGE_NAMES, *absent)


def refuse(config: DiffTransformerConfig, target: str, **held: tuple) -> None:
    """Check that each field named in ``held`` has one of the values that ``target`` can represent.

    Raises:
        ValueError: naming every field that does not.
    """
    wrong = [
        f"{name} is {getattr(config, name)!r}, it holds {' or '.join(map(repr, accepted))}"
        for name, accepted in held.items()
        if getattr(config, name) not in accepted
    ]
    if wrong:
        raise UserError(f"{target} cannot hold this model: {'; '.join(wrong)}")
