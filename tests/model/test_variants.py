"""Relations between the variants of differential attention, and what a layer refuses; test_cores.py has formulas."""

import pytest
import torch

from diff_transformer import DiffAttention, lambda_init
from diff_transformer.model.lambdas import TokenLambda

D, HEADS = 4, 8


def test_v2_without_lambda_is_grouped_query_attention():
    """lambda -> 0 leaves the first map: softmax attention of the even query heads with the shared key/value heads."""
    torch.manual_seed(0)
    layer = DiffAttention(32, HEADS, attention="diff_v2", is_causal=True, num_key_value_heads=2, head_dim=D).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    torch.nn.init.zeros_(layer.core.lam.proj.weight)
    half = layer(x)[0]
    layer.core.lam.forward = lambda hidden_states: torch.zeros(2, HEADS, 7, 1, dtype=torch.float64)
    q = layer.q_proj(x).view(2, 7, 2 * HEADS, D)[:, :, 0::2].transpose(1, 2)
    k, v = (p(x).view(2, 7, 2, D).transpose(1, 2) for p in (layer.k_proj, layer.v_proj))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.o_proj(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected, atol=1e-10, rtol=1e-8)
    assert (half - expected).abs().max() > 1e-3


def test_v2_lambda_is_one_number_a_token_and_head():
    lam = TokenLambda(16, 3)
    x = torch.randn(2, 5, 16)
    found = lam(x)
    assert (found.shape, found.dtype) == ((2, 3, 5, 1), torch.float32)
    torch.testing.assert_close(found[1, 2, 4, 0], torch.dot(x[1, 4], lam.proj.weight[2]).sigmoid())
    assert lam.mean == pytest.approx(found.mean().item())
    before = lam.mean.clone()
    lam.eval()(10 * x)  # telemetry is of training
    assert torch.equal(lam.mean, before)
    lam.to(torch.bfloat16)
    assert lam(x.bfloat16()).dtype == torch.float32


def test_one_signal_head_for_each_noise_head_is_differential_attention():
    torch.manual_seed(0)
    grouped = DiffAttention(32, 8, attention="grouped_diff", signal_heads_per_noise_head=1, num_key_value_heads=4)
    plain = DiffAttention(32, 8, num_key_value_heads=4)
    plain.load_state_dict(grouped.state_dict())
    x = torch.randn(2, 7, 32)
    assert torch.equal(grouped(x)[0], plain(x)[0])


def test_a_fixed_lambda_is_the_learned_one_of_that_value():
    learned = DiffAttention(32, 8, layer_index=2).double()
    for vector in learned.core.lam.parameters():
        torch.nn.init.zeros_(vector)  # exp(0) - exp(0) = 0
    fixed = DiffAttention(32, 8, layer_index=2, lambda_learned=False).double()
    missing, unexpected = fixed.load_state_dict(learned.state_dict(), strict=False)
    assert not missing
    assert {name.rsplit(".", 1)[1][:7] for name in unexpected} == {"lambda_"}
    assert fixed.core.lam() == lambda_init(2)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    torch.testing.assert_close(fixed(x)[0], learned(x)[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"attention": "diff_v2", "num_key_value_heads": 16},
            "8 attention heads are not divisible by 16 key/value heads",
        ),
        ({"attention": "diff_v2", "num_key_value_heads": 3}, "a group's heads share keys and values"),
        (
            {"attention": "grouped_diff", "signal_heads_per_noise_head": 2},
            "do not make groups of 2 signal heads and 1 noise head",
        ),
        (
            {"attention": "grouped_diff", "num_key_value_heads": 8},
            "half of an even num_key_value_heads must divide the 2 groups",
        ),
        ({"attention": "grouped_diff", "num_key_value_heads": 1}, "half of an even num_key_value_heads must divide"),
        ({"attention": "grouped_diff", "signal_heads_per_noise_head": 0}, "signal_heads_per_noise_head is 0"),
        (
            {"attention": "dint", "window": 4, "is_causal": True},
            "a window of 4 keys is asked for, but the running mean",
        ),
        (
            {"attention": "linear"},
            "no attention 'linear'; there are: diff, diff_v2, diff_v3, gated, grouped_diff, dint, softmax",
        ),
        ({"value_head_dim": 0}, "value_head_dim is 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DiffAttention(32, 8, **arguments)
