"""The gradient kernels for Hopper, run on the CPU by an emulator (tests/helpers/gluon_emulator.py)."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from diff_transformer import diff_attention
from diff_transformer.testing import assert_within_budget, make_inputs

pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")
import hopper_check
from gluon_emulator import Kernel
from triton.experimental.gluon import language as gl

from diff_transformer.ops.call import Call
from diff_transformer.ops.hopper import backward, forward, support
from diff_transformer.ops.hopper.bwd_dkdv import bwd_dkdv
from diff_transformer.ops.hopper.bwd_dq import bwd_dq
from diff_transformer.ops.hopper.forward import descriptor
from diff_transformer.ops.hopper.fwd_sequential import fwd_sequential
from diff_transformer.ops.hopper.support import read_by_tma
from diff_transformer.ops.triton import operator
from diff_transformer.ops.triton.launching import INTERPRETED, launched

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="sums of rows are made by a plain kernel, here interpreted")

D = 128
CAUSAL, FULL = True, False


def emulate(monkeypatch, seed=0, changed=None):
    """Make the launcher run the emulator."""
    monkeypatch.setattr(backward, "bwd_dkdv", Kernel(bwd_dkdv, seed, changed))
    monkeypatch.setattr(backward, "bwd_dq", Kernel(bwd_dq, seed, changed))


def gradients(call, dout, saved):
    """Those that the launcher returns."""
    return backward.summed(call, launched(*backward.plan_backward(call, dout, saved)))


def problem(inputs, is_causal, scale=None):
    """Arguments of ``gradients``, and what it should return.

    A softmax over one key is 1 whatever the score, whose gradient is 0 up to the rounding of the saved outputs, while
    the eager formula has 0 exactly: there they are saved in fp32.
    """
    scale = inputs.q1.shape[-1] ** -0.5 if scale is None else scale
    B, H, T = inputs.q1.shape[:3]
    inputs = inputs._replace(lam=inputs.lam.expand(B, H, T, 1))
    dtype = inputs.v.dtype
    dout = torch.randn(B, H, T, inputs.v.shape[3], generator=torch.Generator().manual_seed(1)).to(dtype)
    results = hopper_check.expected_results(*inputs, is_causal=is_causal, scale=scale)
    saved = [exact for exact, _ in results.values()][1:]
    outputs = torch.float32 if inputs.k1.shape[2] == 1 else dtype
    saved = [saved[0].to(outputs), saved[1].to(outputs), saved[2].float(), saved[3].float()]
    k2 = None if inputs.k2 is inputs.k1 else inputs.k2
    arguments = [Call(*inputs._replace(k2=k2), scale=scale, is_causal=is_causal), dout, saved]
    return arguments, hopper_check.expected_gradients(dout, saved[1], *inputs, is_causal=is_causal, scale=scale)


def check(inputs, is_causal, scale=None):
    """Run the emulated kernels through their launcher and compare everything that they return."""
    arguments, expected = problem(inputs, is_causal, scale)
    results = gradients(*arguments)
    for (name, (exact, eager)), result in zip(expected.items(), results, strict=True):
        if name == "dk2" and inputs.k2 is inputs.k1:
            assert result.numel() == 0
            continue
        assert_within_budget(result, exact, eager, what=name)
        if name != "dlam":
            assert result.dtype == inputs.v.dtype, name
            assert result.transpose(1, 2).is_contiguous()


# name: (arguments of make_inputs, causal)
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "one program, exact tiles": ({"T": 64}, CAUSAL),
    "odd length": ({"T": 333}, CAUSAL),
    "one query, one key": ({"T": 1}, CAUSAL),
    "one query": ({"T": 1, "S": 200}, CAUSAL),
    "one key": ({"T": 130, "S": 1}, FULL),
    "65 rows": ({"T": 65, "S": 65}, FULL),
    "fewer queries than keys": ({"T": 63, "S": 250}, CAUSAL),
    "a tile boundary on the diagonal": ({"T": 64, "S": 192}, CAUSAL),
    "a key beyond a tile boundary": ({"T": 64, "S": 193}, CAUSAL),
    "queries that see nothing": ({"T": 200, "S": 63}, CAUSAL),
    "whole programs that see nothing": ({"T": 300, "S": 20}, CAUSAL),
    "full, odd": ({"T": 111, "S": 333}, FULL),
    "full, whole tiles": ({"T": 128, "S": 256}, FULL),
    "full, more tiles than slots": ({"T": 500, "S": 500}, FULL),
    "rows for one half only": ({"T": 40, "S": 700}, CAUSAL),
    "heads and batches": ({"B": 2, "H": 3, "T": 150}, CAUSAL),
    "grouped keys": ({"B": 2, "H": 4, "G": 2, "T": 150}, CAUSAL),
    "shared noise, grouped keys": ({"B": 2, "H": 4, "Hn": 2, "G": 1, "T": 70}, CAUSAL),
    "one noise head": ({"H": 3, "Hn": 1, "G": 1, "T": 150}, FULL),
    "one key head for all": ({"H": 4, "G": 1, "T": 70}, FULL),
    "as a layer lays them out": ({"B": 2, "H": 2, "T": 111, "strided": True}, CAUSAL),
    "one lam": ({"H": 2, "T": 70, "lam_shape": (1, 1, 1, 1)}, CAUSAL),
    "lam a head": ({"B": 2, "H": 2, "T": 70, "lam_shape": (1, 2, 1, 1)}, CAUSAL),
    "float16": ({"T": 150, "dtype": torch.float16}, CAUSAL),
}


def inputs_of(case, **more):
    defaults: dict[str, Any] = {"B": 1, "H": 1, "dtype": torch.bfloat16, "requires_grad": False}
    return make_inputs(D=D, **defaults | CASES[case][0] | more)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_within_the_budget(monkeypatch, case):
    emulate(monkeypatch)
    check(inputs_of(case), CASES[case][1])


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(monkeypatch, scale):
    emulate(monkeypatch)
    check(inputs_of("fewer queries than keys"), CAUSAL, scale=scale)


@pytest.mark.parametrize("case", ["odd length", "grouped keys"])
def test_one_key_for_both_maps(monkeypatch, case):
    emulate(monkeypatch)
    inputs = inputs_of(case)
    check(inputs._replace(k2=inputs.k1), CAUSAL)


def test_keys_that_do_not_exist_have_no_weight(monkeypatch):
    """Where all scores are low, the 0 of a row beyond the last key would be higher by more than fp16 can hold."""
    emulate(monkeypatch)
    x = inputs_of("65 rows", dtype=torch.float16)
    along = torch.ones(D, dtype=torch.float16)
    x = x._replace(q1=x.q1 * 0.1 + along, q2=x.q2 * 0.1 + along, k1=x.k1 * 0.1 - along, k2=x.k2 * 0.1 - along)
    check(x, FULL, scale=0.5)


@pytest.mark.parametrize("seed", [100, 200])
def test_gradients_repeat_bit_for_bit_in_any_order_of_events(monkeypatch, seed):
    arguments, _ = problem(inputs_of("grouped keys"), CAUSAL)
    emulate(monkeypatch, seed=0)
    first = gradients(*arguments)
    emulate(monkeypatch, seed=seed)
    for one, other in zip(first, gradients(*arguments), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("what", ["a sum's, without strides", "begins 2 bytes beyond a multiple of 16"])
def test_a_gradient_that_tma_cannot_read_is_copied(monkeypatch, what):
    emulate(monkeypatch)
    arguments, _ = problem(inputs_of("65 rows"), FULL)
    call, dout, saved = arguments
    dout = torch.ones_like(dout)
    unread = dout[:1, :1, :1, :1].expand_as(dout)
    if what.startswith("begins"):
        unread = dout.new_ones(dout.numel() + 1)[1:].view(dout.shape)
        assert unread.data_ptr() % 16 == 2
    monkeypatch.setattr(backward, "descriptor", lambda x, rows: descriptor(require_readable(x), rows))
    for one, other in zip(*(gradients(call, given, saved) for given in (dout, unread)), strict=True):
        assert torch.equal(one, other)


def require_readable(x):
    assert read_by_tma(x)
    return x


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_and_backward_of_the_operator(monkeypatch, compiled):
    """As on a Hopper GPU, through autograd and the compiler."""
    emulate(monkeypatch)
    monkeypatch.setattr(forward, "fwd_sequential", Kernel(fwd_sequential, 0))
    monkeypatch.setattr(operator, "unsupported_reason", support.unsupported_tensors)
    inputs = inputs_of("grouped keys", T=70, dtype=torch.float16, requires_grad=True)
    attend = functools.partial(diff_attention, is_causal=True, backend="triton")
    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = attend(*inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad(out, list(inputs), dout)
    _, expected = problem(inputs._make(x.detach() for x in inputs), CAUSAL)
    for (name, (exact, eager)), result in zip(expected.items(), gradients, strict=True):
        if name == "dlam":
            # A sum over out2 in fp16, which the forward and the reference may round differently.
            torch.testing.assert_close(result, exact.float(), rtol=0, atol=2e-3 * float(exact.abs().max()))
        else:
            assert_within_budget(result, exact, eager, what=name)


def stores_zeros(to, x, first, limit, stride, L):
    rows = first + gl.arange(0, x.shape[0], None)
    columns = gl.arange(0, x.shape[1], None)
    offsets = gl.expand_dims(rows.to(gl.int64) * stride, 1) + gl.expand_dims(columns, 0)
    gl.store(to + offsets, x * 0, mask=gl.expand_dims(rows < limit, 1))


@pytest.mark.parametrize("changed", [None, {"store_rows": stores_zeros}])
def test_the_gate_lets_right_kernels_pass_and_no_others(monkeypatch, small_gate, changed):
    emulate(monkeypatch, changed=changed)
    refused = pytest.raises(AssertionError, match=r"^d") if changed else nullcontext()
    with refused:
        hopper_check.check(torch.device("cpu"), torch.bfloat16, CAUSAL, "backward")
