"""The backend over flash-attn, against a stand-in for the package: its conventions, computed in fp32."""

import sys
from types import ModuleType

import pytest
import torch

from diff_transformer.ops import reference, softmax_calls
from diff_transformer.ops.call import check
from diff_transformer.ops.softmax_calls import MODULES, PROBE_TOKENS, Flash, flash_package, flash_parts
from diff_transformer.testing import assert_within_budget, make_inputs


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    """softmax attention of q [B, T, H, D], k [B, S, G, D], v [B, S, G, Dv]; the causal limit is at the lower right."""
    T, S, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    back = torch.arange(S - T, S)[:, None] - torch.arange(S)  # [T, S], how far before its query a key lies
    seen = (back >= 0) if causal else torch.ones(T, S, dtype=torch.bool)
    if window_size[0] >= 0:
        seen &= back <= window_size[0]
    if window_size[1] >= 0:
        seen &= -back <= window_size[1]
    assert seen.any(-1).all(), "the backend asks for no rows that see nothing"
    scores = (q @ k.mT * softmax_scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


class Package:
    """Installs a ``flash_attn_func``; keeps the widths (D, Dv) and the head counts of every call."""

    def __init__(self, monkeypatch, name="flash_attn", equal_widths=False, forward_only=False, with_lse=False):
        self.calls = []

        class Refusing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, out):
                return out.clone()

            @staticmethod
            def backward(ctx, *gradients):
                raise AssertionError("d_v must be d_qk")

        def function(q, k, v, **options):
            if equal_widths and q.shape[-1] != v.shape[-1]:
                raise RuntimeError("v must have shape (batch_size, seqlen_k, num_heads_k, head_size)")
            assert q.shape[-1] % 8 == v.shape[-1] % 8 == 0
            if q.shape[1] != PROBE_TOKENS:
                self.calls.append((q.shape[-1], v.shape[-1], q.shape[2], k.shape[2]))
            out = flash_attn_func(q, k, v, **options)
            if forward_only and q.shape[-1] != v.shape[-1]:
                out = Refusing.apply(out)
            return (out, None) if with_lse else out

        for missing in MODULES:
            monkeypatch.setitem(sys.modules, missing, None)
        module = ModuleType(name)
        module.flash_attn_func = function
        monkeypatch.setitem(sys.modules, name, module)
        flash_package.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    yield
    flash_package.cache_clear()


CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "window": ({}, {"is_causal": True, "window": 7}),
    "window of one": ({}, {"is_causal": True, "window": 1}),
    "scale": ({}, {"scale": 0.3}),
    "fewer queries": ({"T": 5, "S": 31}, {"is_causal": True}),
    "fewer queries, window": ({"T": 5, "S": 31}, {"is_causal": True, "window": 3}),
    "more queries": ({"T": 31, "S": 9}, {"is_causal": True}),
    "more queries, not causal": ({"T": 31, "S": 9}, {}),
    "grouped": ({"H": 8, "Hn": 8, "G": 2}, {"is_causal": True}),
    "fewer noise heads": ({"H": 6, "Hn": 2, "G": 1}, {"is_causal": True}),
    "equal widths": ({"Dv": 16}, {"is_causal": True}),
    "narrow values": ({"Dv": 8}, {"is_causal": True}),
    "uneven values": ({"Dv": 37}, {"is_causal": True}),
    "odd width": ({"D": 13, "Dv": 26}, {"is_causal": True}),
    "lam of a head": ({"lam_shape": (4,)}, {"is_causal": True}),
    "strided": ({"strided": True}, {"is_causal": True}),
}


@pytest.mark.parametrize("equal_widths", [False, True], ids=["_1", "_2"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(monkeypatch, case, equal_widths):
    Package(monkeypatch, equal_widths=equal_widths)
    sizes, options = CASES[case]
    x = make_inputs(**sizes)
    y = x.to(torch.float64)
    out, exact = (backend.attend(check(*z, **options)) for backend, z in ((Flash, x), (reference, y)))
    assert out.dtype == torch.float32
    assert_within_budget(out, exact)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, x, dout)
    exact_gradients = torch.autograd.grad(exact, y, dout.double())
    for name, actual, expected in zip(x._fields, gradients, exact_gradients, strict=True):
        assert_within_budget(actual, expected, what=f"gradient of {name}")


def test_one_call_a_map_where_values_may_be_wider(monkeypatch):
    package = Package(monkeypatch)
    x = make_inputs(H=6, Hn=2, G=1)
    Flash.attend(check(*x))
    assert package.calls == [(16, 32, 6, 1), (16, 32, 2, 1)]
    assert flash_parts(check(*x)) == (1, 32)


def test_two_calls_a_map_where_widths_must_agree(monkeypatch):
    package = Package(monkeypatch, equal_widths=True)
    x = make_inputs()
    Flash.attend(check(*x))
    assert package.calls == [(16, 16, 4, 4)] * 4
    assert flash_parts(check(*x)) == (2, 16)


def test_a_version_that_cannot_go_back_through_wider_values(monkeypatch):
    Package(monkeypatch, forward_only=True)
    x = make_inputs()
    assert flash_parts(check(*x)) == (2, 16)
    with torch.no_grad():
        assert flash_parts(check(*x)) == (1, 32)


def test_values_wider_than_any_kernel_go_in_parts(monkeypatch):
    package = Package(monkeypatch)
    x = make_inputs(B=1, H=1, T=4, D=144)
    Flash.attend(check(*x))
    assert package.calls == [(144, 144, 1, 1)] * 4


@pytest.mark.parametrize("name", MODULES)
def test_every_generation_is_found_and_its_log_sum_exps_ignored(monkeypatch, name):
    Package(monkeypatch, name=name, with_lse=True)
    assert flash_package()[0] == name
    x = make_inputs()
    assert Flash.attend(check(*x)).shape == (2, 4, 63, 32)


def test_bf16_maps_are_subtracted_in_fp32(monkeypatch):
    Package(monkeypatch)
    x = make_inputs(dtype=torch.bfloat16)
    function = flash_package()[1]
    monkeypatch.setattr(softmax_calls, "flash_function", lambda: lambda *args, **kw: function(*args, **kw).bfloat16())
    first, second = (
        function(*(y.transpose(1, 2) for y in (q, k, x.v)), softmax_scale=0.25).bfloat16().transpose(1, 2).float()
        for q, k in ((x.q1, x.k1), (x.q2, x.k2))
    )
    out = Flash.attend(check(*x))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (first - x.lam * second).bfloat16())


def test_reasons(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for missing in MODULES:
        monkeypatch.setitem(sys.modules, missing, None)
    flash_package.cache_clear()
    assert Flash.unsupported_reason(cuda, torch.bfloat16) == (
        "the flash-attn package is not installed; install it, or give another backend"
    )
    Package(monkeypatch)
    assert Flash.unsupported_reason(cuda, torch.bfloat16) is None
    assert "not float32" in Flash.unsupported_reason(cuda, torch.float32)
    assert "not on cpu" in Flash.unsupported_reason(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability 8.0" in Flash.unsupported_reason(cuda, torch.float16)


def test_reasons_from_the_arguments():
    x = make_inputs()
    mask = torch.ones(63, 63, dtype=torch.bool)
    assert Flash.unsupported_call_reason(check(*x)) is None
    assert "takes no attn_mask" in Flash.unsupported_call_reason(check(*x, attn_mask=mask))
    wide = make_inputs(T=3, D=264)
    assert "width 256 at most, not 264" in Flash.unsupported_call_reason(check(*wide))
