"""Who takes part, under which name, and that the rivals compute differential attention."""

import pytest
import torch

from diff_transformer.bench import contenders, gate
from diff_transformer.bench.shapes import Shape
from diff_transformer.ops import diff_attention
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


def test_a_kernel_that_refuses_is_skipped_in_one_line_and_a_fault_of_the_device_raised(monkeypatch):
    """A fault may come late, and even after a kernel that ran."""

    def refuses():
        raise RuntimeError("No available kernel.\n Aborting.")

    def late():
        raise gate.FAULT("illegal address")

    assert gate.verdict(refuses, None) == "skipped: RuntimeError: No available kernel. Aborting."
    assert gate.verdict(lambda: None, refuses) == "failed: RuntimeError: No available kernel. Aborting."
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", late)
    with pytest.raises(gate.FAULT, match="illegal address"):
        gate.verdict(lambda: None, None)
