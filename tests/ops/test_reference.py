"""The specification: a case worked by hand, gradients, and what the formula implies."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from diff_transformer.ops import DiffMaps, diff_attention, diff_attention_maps
from diff_transformer.testing import make_inputs

# q1 k1^T = [[0, 0], [0, ln 3]]: first map [[1/2, 1/2], [1/4, 3/4]]
# q2 k2^T = [[0, ln 4], [0, 0]]: second map [[1/5, 4/5], [1/2, 1/2]]
BY_HAND = {
    "q1": [[0.0], [math.log(3)]],
    "q2": [[math.log(4)], [0.0]],
    "k1": [[0.0], [1.0]],
    "k2": [[0.0], [1.0]],
    "v": [[1.0, 0.0], [0.0, 10.0]],
}


def by_hand(*names):
    return [torch.tensor(BY_HAND[name], dtype=torch.float64)[None, None] for name in names]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_two_by_two_worked_by_hand(backend):
    out = diff_attention(*by_hand("q1", "q2", "k1", "k2", "v"), 0.5, backend=backend)
    # difference = first - second / 2 = [[2/5, 1/10], [0, 1/2]]
    torch.testing.assert_close(
        out[0, 0], torch.tensor([[0.4, 1.0], [0.0, 5.0]], dtype=torch.float64), rtol=0, atol=1e-15
    )
    causal = diff_attention(*by_hand("q1", "q2", "k1", "k2", "v"), 0.5, is_causal=True, backend=backend)
    torch.testing.assert_close(
        causal[0, 0], torch.tensor([[0.5, 0.0], [0.0, 5.0]], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_maps_worked_by_hand():
    maps = diff_attention_maps(*by_hand("q1", "q2", "k1", "k2"), 0.5)
    assert isinstance(maps, DiffMaps)
    expected = ([[0.5, 0.5], [0.25, 0.75]], [[0.2, 0.8], [0.5, 0.5]], [[0.4, 0.1], [0.0, 0.5]])
    for got, rows in zip(maps, expected, strict=True):
        torch.testing.assert_close(got[0, 0], torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-15)


def test_lower_right_alignment_by_hand():
    """With two queries and four keys, query 0 stands at key 2 and sees three keys; with a window of 2, keys 1 and 2."""
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 4, 1)
    first = diff_attention_maps(q, q, k, k, 0.0, is_causal=True).first[0, 0]
    assert torch.equal(first, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4]]))
    first = diff_attention_maps(q, q, k, k, 0.0, is_causal=True, window=2).first[0, 0]
    assert torch.equal(first, torch.tensor([[0, 1 / 2, 1 / 2, 0], [0, 0, 1 / 2, 1 / 2]]))


def test_head_sharing_by_hand():
    """Of six signal, three noise and one key/value head, signal heads 2 and 3 subtract the map of noise head 1."""
    x = make_inputs(B=1, H=6, Hn=3, G=1, T=5, requires_grad=False)
    out = diff_attention(*x, backend="reference")
    lam = x.lam[:, 2:4]
    pair = diff_attention(
        x.q1[:, 2:4], x.q2[:, 1:2].expand(-1, 2, -1, -1), *(y.expand(-1, 2, -1, -1) for y in x[2:5]), lam
    )
    torch.testing.assert_close(out[:, 2:4], pair)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "window": 2}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_gradcheck(backend, options):
    x = make_inputs(B=1, H=4, Hn=2, G=1, T=4, S=5, D=3, Dv=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: diff_attention(*x, backend=backend, **options), tuple(x))


def test_gradcheck_of_masks():
    x = make_inputs(B=1, H=2, T=3, D=3, Dv=2, dtype=torch.float64)
    bias = torch.randn(1, 2, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: diff_attention(*x[:6], attn_mask=x[6]), (*x, bias))
    hidden_row = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    assert torch.autograd.gradcheck(lambda *x: diff_attention(*x, attn_mask=hidden_row, backend="reference"), tuple(x))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_lam_zero_is_softmax_attention(backend):
    x = make_inputs(T=111, D=16, Dv=16, requires_grad=False)
    expected = scaled_dot_product_attention(x.q1, x.k1, x.v, is_causal=True)
    out = diff_attention(*x[:5], 0.0, is_causal=True, backend=backend)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_rows_of_the_maps_sum_to_one_minus_lam():
    x = make_inputs(T=63, requires_grad=False)
    maps = diff_attention_maps(*x[:4], x.lam, is_causal=True)
    torch.testing.assert_close(maps.difference.sum(-1, keepdim=True), 1 - x.lam, rtol=0, atol=1e-6)
    torch.testing.assert_close(maps.difference @ x.v, diff_attention(*x, is_causal=True), rtol=0, atol=1e-5)


def test_maps_of_low_precision_inputs_are_fp32():
    x = make_inputs(T=5, dtype=torch.bfloat16, requires_grad=False)
    assert {m.dtype for m in diff_attention_maps(*x[:4], x.lam)} == {torch.float32}
