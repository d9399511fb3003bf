"""The Transformer with a norm on its heads: the control of Table 6."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import rms_norm

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.cores import AttentionCore
from diff_transformer.model.cost import count_parameters, model_cost
from diff_transformer.model.heads import CORES, count_heads
from diff_transformer.model.inputs import Visible
from diff_transformer.model.presets import preset


def test_each_head_is_normed_by_itself():
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()  # [B, n, T, d]
    heads, variant = count_heads(CORES["softmax"], 4, 4, 8), replace(CORES["softmax"], head_norm="weighted")
    plain, normed = AttentionCore(CORES["softmax"], 32, heads), AttentionCore(variant, 32, heads)
    torch.nn.init.uniform_(normed.head_norm.weight)
    plain, normed, weight = plain(q, k, v, Visible()), normed(q, k, v, Visible()), normed.head_norm.weight
    torch.testing.assert_close(normed, rms_norm(plain, (8,), weight, 1e-5))
    assert not torch.allclose(normed, plain)


def test_the_field_adds_a_weight_a_layer_and_is_saved(tmp_path):
    config = preset("debug", attention="softmax", softmax_head_norm=True, head_norm_init=0.1, hidden_size=64)
    model = DiffTransformerForCausalLM(config)
    weight = model.model.layers[1].self_attn.core.head_norm.weight
    assert weight.tolist() == pytest.approx([0.1] * 16)
    assert sum(p.numel() for p in model.parameters()) == sum(count_parameters(config).values())
    plain = preset("debug", attention="softmax", hidden_size=64)
    extra = model_cost(config).total_parameters - model_cost(plain).total_parameters
    assert extra == 2 * 16
    assert model_cost(config).flops_per_token > model_cost(plain).flops_per_token
    model.save_pretrained(tmp_path)
    again = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, 512, (1, 12))
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)
