"""Motif-2.6B and Motif-2-12.7B (Motif-Technologies on the Hugging Face hub).

As in this package, neighbouring heads form a pair and the rotary embedding rotates halves. The head norm ``subln`` has
a weight and a separate epsilon (``attn_rms_norm_eps``). lambda_init uses the layer's index minus one, so layer 0 starts
at -0.0099. The MLP has PolyNorm. Motif-2-12.7B has grouped differential attention: of every r + 1 query heads the first
r are signal heads and the last is their noise head; keys come in pairs, one for each map. Sources: vLLM's ``motif.py``
(0.10) and the MLX port junhoyeo/mlx-motif. The conversion was not tried on the published weights.

Configurations of this layout are dictionaries, the content of ``config.json``: transformers has no class for them.
"""

from functools import partial
from pathlib import Path
from typing import Any

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert.conversion import Conversion, renamed
from diff_transformer.model.loading import read_model, read_settings
from diff_transformer.model.modeling import DiffTransformerForCausalLM

DEPTH_OFFSET = -1
_NAMES = {"self_attn.lambda_": "self_attn.core.lam.lambda_", "self_attn.subln.": "self_attn.core.head_norm."}
# The ports' defaults for settings that a config.json may omit.
_DEFAULTS = {
    "rms_norm_eps": 1e-6, "attn_rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 8192,
    "hidden_act": "poly_norm", "tie_word_embeddings": False, "rope_scaling": None, "num_noise_heads": None,
    "k_ratio": 1, "head_dim": None, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_REQUIRED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
_NOT_HERE = {
    "use_bias": "biases", "attention_bias": "biases", "qkv_bias": "biases", "kv_lora_rank": "latent keys and values",
    "mhc_enabled": "several residual streams", "num_experts": "a mixture of experts",
    "use_sliding_window": "a sliding window in some layers",
}  # fmt: skip


def read(folder: Path) -> DiffTransformerForCausalLM:
    """The model of a folder; every tensor stays as it is."""
    config = to_package(read_settings(folder)).config
    names = {old.replace(".", r"\."): new for old, new in _NAMES.items()}
    model = read_model(folder, DiffTransformerForCausalLM, config=config, key_mapping=names, dtype="auto")
    model._weight_conversions = None  # else save_pretrained gives the tensors their old names
    return model


def to_package(settings: dict[str, Any]) -> Conversion:
    """Every tensor stays as it is; only the configuration is translated.

    Raises:
        UserError: if a size is missing, or the model has parts that this package does not have.
    """
    rope = dict(settings.get("rope_parameters") or {})  # as transformers 5 writes it
    if theta := rope.pop("rope_theta", None):
        settings = {"rope_theta": theta, **settings}
    settings = {**_DEFAULTS, **({"rope_scaling": rope} if rope else {}), **settings}
    if missing := [name for name in _REQUIRED if settings.get(name) is None]:
        raise UserError(f"the settings of the Motif model lack {', '.join(missing)}")
    if others := [f"{name}={settings[name]} ({part})" for name, part in _NOT_HERE.items() if settings.get(name)]:
        raise UserError(
            f"this Motif model has parts that this package's model does not have: {', '.join(others)}; Motif-2.6B and "
            "Motif-2-12.7B can be converted"
        )
    if settings["k_ratio"] != 1:
        raise UserError(f"k_ratio is {settings['k_ratio']}; grouped differential attention here takes k_ratio 1")
    return Conversion(_package_config(settings), partial(renamed, names=_NAMES))


def _package_config(settings: dict[str, Any]) -> DiffTransformerConfig:
    noise = settings["num_noise_heads"]
    grouped = {}
    if noise:
        signal = (settings["num_attention_heads"] - noise) // noise
        grouped = {"attention": "grouped_diff", "signal_heads_per_noise_head": signal}
    scaling = dict(settings["rope_scaling"] or {})
    rope_type = scaling.pop("type", None) or scaling.pop("rope_type", "default")
    eps = settings["attn_rms_norm_eps"]
    return DiffTransformerConfig(
        **{name: settings[name] for name in _REQUIRED},
        **grouped,
        head_dim=settings["head_dim"],
        max_position_embeddings=settings["max_position_embeddings"],
        rope_parameters={**scaling, "rope_type": rope_type, "rope_theta": settings["rope_theta"]},
        rms_norm_eps=settings["rms_norm_eps"],
        head_norm_eps=None if eps == settings["rms_norm_eps"] else eps,
        hidden_act=settings["hidden_act"],
        lambda_depth_offset=DEPTH_OFFSET,
        tie_word_embeddings=settings["tie_word_embeddings"],
        **{name: settings[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
