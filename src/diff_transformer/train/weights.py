"""Which weights a run trains (``train.weights``).

"all"; "attention", those of its layers; "lora", low-rank adapters of the matrices of attention (Hu et al., arXiv
2106.09685, by PEFT), and what has no matrix: lambda, and the norms of heads, queries and keys; "dex", what DEX trains.
The saved model has adapters merged into its matrices.
"""

from typing import Any

import torch
from torch import nn

from diff_transformer.train.config import TrainConfig

_ATTENTION = {"self_attn", "attention", "attn", "self_attention"}  # names of the module in transformers' models
LORA_SCALE = 2  # of the product B A that is added to a matrix


def choose_weights(model: nn.Module, settings: TrainConfig) -> None:
    """Let the gradient reach the weights of ``settings.weights`` alone; "lora" adds adapters first.

    Raises:
        UserError: for "dex" and a model that it does not fit.
    """
    if settings.weights == "all":
        return
    if settings.weights == "dex":
        from diff_transformer.model.dex import trained_by_dex

        trained = set(map(id, trained_by_dex(model)))
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        return
    if settings.weights == "lora":
        torch.manual_seed(settings.seed)
        add_adapters(model, settings.lora_rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_of_attention(name) and ".base_layer." not in name)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Give every matrix of attention, but for those that make lambda, an adapter; its product B A starts at 0."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    from diff_transformer.model.lambdas import LAMBDAS

    small = {part for module in model.modules() if isinstance(module, LAMBDAS) for part in module.modules()}
    matrices = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and is_of_attention(name) and module not in small
    }
    transposed = any(isinstance(module, Conv1D) for module in matrices.values())
    config = LoraConfig(r=rank, lora_alpha=LORA_SCALE * rank, target_modules=[*matrices], fan_in_fan_out=transposed)
    inject_adapter_in_model(config, model)


def merged(model: Any) -> Any:
    """``model`` with its own matrices again, to which adapters, if it has any, were added."""
    if vars(model).pop("peft_config", None) is None:
        return model
    from peft.tuners.lora import LoraLayer

    for parent in [*model.modules()]:
        for name, module in [*parent.named_children()]:
            if isinstance(module, LoraLayer):
                module.merge()
                setattr(parent, name, module.get_base_layer())
    return model


def is_of_attention(name: str) -> bool:
    """True if a module or parameter belongs to an attention layer: to projections, lambda or the heads' norms."""
    return bool(_ATTENTION & set(name.split(".")))
