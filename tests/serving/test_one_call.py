"""What docs/serving.md says about servers that compute one softmax attention a layer, with equal widths."""

import pytest
import torch
import torch.nn.functional as F

from diff_transformer import DiffTransformerForCausalLM, diff_attention
from diff_transformer.model.inputs import Visible
from diff_transformer.model.presets import preset

B, H, G, T, D = 2, 4, 2, 9, 8  # H differential heads, G value heads


def one_call(q, k, v):
    """The attention of such servers: causal softmax, n query heads over m key and m value heads of width d."""
    assert q.shape[3] == k.shape[3] == v.shape[3]
    assert k.shape[1] == v.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_the_second_version_is_one_call_and_a_subtraction():
    """Query heads 2i and 2i+1 share keys and values: the cache is that of the matched Transformer."""
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(preset("debug", attention="diff_v2", num_key_value_heads=2))
    core = model.model.layers[0].self_attn.core
    hidden = torch.randn(B, T, 32)
    q, (k, v) = torch.randn(B, 2 * H, T, D), torch.randn(2, B, G, T, D)
    whole = one_call(q, k, v)  # [B, 2h, T, d]
    expected = (whole[:, 0::2] - core.lam(hidden) * whole[:, 1::2]).transpose(1, 2)
    torch.testing.assert_close(core(q, k, v, Visible(), hidden_states=hidden), expected, atol=1e-6, rtol=1e-5)


def test_the_first_version_is_one_call_with_twice_the_heads_and_twice_the_cache():
    """Each map of each head attends to each half of the values: keys and values are cached twice."""
    torch.manual_seed(0)
    q1, q2 = torch.randn(2, B, H, T, D)
    k1, k2 = torch.randn(2, B, G, T, D)
    v, lam = torch.randn(B, G, T, 2 * D), 0.7
    halves = torch.stack(v.split(D, dim=-1), dim=2)  # [B, G, half, T, D]
    # One group of queries for each of (value head, map, half): 4 G key/value heads, 4 H query heads.
    keys = torch.stack((k1, k2), dim=2)[:, :, :, None].expand(B, G, 2, 2, T, D).flatten(1, 3)
    values = halves[:, :, None].expand(B, G, 2, 2, T, D).flatten(1, 3)
    queries = torch.stack([q.unflatten(1, (G, H // G)) for q in (q1, q2)], dim=2)  # [B, G, map, H / G, T, D]
    queries = queries[:, :, :, None].expand(B, G, 2, 2, H // G, T, D).flatten(1, 4)
    out = one_call(queries, keys, values).unflatten(1, (G, 2, 2, H // G))
    first, second = (torch.cat((out[:, :, i, 0], out[:, :, i, 1]), dim=-1).flatten(1, 2) for i in (0, 1))
    expected = diff_attention(q1, q2, k1, k2, v, lam, is_causal=True, backend="reference")
    torch.testing.assert_close(first - lam * second, expected, atol=1e-6, rtol=1e-5)
    assert keys.numel() + values.numel() == 2 * (k1.numel() + k2.numel() + v.numel())


def test_the_subtraction_after_rounding_loses_digits():
    """In bf16 the subtraction loses digits: a server should return both results in fp32 or subtract in its kernel."""
    torch.manual_seed(0)
    q1, k1 = torch.randn(2, B, H, T, D)
    q2, k2 = q1 + 0.02 * torch.randn_like(q1), k1 + 0.02 * torch.randn_like(k1)  # maps that nearly agree
    v = torch.randn(B, H, T, 2 * D)
    exact = diff_attention(*(x.double() for x in (q1, q2, k1, k2, v)), 0.9, is_causal=True, backend="reference")

    def half(x):
        return x.to(torch.bfloat16)

    def attend(q, k):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    subtracted_late = (half(attend(q1, k1)) - 0.9 * half(attend(q2, k2))).double()
    subtracted_first = half(attend(q1, k1) - 0.9 * attend(q2, k2)).double()
    late, first = ((x - exact).square().mean().sqrt().item() for x in (subtracted_late, subtracted_first))
    assert late > 3 * first


@pytest.mark.parametrize("attention", ["diff", "diff_v2", "softmax"])
def test_what_a_paged_cache_holds_is_what_the_configuration_says(attention):
    """``num_key_value_heads`` heads of ``head_dim``, for keys and for values: no more, no less."""
    config = preset("debug", attention=attention, num_key_value_heads=2)
    heads = DiffTransformerForCausalLM(config).config.heads
    assert heads.keys == config.num_key_value_heads
    assert heads.values * heads.value_dim == config.num_key_value_heads * config.head_dim
