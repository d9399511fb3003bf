"""Packed documents: each backend equals the reference on every document by itself, in output and gradients."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from diff_transformer import diff_attention, diff_attention_varlen
from diff_transformer.errors import UserError
from diff_transformer.testing import Inputs, assert_within_budget, make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy in Triton's interpreter

ENDS_Q, ENDS_K = [0, 20, 20, 53, 60], [0, 15, 30, 70, 70]  # one document without queries, one without keys
TRITON = pytest.mark.parametrize("backend", ["triton"], indirect=True)


def packed(dtype=torch.float32, shared=False, **sizes) -> Inputs:
    """Rows of all documents one after another: [rows, heads, width]; lam [rows, heads, 1]. ``shared``: k2 is k1."""
    x = make_inputs(**({"B": 1, "H": 4, "Hn": 2, "G": 1, "T": ENDS_Q[-1], "S": ENDS_K[-1]} | sizes), dtype=dtype)
    x = Inputs(*(y[0].transpose(0, 1).detach().clone().requires_grad_() if y.dim() == 4 else y for y in x))
    return x._replace(k2=x.k1) if shared else x


def ends(values=ENDS_Q, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def attend(x, backend="auto", *, cu_q=None, cu_k=None, **options):
    at = {"device": x.v.device}
    cu_q, cu_k = ends(ENDS_Q, **at) if cu_q is None else cu_q, ends(ENDS_K, **at) if cu_k is None else cu_k
    return diff_attention_varlen(*x, cu_q, cu_k, backend=backend, **options)


def document_by_document(x, ends_q=ENDS_Q, ends_k=ENDS_K, **options):
    """In fp64, each document by a call of the reference."""
    wide = Inputs(*(y.detach().double().requires_grad_() for y in x))
    x = wide._replace(k2=wide.k1) if x.k2 is x.k1 else wide
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


def with_gradients(x, out):
    """The output and the gradient of each input; of k1 and k2 that are one, each is that of both."""
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return out, *torch.autograd.grad(out, x, dout.to(out))


def compare(x, out, exact_x, exact, eager=None):
    yardsticks = (None,) * 7 if eager is None else with_gradients(x, eager)
    values = with_gradients(x, out), with_gradients(exact_x, exact), yardsticks
    for name, *each in zip(("out", *x._fields), *values, strict=True):
        assert_within_budget(*each, what=name)


# name: (arguments of packed, of the operator)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "width 96": ({"H": 1, "Hn": 1, "D": 96}, {"is_causal": True}),
    "window": ({}, {"is_causal": True, "window": 7}),
    "shared keys": ({"shared": True}, {"is_causal": True}),
    "shared keys, width 96": ({"H": 1, "Hn": 1, "D": 96, "shared": True}, {"is_causal": True}),
    "lam scalar": ({"lam_shape": ()}, {"is_causal": True}),
    "lam per head": ({"lam_shape": (4,)}, {}),
    "lam [H, 1]": ({"lam_shape": (4, 1)}, {}),
    "negative scale": ({}, {"is_causal": True, "scale": -0.3}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "triton"], indirect=True)
def test_equals_each_document_by_itself(backend, device, case):
    sizes, options = CASES[case]
    x = packed(**sizes, device=device)
    compare(x, attend(x, backend, **options), *document_by_document(x, **options))


@TRITON
@pytest.mark.parametrize("case", ["causal", "window", "shared keys", "lam per head"])
def test_fp16(backend, device, case):
    """Beside its own error it may have that of PyTorch's attention on each document by itself."""
    sizes, options = CASES[case]
    x = packed(torch.float16, **sizes, device=device)
    compare(x, attend(x, backend, **options), *document_by_document(x, **options), attend(x, "sdpa", **options))


@TRITON
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two keys", "one key"])
def test_compiles_into_one_graph(backend, device, shared):
    x = packed(H=1, Hn=1, shared=shared, device=device)
    documents = [ends(values, device=device) for values in (ENDS_Q, ENDS_K)]

    def loss(q1, q2, k1, k2, v, lam):
        keys = k1 if shared else k2
        out = diff_attention_varlen(q1, q2, k1, keys, v, lam, *documents, is_causal=True, backend=backend)
        return out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*x), x)
    for value, exact in zip(torch.autograd.grad(compiled(*x), x), expected, strict=True):
        assert_within_budget(value, exact)


@TRITON
def test_one_long_document_and_many_short_ones(monkeypatch, backend, device):
    """Equal to the reference, in as many programs as there are rows in the interpreter's tiles of 32, and one more a
    document."""
    from diff_transformer.ops.triton.launching import Launch

    bounds, grids = [0, 0, 97, *range(97, 112), 112], {}
    x, at = packed(H=1, Hn=1, T=112, S=112, device=device), ends(bounds, device=device)

    def start(launch, start=Launch.start):
        grids[launch.kernel.fn.__name__] = launch.grid
        return start(launch)

    monkeypatch.setattr(Launch, "start", start)
    out = attend(x, backend, cu_q=at, cu_k=at, is_causal=True)
    compare(x, out, *document_by_document(x, bounds, bounds, is_causal=True))
    programs = 112 // 32 + len(bounds) - 1
    kernels = ("forward_kernel", "bwd_dq_kernel", "bwd_dkdv_kernel")  # one key/value head
    assert device == "cuda" or [grids[name] for name in kernels] == [(programs,)] * 3


def test_a_number_is_as_one_for_each_head():
    x = packed()
    per_head = attend(x._replace(lam=torch.full((1, 4, 1), 0.3)))
    assert torch.equal(per_head, attend(x._replace(lam=0.3)))


def test_documents_do_not_see_one_another():
    x = packed(Hn=4, G=4, S=ENDS_Q[-1])
    out = attend(x, cu_k=ends())
    x.v.data[20:] += 1
    changed = attend(x, cu_k=ends())
    assert torch.equal(out[:20], changed[:20])
    assert not torch.equal(out[20:], changed[20:])


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
