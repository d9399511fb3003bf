"""Each relative of differential attention against its formula written out, head by head, with the maps as tensors."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import rms_norm

from diff_transformer import DiffAttention, lambda_init
from diff_transformer.model.cores import AttentionCore
from diff_transformer.model.dint import DintCore
from diff_transformer.model.heads import CORES, count_heads
from diff_transformer.model.inputs import Visible
from diff_transformer.model.lambdas import TokenLambda
from diff_transformer.testing import assert_within_budget

VARIANTS = ("diff_v2", "grouped_diff", "dint", "fixed")
KINDS = pytest.mark.parametrize("kind", VARIANTS)
D, HEADS, RATIO, DEPTH = 4, 8, 3, 3


def make(kind, *, causal=True, kv=None, **options):
    """A layer with 8 heads of width 4; its head-norm weight is random, so that it shows."""
    torch.manual_seed(0)
    attention, learned = ("diff", False) if kind == "fixed" else (kind, True)
    kv = {} if kv is None else {"num_key_value_heads": kv}
    layer = DiffAttention(
        32, HEADS, attention=attention, is_causal=causal, lambda_learned=learned, layer_index=DEPTH,
        signal_heads_per_noise_head=RATIO, head_dim=D, **kv, **options,
    )  # fmt: skip
    if layer.core.head_norm is not None:
        torch.nn.init.normal_(layer.core.head_norm.weight)
    return layer


def one_map(q, k, causal):
    """softmax(q k^T / sqrt(d)) for ``[B, T, d]``; scores in the dtype of the inputs, the softmax in fp32 or fp64."""
    scores = q @ k.mT * D**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[1], k.shape[1]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))


def maps_of_head(kind, i, q, k, groups, causal):
    """(A1, A2, number of the value head) of head ``i``; ``q``, ``k`` are lists of heads ``[B, T, d]``."""
    if kind == "diff_v2":  # heads 2i and 2i+1 share key and value head i // groups
        j = i // groups
        return one_map(q[2 * i], k[j], causal), one_map(q[2 * i + 1], k[j], causal), j
    if kind == "grouped_diff":  # groups of RATIO signal heads and their noise head
        noise, place = divmod(i, RATIO)
        j = noise // groups
        signal = q[noise * (RATIO + 1) + place]
        return one_map(signal, k[2 * j], causal), one_map(q[noise * (RATIO + 1) + RATIO], k[2 * j + 1], causal), j
    j = i // groups
    return one_map(q[2 * i], k[2 * j], causal), one_map(q[2 * i + 1], k[2 * j + 1], causal), j


def weights_of_head(kind, first, second, lam, causal):
    """A1 - lambda A2, and for DINT the mean of the rows of A1: of those so far, or of all."""
    difference = first - lam * second
    if kind != "dint":
        return difference
    rows = [first[:, : t + 1].mean(1) if causal else first.mean(1) for t in range(first.shape[1])]
    return difference + lam * torch.stack(rows, dim=1)


def written_out(layer, kind, x, groups, causal):
    """The whole layer from its weights."""
    heads, dv = layer.heads, layer.value_dim
    q, k = ((x @ p.weight.T).split(D, -1) for p in (layer.q_proj, layer.k_proj))
    v = (x @ layer.v_proj.weight.T).split(dv, -1)
    if kind == "diff_v2":
        lambdas = (x @ layer.core.lam.proj.weight.T).sigmoid()  # [B, T, h]
    outs = []
    for i in range(heads.outputs):
        first, second, j = maps_of_head(kind, i, q, k, groups, causal)
        lam = lambdas[..., i, None] if kind == "diff_v2" else layer.core.lam()
        out = weights_of_head(kind, first, second, lam, causal) @ v[j]
        if kind != "diff_v2":
            out = (1 - lambda_init(DEPTH)) * rms_norm(out, (dv,), layer.core.head_norm.weight, 1e-5)
        outs.append(out)
    return torch.cat(outs, -1) @ layer.o_proj.weight.T


GROUPS = [("diff_v2", 8, 1), ("diff_v2", 2, 4), ("diff_v2", 1, 8), ("grouped_diff", 4, 1), ("grouped_diff", 2, 2),
          ("dint", 8, 1), ("dint", 4, 2), ("fixed", 4, 2)]  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kind", "kv", "groups"), GROUPS)
def test_layer_is_the_formula(kind, kv, groups, causal):
    layer = make(kind, causal=causal, kv=kv).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], written_out(layer, kind, x, groups, causal), atol=1e-10, rtol=1e-8)


@KINDS
def test_gradients_are_those_of_the_formula(kind):
    layer = make(kind).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 7, 32, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    ours = torch.autograd.grad(layer(x)[0], leaves, upstream)
    theirs = torch.autograd.grad(written_out(layer, kind, x, 1, True), leaves, upstream)
    assert all(gradient.abs().max() > 0 for gradient in theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-7)


@KINDS
@pytest.mark.parametrize("value_head_dim", [4, 6])
def test_values_of_another_width(kind, value_head_dim):
    layer = make(kind, value_head_dim=value_head_dim).double()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    assert layer.o_proj.in_features == layer.heads.outputs * value_head_dim
    torch.testing.assert_close(layer(x)[0], written_out(layer, kind, x, 1, True), atol=1e-10, rtol=1e-8)


def core_inputs(kind, dtype, length):
    variant = replace(CORES["diff" if kind == "fixed" else kind], lam="fixed", lambda_init=0.0)
    if kind == "diff_v2":
        variant = CORES[kind]
    heads = count_heads(variant, HEADS, 4, D)
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads.queries, D), (heads.keys, D), (heads.values, heads.value_dim))
    q, k, v = (torch.randn(2, n, length, width, generator=generator).to(dtype) for n, width in shapes)
    lam = torch.rand((2, heads.outputs, length, 1) if kind == "diff_v2" else (), generator=generator)
    core = (DintCore if kind == "dint" else AttentionCore)(variant, 32, heads)
    return core, heads, [q, k, v, lam.to(torch.promote_types(dtype, torch.float32))]


def eager_core(kind, heads, q, k, v, lam):
    """The formula on ready heads: the maps' difference in fp32 (fp64), rounded to the dtype of v, times v."""
    groups = {"diff_v2": heads.outputs // heads.keys, "grouped_diff": heads.outputs // RATIO * 2 // heads.keys}
    outs = []
    for i in range(heads.outputs):
        first, second, j = maps_of_head(kind, i, q.unbind(1), k.unbind(1), groups.get(kind, HEADS // heads.keys), True)
        own = lam[:, i] if kind == "diff_v2" else lam
        outs.append(weights_of_head(kind, first, second, own, True).to(v.dtype) @ v[:, j])
    return torch.stack(outs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["diff_v2", "grouped_diff", "dint"])
def test_numerics_budget(kind, dtype):
    """fp32 to 1e-5; bf16 within twice the eager error, forward and every gradient, lambda's too; an odd length."""
    core, heads, inputs = core_inputs(kind, dtype, 63)
    upstream = torch.randn(2, heads.outputs, 63, heads.value_dim, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(function, tensors, weights):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, weights)]

    exact = run(lambda *x: eager_core(kind, heads, *x), [x.double() for x in inputs], upstream.double())
    eager = run(lambda *x: eager_core(kind, heads, *x), inputs, upstream)
    ours = run(lambda q, k, v, lam: core.attend(q, k, v, lam, Visible()), inputs, upstream)
    for name, mine, true, plain in zip(("out", "q", "k", "v", "lambda"), ours, exact, eager, strict=True):
        assert_within_budget(mine, true, plain if dtype == torch.bfloat16 else None, what=f"{kind} {name}")


def test_v2_without_lambda_is_grouped_query_attention():
    """lambda -> 0 leaves the first map: softmax attention of the even query heads with the shared key/value heads."""
    layer = make("diff_v2", kv=2).double()
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
    lam(10 * x[:, :1])  # a step of decoding leaves telemetry alone
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
