"""A sliding window is one and the same in training, in every cache, in maps, on packed documents and in the cost.

Caches without a window are tested here too.
"""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.cost import attention_core_flops, model_cost
from diff_transformer.model.heads import ATTENTIONS
from diff_transformer.model.presets import preset

WINDOW = 5
KINDS = pytest.mark.parametrize("attention", [kind for kind in ATTENTIONS if kind != "dint"])  # which has none


def make(attention="diff", window=WINDOW, **fields):
    torch.manual_seed(0)
    fields = {"embedding_initializer_range": 1.0, "sliding_window": window, **fields}
    return DiffTransformerForCausalLM(preset("debug", attention=attention, **fields)).eval()


def tokens(rows=2, length=20):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


def band(length, window=WINDOW):
    """True where a query may see a key: its own and the ``window - 1`` before."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < window)


@KINDS
def test_the_window_is_the_band_mask(attention):
    model, ids = make(attention), tokens()
    whole = make(attention, window=None)
    whole.load_state_dict(model.state_dict())
    masked = whole(ids, attention_mask=band(20).expand(2, 1, 20, 20)).logits
    torch.testing.assert_close(model(ids).logits, masked, atol=1e-5, rtol=1e-5)
    assert (whole(ids).logits - masked).abs().max() > 1e-3


@KINDS
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_far_beyond_the_window_equals_full_passes(attention, cache, window):
    model, ids = make(attention, window, num_key_value_heads=2), tokens(2, 3)
    expected = ids
    for _ in range(4 * WINDOW):
        best = model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat((expected, best), 1)
    out = model.generate(
        ids, max_new_tokens=4 * WINDOW, do_sample=False, eos_token_id=None, pad_token_id=0, cache_implementation=cache,
        disable_compile=True,
    )  # fmt: skip
    assert torch.equal(out, expected)


@KINDS
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("cuts", [(1,) * 20, (20,), (3, 9, 8), (12, 8), (4, 1, 15)])
def test_cached_logits_in_any_chunks_equal_one_pass(attention, cuts, window):
    model, ids = make(attention, window), tokens()
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=24)):
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, atol=1e-5, rtol=1e-5)


@KINDS
def test_the_cache_holds_no_more_than_the_window(attention):
    model = make(attention)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
        for part in tokens(1, 60).split(7, dim=1):
            model(part, past_key_values=cache, use_cache=True)
        held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        assert held <= model_cost(model.config, bytes_per_value=4).kv_bytes(60)
        assert cache.get_seq_length() == 60


@KINDS
def test_packed_documents(attention):
    model, ids = make(attention), tokens(1, 20)
    packed = model(ids, cu_seq_lens_q=torch.tensor([0, 8, 20], dtype=torch.int32), max_length_q=12).logits
    alone = torch.cat((model(ids[:, :8]).logits, model(ids[:, 8:]).logits), 1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["diff", "softmax"])
def test_maps_are_zero_outside_the_window(attention):
    model = make(attention)
    for attended in model(tokens(), output_attentions=True).attentions:
        assert attended.masked_select(~band(20)).abs().max() == 0
        assert (attended.masked_select(band(20)) != 0).all()


def test_cost_counts_the_window():
    """A window of 2 over 4 tokens: queries see 1, 2, 2, 2 keys, 1.75 on average; without it 2.5."""
    windowed, whole = preset("debug", sliding_window=2), preset("debug")
    heads = whole.num_attention_heads * whole.head_dim
    per_key = 2 * 2 * heads + 2 * whole.num_diff_heads
    assert attention_core_flops(windowed, 4) == 1.75 * per_key + 4 * heads
    assert attention_core_flops(whole, 4) == 2.5 * per_key + 4 * heads
    assert attention_core_flops(preset("debug", sliding_window=9), 4) == attention_core_flops(whole, 4)
    cost = model_cost(windowed)
    assert cost.kv_bytes_per_token == model_cost(whole).kv_bytes_per_token
    assert (cost.kv_bytes(1), cost.kv_bytes(100)) == (cost.kv_bytes_per_token, 2 * cost.kv_bytes_per_token)
