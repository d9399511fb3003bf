"""What users of transformers expect of any model, for every variant of attention."""

import json
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.heads import ATTENTIONS
from diff_transformer.model.presets import preset

EVERY_VARIANT = pytest.mark.parametrize("attention", ATTENTIONS)


def model_of(attention: str, **fields) -> DiffTransformerForCausalLM:
    return DiffTransformerForCausalLM(preset("debug", attention=attention, **fields)).eval()


def tokens(length: int = 9, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 512, (batch, length))


@EVERY_VARIANT
@pytest.mark.parametrize("implementation", [None, "eager", "sdpa"])
def test_maps_are_returned_if_the_configuration_asks(attention, implementation, tmp_path):
    model_of(attention).save_pretrained(tmp_path / "plain")
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_attentions=True, **chosen)
    maps = model(tokens()).attentions
    assert len(maps) == 2
    assert all(layer.shape[-2:] == (9, 9) for layer in maps)
    assert model(tokens(), output_attentions=False).attentions is None
    model.save_pretrained(tmp_path / "maps")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "maps")(tokens()).attentions is not None
    model.config.output_attentions = False
    assert model(tokens()).attentions is None


@EVERY_VARIANT
@pytest.mark.parametrize("use_cache", [False, True])
def test_eager_gradients_reach_the_returned_maps(attention, use_cache):
    model = model_of(attention)
    model.set_attn_implementation("eager")
    ids = tokens()
    out = model(ids, output_attentions=True, output_attention_parts=False, use_cache=use_cache)
    for layer in out.attentions:
        layer.retain_grad()
    out.logits.square().sum().backward()
    assert all(layer.grad is not None and layer.grad.abs().max() > 0 for layer in out.attentions)
    torch.testing.assert_close(out.logits, model(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["diff", "dint"])
def test_eager_maps_leave_the_cache_as_a_plain_pass_does(attention):
    model, ids = model_of(attention), tokens(12)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        cache = model(ids[:, :8], output_attentions=True).past_key_values
        found = model(ids[:, 8:], past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids).logits[:, 8:], rtol=1e-4, atol=1e-5)


FOREIGN = {"is_decoder": True, "tokenizer_class": "GPT2Tokenizer", "task_specific_params": {"a": 1}, "my_note": "x"}


def test_keys_of_others_survive_saving_with_one_warning(tmp_path):
    model = model_of("diff")
    for key, value in FOREIGN.items():
        setattr(model.config, key, value)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="does not use: .*my_note.*kept as attributes"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {key: getattr(loaded.config, key) for key in FOREIGN} == FOREIGN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiffTransformerConfig.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    assert FOREIGN.items() <= json.loads((tmp_path / "again" / "config.json").read_text()).items()


def test_a_misspelt_field_is_still_refused_in_python():
    with pytest.raises(ValueError, match="has no field 'head_nrom'; did you mean 'head_norm'"):
        DiffTransformerConfig(head_nrom=False)


@EVERY_VARIANT
def test_early_exit_speculates_and_leaves_the_model_whole(attention):
    model, ids = model_of(attention), tokens(6, batch=1)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    found = model.generate(ids, max_new_tokens=8, do_sample=False, assistant_early_exit=1)
    assert torch.equal(found, expected)
    assert model.config.num_hidden_layers == 2
