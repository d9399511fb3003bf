"""Matrix products of the layers in float8, by torchao (``train.float8``).

Inputs and weights of a product are rounded to e4m3, gradients of its output to e5m2, each with one scale for the whole
tensor: the largest power of two that keeps its largest magnitude within the format. Rounding then does not depend on
the scale, except of numbers 2^13 times below the largest, so neither does it on which rows a process has. Weights,
their gradients and the optimizer keep their precision; so do embedding, output matrix, attention, norms and lambda.
On the CPU the rounding is emulated.
"""

from typing import Any

import torch
from torch import nn

from diff_transformer.checks import require_extra
from diff_transformer.train.config import FLOAT8_MULTIPLE

CAPABILITY = (8, 9)  # of a GPU, at least


def check_float8(model: Any) -> None:
    """Check that the products of ``model``, which may be on the meta device, can be in float8.

    Raises:
        RuntimeError: if torchao is not installed.
        ValueError: for matrices of other sizes than GPUs multiply, or on a GPU without float8.
    """
    require_extra("inference", "train.float8", "torchao")
    for name, module in _products(model):
        if module.in_features % FLOAT8_MULTIPLE or module.out_features % FLOAT8_MULTIPLE:
            raise ValueError(
                f"train.float8 multiplies matrices whose sizes are multiples of {FLOAT8_MULTIPLE}, and {name} has "
                f"{module.out_features} x {module.in_features}; choose other sizes, or set train.float8=false"
            )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY:
        here, needed = (".".join(map(str, found)) for found in (torch.cuda.get_device_capability(), CAPABILITY))
        raise ValueError(
            f"train.float8 needs a GPU of compute capability {needed} or more, this one has {here}; set "
            f"train.float8=false"
        )


def use_float8(model: Any, device: torch.device) -> None:
    """Compute the products of the layers of ``model`` in float8; emulated on the CPU. The parameters stay the same."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = {module for _, module in _products(model)}
    config = Float8LinearConfig(emulate=device.type != "cuda", round_scales_to_power_of_2=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, _: module in chosen)


def without_float8(model: Any) -> Any:
    """``model`` with its own products again; the weights are shared."""
    for parent in [*model.modules()]:
        for name, module in [*parent.named_children()]:
            if type(module).__name__ == "Float8Linear":
                plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
                plain.weight, plain.bias = module.weight, module.bias
                setattr(parent, name, plain)
    return model


def _products(model: Any) -> list[tuple[str, nn.Linear]]:
    """The matrices of the layers, but for those that make lambda."""
    from diff_transformer.model.lambdas import LAMBDAS

    small = {part for module in model.modules() if isinstance(module, LAMBDAS) for part in module.modules()}
    named = model.base_model.layers.named_modules(prefix="layers")
    return [(name, module) for name, module in named if isinstance(module, nn.Linear) and module not in small]
