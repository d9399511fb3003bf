"""A batch without entries, no queries, no keys: zeros of the right shape, and gradients of zeros."""

import pytest
import torch

from diff_transformer.ops import diff_attention, diff_attention_decode, diff_attention_maps, diff_attention_varlen
from diff_transformer.testing import Inputs, make_inputs

EMPTY = [{"B": 0}, {"T": 0}, {"S": 0}, {"T": 0, "S": 0}]
BACKENDS = ["auto", "reference", "blockwise", "sdpa", "triton"]


def inputs(B=2, T=6, S=8, dtype=torch.float32, lam_shape=None) -> Inputs:
    x = make_inputs(B=2, H=4, Hn=2, G=1, T=6, S=8, D=3, Dv=5, requires_grad=False)
    x = Inputs(*(y[:B, :, :T] for y in x[:2]), *(y[:B, :, :S] for y in x[2:5]), x.lam[:B, :, :T])
    if lam_shape is not None:
        x = x._replace(lam=torch.rand(lam_shape))
    return Inputs(*(y.detach().to(dtype, copy=True).requires_grad_() for y in x))


def assert_nothing(out, shape, x):
    assert out.shape == shape
    assert not out.any()
    for y, gradient in zip(x, torch.autograd.grad(out.sum(), x), strict=True):
        assert gradient.shape == y.shape
        assert not gradient.any()


@pytest.mark.parametrize("empty", EMPTY, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_every_backend(backend, empty):
    sizes = {"B": 2, "T": 6, "S": 8} | empty
    shape = (sizes["B"], 4, sizes["T"], 5)
    for options in ({}, {"is_causal": True, "window": 3}, {"attn_mask": torch.ones(sizes["T"], sizes["S"]).bool()}):
        x = inputs(**sizes)
        x.q1.data.fill_(float("nan"))
        assert_nothing(diff_attention(*x, backend=backend, **options), shape, x)


@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_dtypes_masks_and_shapes_of_lam(empty):
    for lam_shape in ((), (4,), (4, 1, 1)):
        x = inputs(**empty, dtype=torch.bfloat16, lam_shape=lam_shape)
        out = diff_attention(*x)
        assert out.dtype == torch.bfloat16
        assert_nothing(out, (*x.q1.shape[:3], 5), x)
    bias = torch.zeros(x.q1.shape[2], x.k1.shape[2], requires_grad=True)
    assert_nothing(diff_attention(*x, attn_mask=bias), (*x.q1.shape[:3], 5), (*x, bias))


@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_maps(empty):
    x = inputs(**empty)
    for found in diff_attention_maps(*x[:4], x.lam):
        assert_nothing(found, (*x.q1.shape[:3], x.k1.shape[2]), (*x[:4],))


@pytest.mark.parametrize("backend", ["auto", "triton"], indirect=True)
@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_decoding(empty, backend):
    x = inputs(**empty)
    for lengths in (None, torch.full(x.q1.shape[:1], 5)):
        out = diff_attention_decode(*x, lengths=lengths, backend=backend)
        assert_nothing(out, (*x.q1.shape[:3], 5), x)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "triton"], indirect=True)
@pytest.mark.parametrize(
    ("ends_q", "ends_k"), [([0, 0, 0], [0, 3, 8]), ([0, 6], [0, 0]), ([0, 6, 6], [0, 0, 8])], ids=str
)
def test_packed_documents(backend, ends_q, ends_k):
    batch = inputs(B=1, T=ends_q[-1], S=ends_k[-1])
    x = Inputs(*(y.detach()[0].transpose(0, 1).requires_grad_() for y in batch))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in (ends_q, ends_k))
    out = diff_attention_varlen(*x, cu_q, cu_k, is_causal=True, backend=backend)
    assert_nothing(out, (ends_q[-1], 4, 5), x)
