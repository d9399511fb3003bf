"""Against the authors' layer written out: neighbouring heads, interleaved rotary embedding."""

import math

import pytest
import torch

from diff_transformer.model.convert import attention_from_unilm
from diff_transformer.testing import assert_within_budget

DIM, HEADS, D, THETA = 48, 6, 4, 5000.0
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def rms(x, weight=None, eps=1e-5):
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def rotate_neighbours(x):
    """[B, T, heads, d]: channels 2i and 2i + 1 are turned by t * theta ** (-2 i / d)."""
    angles = torch.arange(x.shape[1])[:, None].double() * THETA ** (-torch.arange(0, D, 2).double() / D)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def attend(x, layer, depth, pairs, rotary):
    """The layer of the authors in fp64."""
    batch, length, _ = x.shape
    repeat = HEADS // pairs
    q, k, v = (x @ layer[f"{name}_proj.weight"].T for name in "qkv")
    q, k = q.view(batch, length, 2 * HEADS, D), k.view(batch, length, 2 * pairs, D)
    v = v.view(batch, length, pairs, 2 * D).repeat_interleave(repeat, dim=2)
    if rotary:
        q, k = rotate_neighbours(q), rotate_neighbours(k)
    k = k.unflatten(2, (pairs, 2)).repeat_interleave(repeat, dim=2)
    scores = torch.einsum("bthmd,bshmd->bhmts", q.unflatten(2, (HEADS, 2)), k) * D**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    first, second = scores.softmax(-1).unbind(2)
    start = 0.8 - 0.6 * math.exp(-0.3 * depth)
    lq1, lk1, lq2, lk2 = (layer[name] for name in LAMBDAS)
    lam = (lq1 * lk1).sum().exp() - (lq2 * lk2).sum().exp() + start
    out = torch.einsum("bhts,bshe->bthe", first - lam * second, v)
    out = rms(out, layer.get("subln.weight")) * (1 - start)
    return out.flatten(2) @ layer["out_proj.weight"].T


def attend_v2(x, layer, keys):
    batch, length, _ = x.shape
    q, k, v = (x @ layer[f"{name}_proj.weight"].T for name in "qkv")
    q = rotate_neighbours(q.view(batch, length, 2 * HEADS, D))
    k = rotate_neighbours(k.view(batch, length, keys, D)).repeat_interleave(2 * HEADS // keys, dim=2)
    v = v.view(batch, length, keys, D).repeat_interleave(2 * HEADS // keys, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * D**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    heads = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
    lam = (x @ layer["lambda_proj.weight"].T).sigmoid()[..., None]
    return (heads[:, :, 0::2] - lam * heads[:, :, 1::2]).flatten(2) @ layer["o_proj.weight"].T


def random_layer(pairs, weight=True):
    def matrix(rows, columns):
        return 1.5 * torch.randn(rows, columns) * columns**-0.5

    layer = {
        "q_proj.weight": matrix(2 * HEADS * D, DIM),
        "k_proj.weight": matrix(2 * pairs * D, DIM),
        "v_proj.weight": matrix(2 * pairs * D, DIM),
        "out_proj.weight": matrix(DIM, 2 * HEADS * D),
        **{name: 0.4 * torch.randn(D) for name in LAMBDAS},
    }
    return layer | ({"subln.weight": 0.4 + torch.rand(2 * D)} if weight else {})


@pytest.mark.parametrize("pairs", [6, 3, 2])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("weight", [True, False])
def test_one_layer_by_itself(pairs, rotary, weight):
    layer = random_layer(pairs, weight)
    x = torch.randn(2, 11, DIM)
    theta = THETA if rotary else None
    ours = attention_from_unilm(layer, depth=4, rope_theta=theta)
    exact = attend(x.double(), {k: v.double() for k, v in layer.items()}, 4, pairs, rotary)
    assert_within_budget(ours(x)[0], exact, what="out")
    wide = {name: tensor.double() + 1e-9 for name, tensor in layer.items()}
    ours = attention_from_unilm(wide, depth=4, rope_theta=theta)
    assert torch.equal(ours.o_proj.weight, wide["out_proj.weight"])


@pytest.mark.parametrize("keys", [6, 3, 1])
def test_one_layer_of_the_second_version(keys):
    def matrix(rows, columns):
        return 1.5 * torch.randn(rows, columns) * columns**-0.5

    layer = {
        "q_proj.weight": matrix(2 * HEADS * D, DIM), "k_proj.weight": matrix(keys * D, DIM),
        "v_proj.weight": matrix(keys * D, DIM), "o_proj.weight": matrix(DIM, HEADS * D),
        "lambda_proj.weight": matrix(HEADS, DIM),
    }  # fmt: skip
    x, ours = torch.randn(2, 11, DIM), attention_from_unilm(layer, depth=4, rope_theta=THETA)
    exact = attend_v2(x.double(), {k: v.double() for k, v in layer.items()}, keys)
    assert_within_budget(ours(x)[0], exact, what="out")


def test_a_layer_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"the layer has \['k_proj.weight', 'q_proj.weight'\]; expected \['k_proj"):
        attention_from_unilm({f"{name}_proj.weight": torch.zeros(4, 4) for name in "qk"}, depth=0)
