"""Llama-family checkpoints as folders: sharded, tied, with old buffers, of Mistral."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from diff_transformer import DiffTransformerForCausalLM, differentiate
from diff_transformer.model.convert import convert_folder, convert_model
from diff_transformer.testing import assert_within_budget

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8}


@pytest.fixture
def llama(randomise):
    def build(**fields):
        return randomise(LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields})))

    return build


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_sharded_folder_there_and_back(llama, ids, tmp_path, kv_heads, tied):
    theirs = llama(num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours")
    assert_within_budget(logits(ours, ids), logits(theirs.double(), ids), what="logits")
    convert_folder(tmp_path / "ours", tmp_path / "back", target="llama")
    back = load_file(tmp_path / "back" / "model.safetensors")
    expected = theirs.float().state_dict()
    assert set(back) == set(expected) - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(back[name], expected[name]) for name in back)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(logits(again, ids), logits(theirs, ids))


def test_bf16_stays_bf16_bit_for_bit(llama, ids, tmp_path):
    theirs = llama().to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.dtype == torch.bfloat16
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


@pytest.mark.parametrize("window", [None, 5])
def test_mistral_with_its_window(randomise, ids, tmp_path, window):
    config = MistralConfig(**SIZES, num_key_value_heads=4, sliding_window=window)
    theirs = randomise(MistralForCausalLM(config))
    theirs.save_pretrained(tmp_path / "theirs")
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours")
    assert ours.config.sliding_window == window
    assert_within_budget(logits(ours, ids), logits(theirs.double(), ids), what="logits")
    if window:
        with pytest.raises(ValueError, match="sliding_window is 5, it holds None"):
            convert_model(ours, "llama")


def test_models_in_memory_keep_dtype_and_mode(llama):
    theirs = llama().to(torch.bfloat16).train()
    theirs.generation_config.eos_token_id, theirs.generation_config.top_k = 7, 3
    ours = convert_model(theirs)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.generation_config is not theirs.generation_config
    assert ours.dtype == torch.bfloat16
    assert ours.training
    assert all(parameter.requires_grad for parameter in ours.parameters())
    assert ours.model.rotary_emb.inv_freq.dtype == torch.float32  # in bf16, positions would be off
    assert not convert_model(ours.eval(), "llama").training


def adapted(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"])).base_model.model


CHANGES = {
    "dex": lambda model: differentiate(model, "dex"),
    "in place": differentiate,
    "adapters": adapted,
    "no head": lambda model: model.model,
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_no_layout_has_are_not_left_out(llama, change):
    with pytest.raises(ValueError, match=r"has other weights than its configuration says \(\d+ (missing|unknown|of)"):
        convert_model(CHANGES[change](llama()), "diff_v2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "diff"}, "attention is 'diff', it holds 'softmax'"),
        ({"softmax_head_norm": True}, "softmax_head_norm is True, it holds False"),
        ({"core": {"head_norm": "weighted"}}, "core is {'head_norm': 'weighted'}, it holds None or {}"),
        ({"head_scale": 0.5}, "head_scale is 0.5, it holds 1.0"),
        ({"qk_clip": 2.0}, "qk_clip is 2.0, it holds None"),
        ({"value_head_dim": 6}, "value_head_dim is 6, it holds None or 4"),
        ({"hidden_act": "poly_norm"}, "hidden_act is 'poly_norm', it holds 'silu'"),
    ],
)
def test_what_llama_cannot_hold_is_named(make, fields, message):
    with pytest.raises(ValueError, match="Llama's architecture cannot hold this model") as caught:
        convert_model(make(**{"attention": "softmax", **fields}), "llama")
    assert message in str(caught.value)
