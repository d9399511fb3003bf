"""int8 weights through torchao: matrices in 8 bits with one scale for each row; computation in the model's own dtype.

Lambda (its vectors or its projection), the norms, the embedding and the language-modelling head are not quantised. This
works on CPU and CUDA, under ``torch.compile`` and in safetensors.
"""

from typing import Any

from torch import Tensor, nn

# Patterns of ``TorchAoConfig.modules_to_not_convert``: common names of heads, and the modules that compute lambda.
KEPT = ["lm_head", "embed_out", r".*\.lam"]


def int8_config() -> Any:
    """``quantization_config`` for ``from_pretrained``; ``save_pretrained`` then writes int8 safetensors.

    Raises:
        RuntimeError: if torchao is not installed.
    """
    _, recipe = _library()
    from transformers import TorchAoConfig

    return TorchAoConfig(recipe(), modules_to_not_convert=list(KEPT))


def quantize_int8(model: nn.Module) -> None:
    """Quantise a model in memory, in place. It cannot be saved: save the model first and load it as int8.

    Raises:
        RuntimeError: if torchao is not installed.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    quantize_, recipe = _library()

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and should_convert_module(f"{name}.weight", KEPT)

    quantize_(model, recipe(), filter_fn=chosen)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters in memory: tied weights count once, quantised ones with their scales."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return sum(part.numel() * part.element_size() for p in parameters.values() for part in _parts(p))


def _parts(parameter: Tensor) -> list[Tensor]:
    flatten = getattr(parameter, "__tensor_flatten__", None)
    if flatten is None:
        return [parameter]
    names, _ = flatten()
    return [part for name in names for part in _parts(getattr(parameter, name))]


def _library() -> tuple[Any, Any]:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise RuntimeError(
            f"int8 weights need torchao ({error}); install it with `pip install diff-transformer[inference]`"
        ) from None
    return quantize_, Int8WeightOnlyConfig
