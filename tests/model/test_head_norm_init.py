"""The size of the heads before training: the closed form, and the head norm that makes a pair start alike."""

import math

import pytest
import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.config import matched_baseline
from diff_transformer.model.head_norm_init import head_outputs, matched_head_norm_init


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


def test_a_matched_pair_starts_with_heads_of_one_size():
    plain = config()
    ids = torch.randint(0, 512, (4, 64))
    plain.head_norm_init = matched_head_norm_init(plain, ids)
    theirs = head_outputs(matched_baseline(plain), ids)
    assert head_outputs(plain, ids) == pytest.approx(theirs, rel=0.02)
    assert theirs[0] < 0.2  # far from the .8 of a norm that starts at 1


def test_one_value_a_layer_is_saved_and_loaded(tmp_path):
    model = DiffTransformerForCausalLM(config(head_norm_init=[0.1, 0.2, 1]))
    model.save_pretrained(tmp_path)
    again = DiffTransformerConfig.from_pretrained(tmp_path)
    assert again.head_norm_init == [0.1, 0.2, 1]
    weights = [layer.self_attn.core.head_norm.weight.unique().tolist() for layer in model.model.layers]
    assert weights == [[pytest.approx(value)] for value in (0.1, 0.2, 1)]


def test_refusals():
    with pytest.raises(ValueError, match="2 values for 3 layers"):
        config(head_norm_init=[0.1, 0.2])
    for made in (config("softmax"), config("diff_v2"), config(head_norm=False), config(head_norm="no_weight")):
        with pytest.raises(ValueError, match="no weight of a head norm to set"):
            matched_head_norm_init(made)
