"""The layer: contexts, masks, static caches, positions, refusals; test_cores.py has the formulas."""

import pytest
import torch
from torch.nn.functional import rms_norm
from transformers import StaticCache

from diff_transformer import DiffAttention
from diff_transformer.model.heads import ATTENTIONS
from diff_transformer.model.presets import preset


def test_cross_attention_with_padding():
    """Section 2.1 written out, one differential head after the other."""
    torch.manual_seed(0)
    layer, d = DiffAttention(32, 4, context_size=24, lambda_init=0.5).double(), 8
    x, context = torch.randn(2, 5, 32).double(), torch.randn(2, 9, 24).double()
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 6:] = False
    out, weights = layer(x, context, attention_mask=keep[:, None, None])
    assert weights is None
    q, k, v = layer.q_proj(x).split(d, -1), layer.k_proj(context).split(d, -1), layer.v_proj(context).split(2 * d, -1)
    hide = torch.zeros(2, 1, 9).double().masked_fill(~keep[:, None], float("-inf"))
    maps = [(a @ b.mT / d**0.5 + hide).softmax(-1) for a, b in zip(q, k, strict=True)]
    heads = [(maps[2 * i] - layer.core.lam() * maps[2 * i + 1]) @ v[i] for i in range(2)]
    normed = [0.5 * rms_norm(head, (2 * d,), layer.core.head_norm.weight, 1e-5) for head in heads]
    torch.testing.assert_close(out, layer.o_proj(torch.cat(normed, -1)), atol=1e-10, rtol=1e-8)
    altered = context.clone()
    altered[0, 6:] = 99.0
    torch.testing.assert_close(layer(x, altered, attention_mask=keep[:, None, None])[0], out)


@pytest.mark.parametrize("variant", ATTENTIONS[:-1])
@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (0, 30), (2, 0)])
def test_nothing_in_gives_nothing_out(variant, batch, queries):
    layer = DiffAttention(64, 4 if variant == "diff_v2" else 8, attention=variant, is_causal=True, rope_theta=1e4)
    x = torch.zeros(batch, queries, 64, requires_grad=True)
    out, maps = layer(x, output_attentions=True)
    assert out.shape == (batch, queries, 64)
    assert maps.shape[::2] == (batch, queries)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    with torch.no_grad():
        assert layer(x)[0].shape == (batch, queries, 64)


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "dint"])
def test_a_static_cache_takes_the_whole_mask(attention):
    """The modules of a model get it from the model."""
    torch.manual_seed(0)
    layer = DiffAttention(32, 4, attention=attention, signal_heads_per_noise_head=1, is_causal=True, rope_theta=1e4)
    cache = StaticCache(config=preset("debug", attention=attention, signal_heads_per_noise_head=1), max_cache_len=16)
    x, mask, parts = torch.randn(2, 6, 32), torch.ones(6, 16).tril().bool(), []
    for first, end in ((0, 1), (1, 4), (4, 6)):
        parts.append(layer(x[:, first:end], past_key_values=cache, attention_mask=mask[first:end])[0])
    torch.testing.assert_close(torch.cat(parts, 1), layer(x)[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="give attention_mask, which hides them"):
        layer(x, past_key_values=cache)


@pytest.mark.parametrize("attention", ["softmax", "gated", "diff"])
def test_a_mask_of_integers_is_refused(attention):
    with pytest.raises(ValueError, match=r"attn_mask is .*int64.*; give None, or bool"):
        DiffAttention(32, 4, attention=attention)(torch.randn(2, 6, 32), attention_mask=torch.ones(2, 1, 1, 6).long())


def test_rotary_positions_are_relative():
    torch.manual_seed(0)
    layer = DiffAttention(32, 4, rope_theta=10_000.0, is_causal=True).double()
    x = torch.randn(1, 6, 32).double()
    shifted = layer(x, position_ids=torch.arange(6)[None] + 17)[0]
    torch.testing.assert_close(shifted, layer(x)[0], atol=1e-5, rtol=1e-4)
    spread = layer(x, position_ids=3 * torch.arange(6)[None])[0]
    assert not torch.allclose(spread, layer(x)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((32, 3), {"head_dim": 8}, "do not make pairs"),
        ((32, 4), {"num_key_value_heads": 3}, "3 key/value heads do not make pairs"),
        ((30, 4), {}, "hidden_size 30 is not divisible by num_heads 4"),
        ((0, 4), {}, "hidden_size is 0; it must be positive"),
        ((32, 4), {"rope_theta": 0}, "rope_theta is 0; it must be positive"),
        ((36, 4), {"rope_theta": 1e4}, "head_dim is 9; rotary embedding needs an even width"),
        ((32, 4), {"attention": "dffi"}, r"no attention 'dffi' \(did you mean 'diff'\?\)"),
        ((32, 4), {"value_head_dim": 0}, "value_head_dim is 0"),
        ((32, 8), {"attention": "diff_v2", "num_key_value_heads": 3}, "a group's heads share keys and values"),
        ((32, 8), {"attention": "grouped_diff", "signal_heads_per_noise_head": 2}, "groups of 2 signal heads"),
        ((32, 8), {"attention": "grouped_diff", "num_key_value_heads": 1}, "half of an even num_key_value_heads"),
        ((32, 8), {"attention": "grouped_diff", "signal_heads_per_noise_head": 0}, "signal_heads_per_noise_head is 0"),
        ((32, 8), {"attention": "dint", "window": 4, "is_causal": True}, "a window of 4 keys is asked for"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        DiffAttention(*arguments, **options)


def test_a_window_of_a_call_that_is_not_causal_is_refused():
    layer, x = DiffAttention(32, 4, is_causal=True, window=3), torch.randn(2, 6, 32)
    with pytest.raises(ValueError, match="window=3 without is_causal=True"):
        layer(x, is_causal=False)
    band = torch.ones(6, 6).tril().triu(-2).bool()
    torch.testing.assert_close(layer(x, attention_mask=band, is_causal=False)[0], layer(x)[0])


X = torch.randn(2, 6, 32)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"rope_theta": 1e4}, {"context": X}, "a context has no positions"),
        ({"rope_theta": 1e4}, {"position_ids": torch.arange(6)}, r"position_ids has the shape \[6\]; give \[B, T\]"),
        ({}, {"position_ids": torch.arange(6)[None]}, "a layer without rotary embedding; build it with rope_theta"),
    ],
)
def test_bad_calls_are_refused(options, call, message):
    with pytest.raises(ValueError, match=message):
        DiffAttention(32, 4, **options)(X, **call)


