"""Packed documents in one launch of the Triton kernels, against the reference on each document by itself."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from diff_transformer import diff_attention_varlen
from diff_transformer.ops.triton import interpreted, operator
from diff_transformer.ops.triton.launching import Launch
from diff_transformer.testing import Inputs, assert_within_budget, make_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENDS_Q, ENDS_K = [0, 20, 20, 60, 67], [0, 15, 30, 63, 63]  # one document without queries, one without keys

pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="neither a GPU nor TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # NumPy on rows that see nothing
]


def packed(dtype=torch.float32, **sizes) -> Inputs:
    sizes = {"B": 1, "H": 2, "Hn": 1, "G": 1, "T": ENDS_Q[-1], "S": ENDS_K[-1], "device": DEVICE} | sizes
    x = make_inputs(**sizes, dtype=dtype)
    return Inputs(*(y[0].transpose(0, 1).detach().clone().requires_grad_() if y.dim() == 4 else y for y in x))


def ends():
    return [torch.tensor(e, dtype=torch.int32, device=DEVICE) for e in (ENDS_Q, ENDS_K)]


def attend(*x, backend="triton", **options):
    return diff_attention_varlen(*x, *ends(), backend=backend, **options)


def results(x, backend, **options):
    """The output and the gradients of the tensors that are inputs; k2 may be k1."""
    out = attend(*x, backend=backend, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return out, *torch.autograd.grad(out, [y for y in x if y is not x.k1] + [x.k1], dout)


def in_fp64(x, **options):
    wide = Inputs(*(y.detach().double().requires_grad_() for y in x))
    return results(wide._replace(k2=wide.k1) if x.k2 is x.k1 else wide, "reference", **options)


# name: (arguments of make_inputs, of the operator, whether k2 is k1)
CASES = {
    "full": ({}, {}, False),
    "causal": ({}, {"is_causal": True}, False),
    "width 96": ({"H": 1, "D": 96}, {"is_causal": True}, False),
    "window": ({"H": 1}, {"is_causal": True, "window": 7}, False),
    "shared keys": ({}, {"is_causal": True}, True),
    "shared keys, width 96": ({"H": 1, "D": 96}, {"is_causal": True}, True),
    "lam scalar": ({"lam_shape": ()}, {"is_causal": True}, False),
    "lam per head": ({"lam_shape": (2,)}, {}, False),
    "negative scale": ({}, {"is_causal": True, "scale": -0.3}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_each_document_by_itself(case):
    sizes, options, shared = CASES[case]
    x = packed(**sizes)
    x = x._replace(k2=x.k1) if shared else x
    for value, exact in zip(results(x, "triton", **options), in_fp64(x, **options), strict=True):
        assert_within_budget(value, exact)


@pytest.mark.parametrize("case", ["causal", "window", "shared keys", "lam per head"])
def test_fp16(case):
    """Beside its own error it may have that of PyTorch's attention on each document by itself."""
    sizes, options, shared = CASES[case]
    x = packed(dtype=torch.float16, **sizes)
    x = x._replace(k2=x.k1) if shared else x
    by_eager = results(x, "sdpa", **options)
    for value, exact, eager in zip(results(x, "triton", **options), in_fp64(x, **options), by_eager, strict=True):
        assert value.dtype in (torch.float16, torch.float32)
        assert_within_budget(value, exact, eager)


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two keys", "one key"])
def test_compiles_into_one_graph(shared):
    x, (ends_q, ends_k) = packed(H=1), ends()

    def loss(q1, q2, k1, k2, v, lam, *documents):
        keys = k1 if shared else k2
        out = diff_attention_varlen(q1, q2, k1, keys, v, lam, *documents, is_causal=True, backend="triton")
        return out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    given = [y for y in x if y is not x.k2 or not shared]
    expected = torch.autograd.grad(loss(*x, ends_q, ends_k), given)
    for value, exact in zip(torch.autograd.grad(compiled(*x, ends_q, ends_k), given), expected, strict=True):
        assert_within_budget(value, exact)


def test_is_one_launch(monkeypatch):
    calls = []
    compute = operator.plan_forward
    monkeypatch.setattr(operator, "plan_forward", lambda *a: calls.append(a[0].cu_seqlens_q) or compute(*a))
    results(packed(dtype=torch.bfloat16), "triton", is_causal=True)
    assert [cu_seqlens.tolist() for cu_seqlens in calls] == [ENDS_Q]


def test_one_long_document_and_many_short_ones(monkeypatch):
    """Equal to the reference, in as many programs as there are rows in tiles of 32, and one more a document."""
    bounds = [0, 0, 97, *range(97, 112), 112]
    x = packed(H=1, Hn=1, T=112, S=112)
    at = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    grids = {}

    def start(launch, start=Launch.start):
        grids[launch.kernel.fn.__name__] = launch.grid
        return start(launch)

    monkeypatch.setattr(Launch, "start", start)

    def run(y, backend):
        out = diff_attention_varlen(*y, at, at, is_causal=True, backend=backend)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
        return out, *torch.autograd.grad(out, y, dout)

    exact = run(Inputs(*(y.detach().double().requires_grad_() for y in x)), "reference")
    for value, true in zip(run(x, "triton"), exact, strict=True):
        assert_within_budget(value, true)
    if DEVICE == "cpu":
        programs = 112 // 32 + len(bounds) - 1
        assert grids["forward_kernel"] == grids["bwd_dq_kernel"] == (programs,)
        assert grids["bwd_dkdv_kernel"] == (programs,)  # one key/value head
