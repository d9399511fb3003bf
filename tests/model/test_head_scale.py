"""The size of the heads before training: the closed form, and the scale that makes a pair start alike."""

import math

import pytest
import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.errors import UserError
from diff_transformer.model.config import matched_baseline
from diff_transformer.model.head_scale import head_outputs, with_matched_scale


def config(attention="diff", **fields):
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return DiffTransformerConfig(**{**sizes, "attention": attention, "initializer_range": 0.05, **fields})


@pytest.mark.parametrize(("width", "length", "std"), [(64, 32, 0.05), (128, 128, 0.02), (256, 64, 0.04)])
def test_the_closed_form_is_what_an_untrained_first_layer_gives(width, length, std):
    small = config("softmax", hidden_size=width, initializer_range=std, num_hidden_layers=1)
    ids = torch.randint(0, 512, (16, length), generator=torch.Generator().manual_seed(1))
    # Values of RMS std sqrt(width), averaged by flat maps over 1 to `length` tokens; two are equal with probability c.
    c, harmonic = 1 / 512, sum(1 / t for t in range(1, length + 1))
    expected = std * math.sqrt(width) * math.sqrt(c + (1 - c) * harmonic / length)
    assert head_outputs(small, ids)[0] == pytest.approx(expected, rel=0.1)


def test_the_head_norm_gives_its_own_size_whatever_the_model():
    ids = torch.randint(0, 512, (4, 32))
    for width in (64, 128):
        assert head_outputs(config(hidden_size=width), ids)[0] == pytest.approx(0.8, rel=0.02)


VARIANTS = {
    "V1": {},
    "V1, lambda fixed": {"lambda_learned": False, "lambda_init": 0.3},
    "V1, no norm": {"head_norm": False},
    "V1, norm without a weight": {"head_norm": "no_weight"},
    "V2": {"attention": "diff_v2"},
    "V2, norm and gate": {"attention": "diff_v2", "core": {"gate": "normed", "head_norm": "weighted"}},
    "V3": {"attention": "diff_v3"},
    "gated": {"attention": "gated"},
    "grouped": {"attention": "grouped_diff", "num_attention_heads": 8},
    "dint": {"attention": "dint"},
    "Transformer + head norm": {"attention": "softmax", "softmax_head_norm": True},
}


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=list(VARIANTS))
def test_matched_heads_start_with_the_size_of_the_transformers(fields):
    plain, ids = config(**fields), torch.randint(0, 512, (4, 64))
    matched = with_matched_scale(plain, ids, draws=1)
    targets = head_outputs(matched_baseline(plain), ids)
    assert head_outputs(matched, ids) == pytest.approx(targets, rel=0.02)
    assert head_outputs(plain, ids) != pytest.approx(targets, rel=0.1)
    assert (matched.head_norm_init != 1.0) == (matched.variant.head_norm == "weighted") == (matched.head_scale == 1.0)


def test_the_transformer_matches_itself():
    assert with_matched_scale(config("softmax")).head_scale == pytest.approx([1.0] * 3, rel=0.01)


def test_one_value_a_layer_is_saved_and_loaded(tmp_path):
    model = DiffTransformerForCausalLM(config(head_norm_init=[0.1, 0.2, 1]))
    model.save_pretrained(tmp_path)
    again = DiffTransformerConfig.from_pretrained(tmp_path)
    assert again.head_norm_init == [0.1, 0.2, 1]
    weights = [layer.self_attn.core.head_norm.weight.unique().tolist() for layer in model.model.layers]
    assert weights == [[pytest.approx(value)] for value in (0.1, 0.2, 1)]


def test_refusals():
    for name in ("head_norm_init", "head_scale"):
        with pytest.raises(UserError, match=f"{name} has 2 values for 3 layers"):
            config(**{name: [0.1, 0.2]})
    with pytest.raises(UserError, match="head_scale='matched' has no value to match here"):
        DiffTransformerForCausalLM(config(head_scale="matched"))
