"""The weight of the first map: every backend, packed documents and decoding, closed gates included.

The statement in fp64 is written with one softmax attention for each map, out = first O1 - lam O2.
"""

from typing import Any

import pytest
import torch

from diff_transformer import diff_attention, diff_attention_decode, diff_attention_maps, diff_attention_varlen
from diff_transformer.testing import assert_within_budget, make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy in Triton's interpreter


EVERY = pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "triton"], indirect=True)


# name: (arguments of make_inputs beside B = 2, H = 2, T = 40; of diff_attention; shape of first)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "a weight a row": ({}, {"is_causal": True}, (2, 2, 40, 1)),
    "a weight a head": ({}, {}, (2,)),
    "one weight": ({}, {"is_causal": True}, ()),
    "a weight a query": ({}, {"is_causal": True, "window": 9}, (1, 1, 40, 1)),
    "shared noise, grouped keys": ({"H": 4, "Hn": 2, "G": 1}, {"is_causal": True}, (2, 4, 40, 1)),
    "width 96": ({"B": 1, "D": 96}, {"is_causal": True}, (1, 2, 40, 1)),
    "33 on 70": ({"T": 33, "S": 70}, {"is_causal": True}, (2, 2, 33, 1)),
    "70 on 33": ({"T": 70, "S": 33}, {"is_causal": True}, (2, 2, 70, 1)),
    "mask": ({}, {"attn_mask": torch.arange(1600).view(40, 40) % 3 > 0}, (2, 2, 40, 1)),
}


def problem(case, dtype=torch.float32):
    """(inputs, first, options); every third weight is 0, a closed gate."""
    sizes, options, shape = CASES[case]
    x = make_inputs(**{"B": 2, "H": 2, "T": 40} | sizes, dtype=dtype)
    first = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    first.view(-1)[::3] *= len(shape) < 2
    return x, first.requires_grad_(), options


def differentiated(function, x, first, **options):
    out = function(*x, first=first, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return out, *torch.autograd.grad(out, (*x, first), dout)


def statement(q1, q2, k1, k2, v, lam, *, first, **options):
    H, dtype = q1.shape[1], v.dtype
    noise = q2.repeat_interleave(H // q2.shape[1], dim=1)
    one, two = (diff_attention(q, q, k, k, v, 0.0, backend="reference", **options) for q, k in ((q1, k1), (noise, k2)))
    first = first.view(-1, 1, 1) if first.dim() == 1 else first
    return (first * one - lam * two).to(dtype)


@EVERY
@pytest.mark.parametrize("case", CASES)
def test_equals_the_statement(backend, case):
    x, first, options = problem(case)
    wide = x.to(torch.float64)
    exact = differentiated(statement, wide, first.detach().double().requires_grad_(), **options)
    values = differentiated(diff_attention, x, first, backend=backend, **options)
    for name, value, true in zip(("out", *x._fields, "first"), values, exact, strict=True):
        assert_within_budget(value, true, what=name)


@EVERY
@pytest.mark.parametrize("case", ["a weight a row", "shared noise, grouped keys"])
def test_half_precision(backend, case):
    dtype = torch.float16 if backend == "triton" else torch.bfloat16  # the interpreter has no bf16
    x, first, options = problem(case, dtype)
    wide = x.to(torch.float64)
    exact = differentiated(statement, wide, first.detach().double().requires_grad_(), **options)
    eager = differentiated(statement, x, first, **options)
    for name, value, *others in zip(
        ("out", *x._fields, "first"),
        differentiated(diff_attention, x, first, backend=backend, **options), exact, eager, strict=True,
    ):  # fmt: skip
        assert_within_budget(value, *others, what=name)


@EVERY
def test_packed_documents(backend):
    x = make_inputs(B=1, H=2, T=40)
    first, ends = torch.rand(40, 2, 1), torch.tensor([0, 11, 11, 40], dtype=torch.int32)
    rows = [y[0].transpose(0, 1) for y in x]
    out = diff_attention_varlen(*rows, ends, ends, first=first, is_causal=True, backend=backend)
    for a, b in ((0, 11), (11, 40)):
        alone = x._make(y[:, :, a:b].detach() for y in x)
        exact = statement(*alone.to(torch.float64), first=first[a:b].transpose(0, 1)[None].double(), is_causal=True)
        assert_within_budget(out[a:b].transpose(0, 1)[None], exact)


@EVERY
@pytest.mark.parametrize("multiprocessors", [2, 1000], ids=["one split", "several splits"])
@pytest.mark.parametrize("lengths", [None, [300, 170]])
def test_decoding(monkeypatch, backend, lengths, multiprocessors):
    if backend == "triton":
        monkeypatch.setattr("diff_transformer.ops.triton.decode.multiprocessors", lambda device: multiprocessors)
    x = make_inputs(B=2, H=4, G=2, T=2, S=300, requires_grad=False)
    first = torch.rand(2, 4, 2, 1)
    used = None if lengths is None else torch.tensor(lengths)
    out = diff_attention_decode(*x, first=first, lengths=used, backend=backend)
    for b, n in enumerate(lengths or [300, 300]):
        alone = x._make(y[b : b + 1] for y in x)
        alone = alone._replace(k1=alone.k1[:, :, :n], k2=alone.k2[:, :, :n], v=alone.v[:, :, :n])
        exact = statement(*alone.to(torch.float64), first=first[b : b + 1].double(), is_causal=True)
        assert_within_budget(out[b : b + 1], exact)


def test_numbers_and_maps():
    x = make_inputs(T=9, requires_grad=False)
    plain = diff_attention(*x)
    assert torch.equal(diff_attention(*x, first=1.0), plain)
    assert_within_budget(diff_attention(*x, first=0.0), plain - diff_attention(*x[:5], 0.0))
    maps = diff_attention_maps(*x[:4], x.lam, first=0.3)
    torch.testing.assert_close(maps.difference, 0.3 * maps.first - x.lam * maps.second)
    torch.testing.assert_close(maps.difference.sum(-1, keepdim=True), 0.3 - x.lam)
