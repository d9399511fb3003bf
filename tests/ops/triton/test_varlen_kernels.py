"""Packed documents in one launch of the Triton kernels, against the reference on each document by itself."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from diff_transformer import diff_attention_varlen
from diff_transformer.ops.triton import backward_form, interpreted, operator
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
    return Inputs(*(y[0].transpose(0, 1).detach().clone().requires_grad_() for y in x))


def results(x, backend, **options):
    ends = [torch.tensor(e, dtype=torch.int32, device=DEVICE) for e in (ENDS_Q, ENDS_K)]
    out = diff_attention_varlen(*x, *ends, 40, 33, backend=backend, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return out, *torch.autograd.grad(out, x, dout)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {}),
        ({}, {"is_causal": True}),
        ({"H": 1, "D": 96}, {"is_causal": True}),
        ({"H": 1}, {"is_causal": True, "window": 7}),
    ],
    ids=["full", "causal", "width 96", "window"],
)
def test_equals_each_document_by_itself(sizes, options):
    x = packed(**sizes)
    exact = results(Inputs(*(y.detach().double().requires_grad_() for y in x)), "reference", **options)
    for name, value, true in zip(("out", *x._fields), results(x, "triton", **options), exact, strict=True):
        assert_within_budget(value, true, what=name)


def test_one_pass():
    torch.use_deterministic_algorithms(False)
    x = packed()
    exact = results(Inputs(*(y.detach().double().requires_grad_() for y in x)), "reference", is_causal=True)
    with backward_form("one_pass"):
        values = results(x, "triton", is_causal=True)
    for name, value, true in zip(("out", *x._fields), values, exact, strict=True):
        assert_within_budget(value, true, what=name)


def test_is_one_launch(monkeypatch):
    calls = []
    compute = operator.launch_forward
    monkeypatch.setattr(operator, "launch_forward", lambda *a: calls.append(a[7]) or compute(*a))
    results(packed(dtype=torch.bfloat16), "triton", is_causal=True)
    assert [cu_seqlens.tolist() for cu_seqlens in calls] == [ENDS_Q]


def test_more_documents_than_fit_a_wrong_max_are_refused():
    x = packed()
    ends = [torch.tensor(e, dtype=torch.int32, device="cpu") for e in (ENDS_Q, ENDS_K)]
    if DEVICE == "cuda":
        pytest.skip("on a GPU the device asserts it, after which the process cannot use it")
    with pytest.raises(ValueError, match="max_seqlen_q is 39, but cu_seqlens_q has a document of 40 rows"):
        diff_attention_varlen(*x, *ends, 39, 33, backend="triton")