@pytest.mark.parametrize("attention", ATTENTIONS[:-1])
def test_queries_and_keys_are_normalised_before_the_rotary_embedding(attention):
    settings = {"attention": attention, "is_causal": True, "rope_theta": 1e4, "norm_eps": 1e-3}
    layer, plain = DiffAttention(32, 4, qk_norm=True, **settings), DiffAttention(32, 4, **settings)
    assert not any("q_norm" in name for name in plain.state_dict())
    state = layer.state_dict()
    norms = [state.pop(name) for name in ("q_norm.weight", "k_norm.weight")]
    plain.load_state_dict(state)
    for norm, projection in zip(norms, (plain.q_proj, plain.k_proj), strict=True):
        torch.nn.init.normal_(norm, mean=1.0)

        def normalise(module, args, out, weight=norm):
            heads = out.unflatten(-1, (-1, 8))
            return (heads / (heads.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight).flatten(-2)

        projection.register_forward_hook(normalise)
    x = torch.randn(2, 6, 32)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[0], plain(x)[0])


@pytest.mark.parametrize(("attention", "heads"), [("diff", 2), ("dint", 2), ("diff_v2", 4), ("grouped_diff", 3)])
def test_a_learned_bias_has_the_heads_of_the_output(attention, heads):
    layer, x = DiffAttention(32, 4, attention=attention), torch.randn(2, 5, 32)
    bias = torch.zeros(heads, 5, 5, requires_grad=True)
    layer(x, attention_mask=bias)[0].square().sum().backward()
    assert layer.heads.outputs == heads
    assert bias.grad is not None
    assert bias.grad.abs().max() > 0


def test_large_queries_and_keys_are_clipped():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    layer = DiffAttention(32, 4, attention="diff_v3", is_causal=True, rope_theta=1e4, qk_clip=0.5).double()
    queries, keys, _ = layer._project(x, None, None, None, None)
    layer.qk_clip = None
    for clipped, whole in zip((queries, keys), layer._project(x, None, None, None, None), strict=False):
        size = whole.square().mean(-1, keepdim=True).sqrt()
        assert size.min() < 0.5 < size.max()
        torch.testing.assert_close(clipped, whole * (0.5 / size).clamp(max=1), atol=1e-6, rtol=1e-6)
