"""What cannot be served is refused with one sentence that says what to do."""

import json
import shutil

import pytest
from engine_models import build
from safetensors.torch import load_file, save_file

from diff_transformer.serving.vllm import checks


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


def test_a_tensor_of_another_shape(folder, start_engine):
    edit_weights(
        folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:8].clone()})
    )
    with pytest.raises(Exception):  # noqa: B017, PT011  (vLLM's own)
        start_engine(folder)


def test_a_width_that_no_backend_takes(tmp_path, start_engine):
    build(tmp_path / "wide", head_dim=260, num_attention_heads=2)
    with pytest.raises(ValueError, match="needs heads of width 520 in vLLM's cache"):
        start_engine(tmp_path / "wide")


def test_lora_with_values_of_another_width(tmp_path, start_engine):
    build(tmp_path / "model", value_head_dim=20)
    with pytest.raises(ValueError, match="merge the adapter into the model"):
        start_engine(tmp_path / "model", enable_lora=True)


def test_a_file_cut_short(folder, start_engine):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"(?i)incomplete|safetensor"):
        start_engine(folder)


def test_no_weights(folder, start_engine):
    (folder / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        start_engine(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("attention", "fields", "ranks", "fits"),
    [
        ("diff", {}, 2, False),  # two pairs of query heads, one pair of key heads: repeated
        ("diff", {}, 4, True),
        ("diff", {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8}, 3, True),
        ("grouped_diff", {"num_attention_heads": 8}, 2, True),
        ("diff_v2", {}, 3, True),
        ("softmax", {}, 3, True),
    ],
)
def test_ranks_that_do_not_divide_the_heads(attention, fields, ranks, fits):
    from engine_models import SIZES

    from diff_transformer import DiffTransformerConfig

    config = DiffTransformerConfig(**{**SIZES, "attention": attention, **fields})
    if not fits:
        checks.check_parallel(config, ranks)
        return
    with pytest.raises(ValueError, match=f"tensor_parallel_size is {ranks}, which does not divide"):
        checks.check_parallel(config, ranks)
