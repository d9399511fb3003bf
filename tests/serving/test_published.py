"""Published checkpoints become our configuration and tensors while they are read; tests/vllm serves them."""

import json

import pytest
import torch
from motif import write_motif
from safetensors.torch import load_file
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.convert import convert_folder
from diff_transformer.serving.vllm.published import conversion, package_config

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MOTIF = {"lambda_depth_offset": -1, "hidden_act": "poly_norm", "head_norm_eps": 1e-3}


@pytest.fixture
def published(tmp_path):
    """``published(layout, **fields)`` -> the folder of a random model as its authors would publish it."""

    def save(layout, **fields):
        torch.manual_seed(0)
        folder = tmp_path / layout
        if layout == "diffllama":
            DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, **fields)).save_pretrained(folder)
            return folder
        write_motif(DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, **MOTIF, **fields)), folder)
        told = json.loads((folder / "config.json").read_text())
        auto_map = {"AutoConfig": "configuration_motif.MotifConfig"}
        (folder / "config.json").write_text(json.dumps(told | {"model_type": "Motif", "auto_map": auto_map}))
        return folder

    return save


def read(folder):
    return package_config(json.loads((folder / "config.json").read_text()), str(folder))


@pytest.mark.parametrize(
    ("layout", "fields"), [("diffllama", {"tie_word_embeddings": True}), ("diffllama", {}), ("motif", {})]
)
def test_what_is_read_is_what_convert_writes(layout, fields, published, tmp_path):
    folder, out = published(layout, **fields), tmp_path / "converted"
    convert_folder(folder, out)
    config, wanted = read(folder), DiffTransformerConfig.from_pretrained(out)
    own = ("architectures", "published", "transformers_version")
    told, expected = ({k: v for k, v in c.to_dict().items() if k not in own} for c in (config, wanted))
    assert told == expected
    rows = list(load_file(folder / "model.safetensors").items())
    for order in (rows, rows[::-1]):
        tensors = dict(conversion(config.published).tensors(order))
        reference = load_file(out / "model.safetensors")
        assert tensors.keys() == reference.keys()
        assert all(torch.equal(tensor, reference[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quantization_config": {"quant_method": "awq"}},
            r"has quantised weights \(awq\), .* serve the checkpoint that",
        ),
        ({"attention_bias": True}, "no biases"),
    ],
)
def test_what_is_refused(fields, message, published):
    folder = published("diffllama")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | fields))
    with pytest.raises(ValueError, match=message):
        read(folder)
