"""The correctness gate: no time without a result that is within the numerics budget, checked in the same run."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from diff_transformer.bench.shapes import SHORTER, Shape
from diff_transformer.ops import diff_attention
from diff_transformer.testing import Inputs, assert_within_budget, eager_diff_attention, make_inputs

FAULT = torch.AcceleratorError  # raised when a kernel faults; the process cannot use the device any more
ROWS = 32  # queries compared at the full length
Function = Callable[..., Tensor]  # (*Inputs, is_causal=...)


def verdict(run: Callable[[], object], check: Callable[[], object] | None) -> str:
    """Run once, then check: "passed", "skipped: why it does not run" or "failed: what is wrong".

    Without a check it is "is the baseline". A fault of the device, after which nothing runs, is raised.
    """
    word = "skipped"
    try:
        run()
        wait_for_device()
        if check is None:
            return "is the baseline"
        word = "failed"
        check()
    except FAULT:
        raise
    except Exception as error:
        return f"{word}: {type(error).__name__}: {' '.join(str(error).split())}"[:1000]
    return "passed"


def is_timed(verdict: str, role: str) -> bool:
    """True if a contender is timed: only if it passed, except that a rival may miss the budget."""
    return verdict in ("passed", "is the baseline") or (role == "rival" and verdict.startswith("failed"))


def wait_for_device() -> None:
    """Wait for the GPU, so that a kernel's fault is raised here and not at a later call."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Gate:
    """The gate of the operator at one shape. It computes the exact results once, for all contenders.

    It compares the output and every gradient at length min(length, 555), and the output of 32 queries at full length.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str):
        self.shape, self.dtype, self.device = shape, dtype, device

    def check(self, function: Function) -> None:
        """Raise AssertionError, with the numbers, unless ``function`` is within the numerics budget."""
        actual = self._with_gradients(function, self.short)
        for name in actual:
            assert_within_budget(actual[name], *self._expected[name], what=name)
        with torch.no_grad():
            actual = function(*self.full, is_causal=self.shape.causal)[:, :, self._rows]
        assert_within_budget(actual, *self._expected_rows, what=f"out at length {self.shape.length}")

    @cached_property
    def full(self) -> Inputs:
        """The inputs for timing."""
        return shape_inputs(self.shape, self.dtype, self.device)

    @cached_property
    def short(self) -> Inputs:
        return shape_inputs(self.shape, self.dtype, self.device, min(self.shape.length, SHORTER))

    @cached_property
    def _rows(self) -> Tensor:
        return torch.linspace(0, self.shape.length - 1, ROWS, device=self.device).long().unique()

    @cached_property
    def _expected(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        with torch.enable_grad():
            exact = self._with_gradients(_reference, self.short.to(torch.float64))
            eager = self._with_gradients(eager_diff_attention, self.short)
        return {name: (exact[name], None if self.dtype == torch.float32 else eager[name]) for name in exact}

    @cached_property
    def _expected_rows(self) -> tuple[Tensor, Tensor | None]:
        x, rows = self.full, self._rows
        some = x._replace(q1=x.q1[:, :, rows], q2=x.q2[:, :, rows], lam=x.lam[:, :, rows])
        seen = None
        if self.shape.causal:
            seen = torch.arange(self.shape.length, device=self.device) <= rows[:, None]  # [rows, length]
        with torch.no_grad():
            exact = diff_attention(*some.to(torch.float64), attn_mask=seen, backend="reference")
            eager = None if self.dtype == torch.float32 else eager_diff_attention(*some, attn_mask=seen)
        return exact, eager

    def _with_gradients(self, function: Function, x: Inputs) -> dict[str, Tensor]:
        out = function(*x, is_causal=self.shape.causal)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.device, x.v.dtype)
        names = (f"gradient of {name}" for name in x._fields)
        return {"out": out} | dict(zip(names, torch.autograd.grad(out, x, dout.to(out.dtype)), strict=True))


def shape_inputs(shape: Shape, dtype: torch.dtype, device: str, length: int | None = None) -> Inputs:
    """Random inputs of a shape: leaves that require gradients."""
    sizes = (shape.batch, shape.heads, length or shape.length, shape.width)
    return make_inputs(*sizes, dtype=dtype, device=device, drawn_on=device)


def _reference(*x: Tensor, is_causal: bool) -> Tensor:
    return diff_attention(*x, is_causal=is_causal, backend="reference")
