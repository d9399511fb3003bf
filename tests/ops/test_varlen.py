"""Packed documents: each backend equals the reference on every document by itself, in output and gradients."""

from itertools import pairwise

import pytest
import torch

from diff_transformer import diff_attention, diff_attention_varlen
from diff_transformer.errors import UserError
from diff_transformer.testing import Inputs, assert_within_budget, make_inputs

ENDS_Q, ENDS_K = [0, 20, 20, 53, 60], [0, 15, 30, 70, 70]  # one document without queries, one without keys
BACKENDS = ["auto", "reference", "blockwise", "sdpa"]


def packed(dtype=torch.float32, **sizes) -> Inputs:
    """Rows of all documents one after another: [rows, heads, width]; lam [rows, heads, 1]."""
    x = make_inputs(**({"B": 1, "H": 4, "Hn": 2, "G": 1, "T": ENDS_Q[-1], "S": ENDS_K[-1]} | sizes), dtype=dtype)
    return Inputs(*(y[0].transpose(0, 1).detach().clone().requires_grad_() if y.dim() == 4 else y for y in x))


def ends(values=ENDS_Q, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def attend(x, backend="auto", *, cu_q=None, cu_k=None, **options):
    cu_q, cu_k = ends(ENDS_Q) if cu_q is None else cu_q, ends(ENDS_K) if cu_k is None else cu_k
    return diff_attention_varlen(*x, cu_q, cu_k, backend=backend, **options)


def document_by_document(x, ends_q=ENDS_Q, ends_k=ENDS_K, **options):
    """In fp64, each document by a call of the reference."""
    x = Inputs(*(y.detach().double().requires_grad_() for y in x))
    outs = []
    for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        q1, q2, lam = (y[a:b].transpose(0, 1)[None] if y.dim() == 3 else y for y in (x.q1, x.q2, x.lam))
        k1, k2, v = (y[c:d].transpose(0, 1)[None] for y in (x.k1, x.k2, x.v))
        lam = lam[..., None] if lam.dim() == 2 else lam  # [H, 1]: one per head
        if b > a and d > c:
            outs.append(diff_attention(q1, q2, k1, k2, v, lam, backend="reference", **options)[0].transpose(0, 1))
        else:
            outs.append(x.v.new_zeros(b - a, x.q1.shape[1], x.v.shape[-1]))
    return x, torch.cat(outs)


def compare(x, out, exact_x, exact):
    assert_within_budget(out, exact)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad(out, x, dout.to(out))
    exact_gradients = torch.autograd.grad(exact, exact_x, dout.double())
    for name, value, gradient in zip(x._fields, gradients, exact_gradients, strict=True):
        assert_within_budget(value, gradient, what=f"gradient of {name}")


OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 7},
    "scale": {"scale": 0.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_each_document_by_itself(backend, options):
    x = packed()
    compare(x, attend(x, backend, **options), *document_by_document(x, **options))


@pytest.mark.parametrize("lam_shape", [(), (4,), (4, 1)], ids=str)
@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
def test_lam_of_other_shapes(backend, lam_shape):
    x = packed(lam_shape=lam_shape)
    compare(x, attend(x, backend, is_causal=True), *document_by_document(x, is_causal=True))
    per_head = attend(x._replace(lam=torch.full((1, 4, 1), 0.3)), backend)
    assert torch.equal(per_head, attend(x._replace(lam=0.3), backend))


def test_documents_do_not_see_one_another():
    x = packed(Hn=4, G=4, S=ENDS_Q[-1])
    out = attend(x, cu_k=ends())
    x.v.data[20:] += 1
    changed = attend(x, cu_k=ends())
    assert torch.equal(out[:20], changed[:20])
    assert not torch.equal(out[20:], changed[20:])


def test_shared_keys():
    x = packed()
    out = diff_attention_varlen(x.q1, x.q2, x.k1, x.k1, x.v, x.lam, ends(ENDS_Q), ends(ENDS_K))
    (dk,) = torch.autograd.grad(out.sum(), x.k1)
    apart = x._replace(k2=x.k1.detach().clone().requires_grad_())
    expected = attend(apart)
    assert_within_budget(out, expected)
    assert_within_budget(dk, sum(torch.autograd.grad(expected.sum(), (apart.k1, apart.k2))))


def test_bf16_and_autocast():
    x = packed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(x, is_causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(Inputs(*(y.bfloat16() for y in x[:5]), x.lam), is_causal=True))


X = packed()
BAD = {
    "not a tensor": ({"x": X._replace(k1=[1.0])}, r"k1 is a list; give a tensor of shape \[rows, heads"),
    "rank 4": ({"x": X._replace(q2=X.q2[None])}, r"q2 is \[1, 60, 2, 16\], .*; give a tensor of shape \[rows"),
    "key heads": ({"x": X._replace(v=X.v.repeat(1, 2, 1))}, r"v is \[1, 2, 70, 32\], torch.float32, cpu: give q1 \[B"),
    "lam": ({"x": X._replace(lam=torch.rand(60, 4))}, r"lam is \[1, 60, 1, 4\], .* to \[1, 4, 60, 1\]"),
    "list": ({"cu_q": ENDS_Q}, "cu_seqlens_q is a list and cu_seqlens_k .*; give both int32"),
    "int64": ({"cu_k": ends(ENDS_K, torch.int64)}, "cu_seqlens_k .* torch.int64, cpu; give both int32"),
    "no document": ({"cu_q": ends([0])}, r"cu_seqlens_q is \[1\], .* \[documents \+ 1\] on cpu"),
    "elsewhere": ({"cu_q": ends().to("meta")}, "cu_seqlens_q is .* meta and .* on cpu: 0"),
    "documents": ({"cu_k": ends([0, 40, 70])}, r"cu_seqlens_q is \[5\], .* cu_seqlens_k \[3\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case):
    changes, message = BAD[case]
    with pytest.raises(UserError, match=message):
        attend(**({"x": X} | changes))


@pytest.mark.parametrize("wrong", [[0, 20, 20, 53, 59], [1, 20, 20, 53, 60], [0, 20, 19, 53, 60]])
def test_ends_that_do_not_split_the_rows_are_refused_by_pytorch(wrong):
    with pytest.raises(RuntimeError, match="split"):
        attend(X, cu_q=ends(wrong))
