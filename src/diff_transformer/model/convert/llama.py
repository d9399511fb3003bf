"""Llama-family softmax models: the matched Transformer has their architecture, and every tensor keeps its name."""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.conversion import SHARED_FIELDS, Conversion, refuse, renamed

MODEL = LlamaForCausalLM


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
