"""Models with numbers that matter: attention that is not flat, norms and lambdas that are not where they start."""

import json

import pytest
import torch
from safetensors.torch import save_file

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def ids():
    return torch.randint(0, SIZES["vocab_size"], (2, 19))


@pytest.fixture
def randomise():
    @torch.no_grad()
    def fill(module: torch.nn.Module) -> torch.nn.Module:
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif "lambda" in name:
                parameter.normal_(std=0.4)
            elif name.endswith("act_fn.bias"):
                parameter.normal_()
            else:
                parameter.uniform_(0.4, 1.6)
        return module.eval()

    return fill


@pytest.fixture
def make(randomise):
    """A model of this package, small and random: ``make(attention="softmax", ...)``."""

    def build(**fields) -> DiffTransformerForCausalLM:
        return randomise(DiffTransformerForCausalLM(DiffTransformerConfig(**{**SIZES, **fields})))

    return build


@pytest.fixture
def save(tmp_path):
    """Write tensors and settings as a checkpoint: ``save(name, tensors, **{"config.json": settings})``."""

    def write(name: str, tensors: dict, **settings):
        folder = tmp_path / name
        folder.mkdir()
        save_file({key: value.clone() for key, value in tensors.items()}, folder / "model.safetensors")
        for file, content in settings.items():
            (folder / file).write_text(json.dumps(content))
        return folder

    return write
