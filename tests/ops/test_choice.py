"""Which backend is called: "auto" decides once and says so, a named backend works or raises with the reason."""

import logging

import pytest
import torch

from diff_transformer.ops import available_backends, blockwise, diff_attention, flex, reference, sdpa
from diff_transformer.testing import make_inputs


@pytest.fixture
def called(monkeypatch):
    """The names of the backends that compute, in order."""
    names = []
    for backend in (reference, blockwise, sdpa, flex):
        name = backend.__name__.rsplit(".", 1)[-1]

        def attend(*args, name=name, compute=backend.attend):
            names.append(name)
            return compute(*args)

        monkeypatch.setattr(backend, "attend", attend)
    return names


def test_auto_on_the_cpu_is_blockwise(called):
    diff_attention(*make_inputs(T=5))
    assert called == ["blockwise"]


@pytest.mark.parametrize("name", ["reference", "blockwise", "sdpa"])
def test_a_named_backend_is_the_one_that_computes(called, name):
    diff_attention(*make_inputs(T=5), backend=name)
    assert called == [name]


def test_auto_says_what_it_chose_once(caplog):
    from diff_transformer.ops.diff_attention import _announce

    _announce.cache_clear()
    with caplog.at_level(logging.INFO, logger="diff_transformer"):
        for _ in range(3):
            diff_attention(*make_inputs(T=5))
        diff_attention(*make_inputs(T=5, dtype=torch.bfloat16))
        diff_attention(*make_inputs(T=5), backend="sdpa")
    assert [r.message for r in caplog.records] == [
        "diff_attention on cpu, float32: backend='blockwise'",
        "diff_attention on cpu, bfloat16: backend='blockwise'",
    ]


def test_gradient_of_the_mask_needs_the_reference(called):
    bias = torch.randn(5, 5, requires_grad=True)
    diff_attention(*make_inputs(T=5), attn_mask=bias).sum().backward()
    assert called == ["reference"]
    assert bias.grad is not None
    assert bias.grad.any()
    with torch.no_grad():
        diff_attention(*make_inputs(T=5), attn_mask=bias)
    assert called == ["reference", "blockwise"]


@pytest.mark.parametrize("name", ["blockwise", "sdpa", "flex"])
def test_named_backends_refuse_a_gradient_of_the_mask(name):
    bias = torch.randn(5, 5, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"attn_mask requires grad, which backend='{name}' does not compute"):
        diff_attention(*make_inputs(T=5, requires_grad=False), attn_mask=bias, backend=name)


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_reserved_names_say_why_they_are_not_available(name):
    with pytest.raises(
        RuntimeError, match=f"backend='{name}' is not available: this version has no .*; available here: "
    ):
        diff_attention(*make_inputs(T=5), backend=name)
    assert name not in available_backends("cpu", torch.float32)


def test_available_backends():
    assert {"reference", "blockwise", "sdpa"} <= set(available_backends("cpu", torch.bfloat16))
    assert available_backends("cpu", torch.float64) == ["reference", "blockwise", "sdpa"]
    assert available_backends(torch.device("cuda"), torch.bfloat16) == ["reference", "blockwise", "sdpa", "flex"]


def test_flex_refuses_gradients_on_the_cpu():
    with pytest.raises(
        NotImplementedError, match="q1, q2, k1, k2, v, lam require grad: FlexAttention computes no gradients on"
    ):
        diff_attention(*make_inputs(T=5), backend="flex")
    x = make_inputs(T=5, requires_grad=False)
    with pytest.raises(NotImplementedError, match="lam require grad"):
        diff_attention(*x[:5], x.lam.requires_grad_(), backend="flex")


def test_flex_refuses_float64():
    with pytest.raises(RuntimeError, match="backend='flex' is not available: FlexAttention has no float64 kernels"):
        diff_attention(*make_inputs(T=5, dtype=torch.float64, requires_grad=False), backend="flex")


def test_flex_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "flex" not in available_backends("cpu", torch.float32)
    with pytest.raises(RuntimeError, match="compiled with a C\\+\\+ compiler, and none was found"):
        diff_attention(*make_inputs(T=5, requires_grad=False), backend="flex")
