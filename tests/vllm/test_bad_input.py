"""What cannot be served is refused with one sentence that says what to do."""

import json

import pytest
from engine_models import build
from safetensors.torch import load_file, save_file


@pytest.fixture
def folder(tmp_path):
    build(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_dint(tmp_path, start_engine):
    build(tmp_path / "dint", attention="dint")
    with pytest.raises(
        ValueError, match=r"attention='dint', whose running mean .* use `diff-transformer serve --engine tr"
    ):
        start_engine(tmp_path / "dint")


def test_another_architecture(folder, start_engine):
    edit_config(folder, model_type="llama")
    with pytest.raises(ValueError, match=r"model_type is 'llama'; give a folder that save_pretrained"):
        start_engine(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.core.lam.lambda_k2"]
)
def test_a_missing_tensor(name, folder, start_engine):
    edit_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"lacks 1 of the model's .* tensors: {name}; copy or download it again"):
        start_engine(folder)


def test_a_width_that_no_backend_takes(tmp_path, start_engine):
    build(tmp_path / "wide", head_dim=260, num_attention_heads=2)
    with pytest.raises(ValueError, match="needs heads of width 520 in vLLM's cache"):
        start_engine(tmp_path / "wide")


def test_lora_with_values_of_another_width(tmp_path, start_engine):
    build(tmp_path / "model", value_head_dim=20)
    with pytest.raises(ValueError, match="merge the adapter into the model"):
        start_engine(tmp_path / "model", enable_lora=True)
