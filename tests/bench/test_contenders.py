"""Who takes part, under which name, and that the rivals compute differential attention."""

import os

import pytest
import torch

from diff_transformer.bench import contenders, gate
from diff_transformer.bench.shapes import Shape
from diff_transformer.ops import diff_attention
from diff_transformer.ops.hopper.support import SWITCH
from diff_transformer.testing import assert_within_budget, make_inputs


@pytest.mark.parametrize("form", [1, 2])
def test_flash_diff_attention_is_the_operator(form):
    x = make_inputs(T=33)
    out = contenders.flash_diff_attention(form, None)(*x, is_causal=True)
    exact = diff_attention(*x.to(torch.float64), is_causal=True, backend="reference")
    assert_within_budget(out, exact)


def test_a_default_is_named_by_what_runs_and_not_timed_twice():
    shape = Shape(1, 2, 16, 8)
    inputs = contenders.softmax_inputs(shape, torch.float32, "cpu")
    found = contenders.baselines(shape, inputs, ["flash", "math"])
    assert [(c.name, c.facts["sdpa"]) for c in found] == [("softmax", "flash"), ("softmax[math]", "math")]


def test_the_reason_of_a_kernel_is_one_line():
    def refuses():
        raise RuntimeError("No available kernel.\n Aborting.")

    assert gate.refusal(refuses) == "No available kernel. Aborting."
    assert gate.refusal(lambda: None) is None


@pytest.mark.parametrize("error", [gate.FAULT("illegal address"), RuntimeError("Triton Error: oh no")])
def test_a_fault_of_the_device_is_no_refusal(error):
    def faults():
        raise error

    with pytest.raises(type(error), match=str(error)):
        gate.refusal(faults)


def test_a_fault_that_comes_later_is_blamed_on_the_run(monkeypatch):
    """A late fault of the device raises, even after a kernel that only refused."""

    def late():
        raise gate.FAULT("illegal address")

    def refuses():
        raise RuntimeError("No available kernel.")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", late)
    for run in (lambda: None, refuses):
        with pytest.raises(gate.FAULT, match="illegal address"):
            gate.refusal(run)


@pytest.mark.parametrize("reason", [None, "too old"])
def test_variants_of_triton(monkeypatch, reason):
    """On a GPU: the default and, where the Hopper kernels ran, the plain ones."""
    seen = []

    def fake(*tensors, is_causal, backend):
        seen.append(os.environ.get(SWITCH))
        return tensors[4]

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(contenders, "diff_attention", fake)
    monkeypatch.setattr(contenders, "unsupported_reason", lambda call: reason)
    x = make_inputs(T=5)
    found = contenders.backend_contenders(["sdpa", "triton"], x, True)
    for contender in found:
        contender.function(*contender.inputs, is_causal=True)
    names = ["sdpa", "triton", "triton[plain]"]
    assert [c.name for c in found] == (names if reason is None else names[:2])
    assert found[1].facts == {"kernels": "hopper" if reason is None else "triton, since too old"}
    assert seen == [None, None, "0"][: len(found)]
    assert SWITCH not in os.environ
