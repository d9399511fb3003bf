"""The forward kernel for Hopper, run on the CPU by an emulator (tests/helpers/gluon_emulator.py)."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from diff_transformer.ops.call import check as make_call
from diff_transformer.ops.reference import attend
from diff_transformer.testing import assert_within_budget, make_inputs

pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")
import hopper_check
from gluon_emulator import Kernel
from triton.experimental.gluon import language as gl

from diff_transformer.ops.call import Call
from diff_transformer.ops.hopper import forward
from diff_transformer.ops.hopper.fwd_sequential import fwd_sequential
from diff_transformer.ops.triton.launching import launched

D = 128


def emulate(monkeypatch, seed=0, changed=None, **options):
    """Make the launcher run the emulator."""
    monkeypatch.setattr(forward, "fwd_sequential", Kernel(fwd_sequential, seed, changed, **options))


def check(inputs, is_causal, need_gradient=True, scale=None):
    """Run the emulated kernel through its launcher and compare everything that it returns."""
    scale = inputs.q1.shape[-1] ** -0.5 if scale is None else scale
    B, H, T = inputs.q1.shape[:3]
    inputs = inputs._replace(lam=inputs.lam.expand(B, H, T, 1))
    k2 = None if inputs.k2 is inputs.k1 else inputs.k2
    call = Call(*inputs._replace(k2=k2), scale=scale, is_causal=is_causal)
    out, *saved = launched(*forward.plan_forward(call, need_gradient))
    assert out.is_contiguous()
    results = out.transpose(1, 2), *saved
    expected = hopper_check.expected_results(*inputs, is_causal=is_causal, scale=scale)
    reference = attend(make_call(*(x.double() for x in inputs), is_causal=is_causal, scale=scale))
    torch.testing.assert_close(expected["out"][0], reference, rtol=0, atol=1e-12)
    for (name, (exact, eager)), result in zip(expected.items(), results, strict=True):
        if name != "out" and not need_gradient:
            assert result.numel() == 0
            continue
        assert torch.equal(result.isinf(), exact.isinf()), name
        result, exact = (x.masked_fill(x.isinf(), 0) for x in (result, exact))
        assert_within_budget(result, exact, eager, what=name)


CAUSAL, FULL = True, False
# name: (arguments of make_inputs, causal)
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "one program, exact tiles": ({"T": 128}, CAUSAL),
    "odd length": ({"T": 333}, CAUSAL),
    "one query, one key": ({"T": 1}, CAUSAL),
    "one query": ({"T": 1, "S": 333}, CAUSAL),
    "one key": ({"T": 130, "S": 1}, FULL),
    "65 rows": ({"T": 65, "S": 65}, FULL),
    "fewer queries than keys": ({"T": 63, "S": 250}, CAUSAL),
    "the first query sees two tiles but for a key": ({"T": 63, "S": 189}, CAUSAL),
    "the first query sees two tiles": ({"T": 63, "S": 190}, CAUSAL),
    "queries that see nothing": ({"T": 200, "S": 63}, CAUSAL),
    "whole programs that see nothing": ({"T": 300, "S": 20}, CAUSAL),
    "full, odd": ({"T": 111, "S": 333}, FULL),
    "full, whole tiles": ({"T": 128, "S": 256}, FULL),
    "full, more tiles than slots": ({"T": 20, "S": 1000}, FULL),
    "rows for one half only": ({"T": 40, "S": 700}, CAUSAL),
    "full, rows for one half only": ({"T": 40, "S": 200}, FULL),
    "heads and batches": ({"B": 2, "H": 3, "T": 150}, CAUSAL),
    "grouped keys": ({"B": 2, "H": 4, "G": 2, "T": 70}, CAUSAL),
    "shared noise, grouped keys": ({"B": 2, "H": 4, "Hn": 2, "G": 1, "T": 70}, CAUSAL),
    "as a layer lays them out": ({"B": 2, "H": 2, "T": 111, "strided": True}, CAUSAL),
    "one lam": ({"H": 2, "T": 70, "lam_shape": (1, 1, 1, 1)}, CAUSAL),
    "lam a head": ({"B": 2, "H": 2, "T": 70, "lam_shape": (1, 2, 1, 1)}, CAUSAL),
    "float16": ({"T": 150, "dtype": torch.float16}, CAUSAL),
}


def inputs_of(case):
    arguments: dict[str, Any] = {"B": 1, "H": 1, "dtype": torch.bfloat16, "requires_grad": False, **CASES[case][0]}
    return make_inputs(D=D, **arguments)


def causal_results(inputs):
    return launched(*forward.plan_forward(Call(*inputs, scale=0.1, is_causal=True), need_gradient=True))


@pytest.mark.parametrize("case", CASES)
def test_results_are_within_the_budget(monkeypatch, case):
    emulate(monkeypatch)
    check(inputs_of(case), CASES[case][1])


def test_without_gradients_only_the_output_is_written(monkeypatch):
    emulate(monkeypatch)
    check(inputs_of("heads and batches"), CAUSAL, need_gradient=False)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(monkeypatch, scale):
    emulate(monkeypatch)
    check(inputs_of("fewer queries than keys"), CAUSAL, scale=scale)


def test_one_key_for_both_maps(monkeypatch):
    emulate(monkeypatch)
    inputs = inputs_of("odd length")
    check(inputs._replace(k2=inputs.k1), CAUSAL)


@pytest.mark.parametrize("seed", range(100, 500, 100))
def test_the_order_of_events_does_not_matter(monkeypatch, seed):
    inputs = inputs_of("odd length")
    emulate(monkeypatch, seed=0)
    first = causal_results(inputs)
    emulate(monkeypatch, seed=seed)
    for one, other in zip(first, causal_results(inputs), strict=True):
        assert torch.equal(one, other)


def forgets_to_divide(acc, m, l, lse, rows, T, OL, SAVE):
    if SAVE:
        gl.store(lse + rows, m + gl.log2(l), mask=rows < T)
    return acc


@pytest.mark.parametrize("changed", [None, {"finalize": forgets_to_divide}])
def test_the_gate_lets_right_kernels_pass_and_no_others(monkeypatch, small_gate, changed):
    emulate(monkeypatch, changed=changed)
    refused = pytest.raises(AssertionError, match=r"^out \(T 70, S 63\)") if changed else nullcontext()
    with refused:
        hopper_check.check(torch.device("cpu"), torch.bfloat16, CAUSAL, "forward")
