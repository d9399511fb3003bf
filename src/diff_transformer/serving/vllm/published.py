"""Published checkpoints in another layout, served as they are: what ``convert`` would write, without writing it.

vLLM reads their configuration through ``PublishedConfig``, and the model converts their tensors while they are loaded.
Their remote code is not needed and does not run.
"""

from typing import Any

import torch
from transformers import DiffLlamaConfig, PreTrainedConfig

from diff_transformer.errors import UserError
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert import diffllama, motif
from diff_transformer.model.convert.conversion import Conversion

ARCHITECTURES = {"diffllama": "DiffLlamaForCausalLM", "motif": "MotifForCausalLM"}  # by layout
MODEL_TYPES = {"diffllama": "diffllama", "motif": "motif", "Motif": "motif"}  # in config.json: layout


class PublishedConfig(PreTrainedConfig):
    """The class by which vLLM reads a configuration of ``MODEL_TYPES``; the result is a ``DiffTransformerConfig``."""

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """``package_config`` of a ``config.json``'s content; beside ``kwargs`` with ``return_unused_kwargs=True``."""
        wants_rest = kwargs.pop("return_unused_kwargs", False)
        config = package_config(config_dict, kwargs.pop("name_or_path", "config.json"))
        return (config, kwargs) if wants_rest else config


def package_config(settings: dict[str, Any], name: str) -> DiffTransformerConfig:
    """The configuration in this package's layout; its attribute ``published`` keeps ``settings``.

    Args:
        settings: content of a ``config.json`` whose ``model_type`` is one of ``MODEL_TYPES``.
        name: of the model, for messages.

    Raises:
        UserError: for quantised weights, and for what this package's model does not have.
    """
    if quantization := settings.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise UserError(
            f"{name} has quantised weights ({method}), whose rows cannot be moved to this package's layout; serve the "
            "checkpoint that was quantised, with vLLM's --quantization if it must be smaller"
        )
    layout = MODEL_TYPES[settings["model_type"]]
    config = conversion(settings).config
    config.architectures = [ARCHITECTURES[layout]]
    config.dtype = getattr(torch, settings.get("dtype") or settings.get("torch_dtype") or "float32")
    config.published = settings
    return config


def conversion(settings: dict[str, Any]) -> Conversion:
    """The conversion of a published checkpoint with these ``settings`` to this package's layout."""
    if MODEL_TYPES[settings["model_type"]] == "motif":
        return motif.to_package(settings)
    return diffllama.to_package(DiffLlamaConfig.from_dict(settings))
