"""DINT: rows sum to 1, running means, padding, documents, whole rows."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache

from diff_transformer import DiffAttention, DiffTransformerForCausalLM
from diff_transformer.model.heads import CORES
from diff_transformer.model.inputs import Packing, Visible
from diff_transformer.model.presets import preset


def make_layer(causal=True, **options):
    torch.manual_seed(0)
    return DiffAttention(32, 4, is_causal=causal, **{"attention": "dint", "layer_index": 2, **options}).double()


def make_model(**fields):
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(
        preset("debug", attention="dint", embedding_initializer_range=1.0, **fields)
    ).eval()


def inputs(rows=2, length=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, length, 32, generator=generator, dtype=torch.float64)


def tokens(rows=2, length=20):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("causal", [True, False])
def test_rows_sum_to_one(causal):
    layer = make_layer(causal)
    first, second, whole = layer(inputs(), output_attention_parts=True)[1]
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 2, 9, dtype=torch.float64), atol=1e-12, rtol=0)
    difference = first - layer.core.lam() * second
    assert (difference.sum(-1) - 1).abs().min() > 0.01
    torch.testing.assert_close(layer(inputs(), output_attentions=True)[1], whole)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_an_ablation_with_a_lambda_for_each_token(causal):
    """Packed documents do the same."""
    layer = make_layer(causal, attention=replace(CORES["dint"], head_norm=None, lam="token", factor=False))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = inputs()
    lam, _ = layer.core.lambda_and_gate(x)
    first, second, whole = layer.attention_maps(x)
    rows = torch.arange(1, 10)[None, None, :, None]
    mean = first.cumsum(2) / rows if causal else first.mean(2, keepdim=True)
    torch.testing.assert_close(whole, first + lam * (mean - second))
    v = layer.v_proj(x).view(2, 9, 2, 16).transpose(1, 2)
    expected = layer.o_proj((layer.core.gain * whole @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected)
    documents = Packing(torch.tensor([0, 9, 18], dtype=torch.int32), 9)
    torch.testing.assert_close(layer(x, visible=Visible(None, causal, None, documents))[0], expected)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_does_not_count(causal):
    """On both sides of a row; the rows alone give the same."""
    layer, x = make_layer(causal), inputs()
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :3] = keep[1, 5:] = False
    visible = Visible(keep[:, None, None], causal, tokens=keep)
    out, whole = layer(x, visible=visible, output_attentions=True)
    for row, part in ((0, slice(3, 9)), (1, slice(0, 5))):
        alone, map_alone = layer(x[row : row + 1, part], output_attentions=True)
        torch.testing.assert_close(out[row, part], alone[0])
        torch.testing.assert_close(whole[row, :, part, part], map_alone[0])
    if causal:
        assert (out[0, :3] == 0).all()  # before the first token nothing may be seen


def test_additive_masks_hide_as_boolean_ones_do():
    layer, x = make_layer(), inputs(1)
    seen = torch.ones(9, 9).tril().bool()
    seen[:, :3] = False
    for hidden in (float("-inf"), torch.finfo(torch.float64).min, -1e9, -1e4):
        mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~seen, hidden)
        out = layer(x, attention_mask=mask, is_causal=False)[0]
        torch.testing.assert_close(out[:, 3:], layer(x, attention_mask=seen, is_causal=False)[0][:, 3:])
        torch.testing.assert_close(out[:, 3:], layer(x[:, 3:])[0])


@pytest.mark.parametrize("causal", [True, False])
def test_the_mean_begins_anew_in_each_document(causal):
    layer, x = make_layer(causal), inputs(2, 9)
    bounds = torch.tensor([0, 1, 7, 9, 18], dtype=torch.int32)
    out = layer(x, visible=Visible(None, causal, None, Packing(bounds, 9)))[0].flatten(0, 1)
    rows = x.flatten(0, 1)
    parts = [layer(rows[None, a:b])[0][0] for a, b in pairwise(bounds)]
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("training", [False, True])
def test_positions_that_begin_anew_begin_the_mean_anew(training):
    model, ids = make_model().train(training), tokens()
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    together = model(ids, position_ids=positions).logits
    for part in (slice(0, 8), slice(8, 20)):
        torch.testing.assert_close(together[:, part], model(ids[:, part]).logits, atol=2e-5, rtol=1e-5)


def test_padded_prompts_generate_as_alone():
    """Left padding of unequal length; beams too. There is no cache."""
    model, ids = make_model(), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :2] = mask[1, :9] = 0
    for options in ({}, {"num_beams": 3}):
        options |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        together = model.generate(ids, attention_mask=mask, **options)
        for row, start in ((0, 2), (1, 9)):
            assert torch.equal(together[row, start:], model.generate(ids[row : row + 1, start:], **options)[0])


@pytest.mark.parametrize("options", [{"use_cache": True}, {"past_key_values": DynamicCache()}])
def test_a_cache_is_refused(options):
    with pytest.raises(ValueError, match="means over whole rows; call it without a cache"):
        make_model()(tokens(), **options)
