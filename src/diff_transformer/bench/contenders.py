"""Contenders of the operator's benchmark, and the correctness gate that they must pass.

Contenders are the operator's backends, softmax attention with twice the heads, and FlashDiffAttn over SDPA, which has
several kernels and picks one by device. The default is named by the kernel that ran, and every other kernel takes part
under its own name: softmax[cudnn], FlashDiffAttn_2[flash].
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diff_transformer.bench.record import free_memory
from diff_transformer.bench.shapes import SHORTER, Shape
from diff_transformer.ops import diff_attention
from diff_transformer.ops.call import check
from diff_transformer.ops.hopper.support import SWITCH, unsupported_reason
from diff_transformer.testing import Inputs, assert_within_budget, eager_diff_attention, make_inputs

BASELINE = "softmax"
RIVAL = "FlashDiffAttn"
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FAULT = torch.AcceleratorError  # raised when a kernel faults; the process cannot use the device any more
# Multiply-adds in units of h N^2 d. Every form of differential attention is credited with those of the fused kernel.
SOFTMAX_UNITS = {"forward": 4, "backward": 10, "both": 14}
DIFF_UNITS = {"forward": 6, "backward": 10, "both": 16}


@dataclass(frozen=True)
class Contender:
    """``function(*inputs, is_causal=is_causal)`` is timed. ``role``: "baseline", "backend" or "rival"."""

    name: str
    role: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # q, k, v of the baseline; q1, q2, k1, k2, v, lam of all others
    is_causal: bool = True
    facts: dict = field(default_factory=dict)  # further fields of its rows

    @property
    def units(self) -> dict[str, int]:
        return SOFTMAX_UNITS if self.role == "baseline" else DIFF_UNITS

    @property
    def values(self) -> Tensor:
        return self.inputs[2 if self.role == "baseline" else 4]


def softmax_inputs(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the matched softmax attention, each [batch, 2 heads, length, width]."""
    size = (shape.batch, 2 * shape.heads, shape.length, shape.width)
    generator = torch.Generator(device).manual_seed(1)
    q, k, v = (torch.randn(size, generator=generator, device=device).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def sdpa_on(kernel: str | None) -> Callable[..., Tensor]:
    """scaled_dot_product_attention on one of ``KERNELS``; None leaves the choice to PyTorch."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        with nullcontext() if kernel is None else sdpa_kernel(KERNELS[kernel]):
            return scaled_dot_product_attention(q, k, v, **options)

    return attention


def flash_diff_attention(form: int, kernel: str | None) -> Callable[..., Tensor]:
    """FlashDiffAttn (appendix A) over SDPA: form 1 passes v whole, form 2 in two halves. Subtracts in fp32."""
    attention = sdpa_on(kernel)

    def function(q1, q2, k1, k2, v, lam, *, is_causal: bool = False) -> Tensor:
        parts = v.chunk(form, dim=-1)  # [B, h, N, 2d] or twice [B, h, N, d]
        first, second = (
            torch.cat([attention(q, k, part, is_causal=is_causal) for part in parts], dim=-1)
            for q, k in ((q1, k1), (q2, k2))
        )
        return (first.float() - lam * second.float()).to(v.dtype)

    return function


def default_kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool = False) -> str:
    """Name of the kernel that SDPA chooses for these tensors."""
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
    return next((name for name, kernel in KERNELS.items() if kernel.value == int(chosen)), str(chosen))


def baselines(shape: Shape, inputs: tuple[Tensor, Tensor, Tensor], kernels: list[str]) -> list[Contender]:
    """Softmax attention on SDPA's choice, and on each of the other ``kernels``."""
    chosen = default_kernel(*inputs, is_causal=shape.causal)
    kernels = [k for k in kernels if k != chosen and (k != "math" or math_fits(shape, inputs[0].device))]
    return [
        Contender(named(BASELINE, k), "baseline", sdpa_on(k), inputs, shape.causal, facts={"sdpa": k or chosen})
        for k in (None, *kernels)
    ]


def rivals(x: Inputs, is_causal: bool, kernels: list[str]) -> list[Contender]:
    """FlashDiffAttn_1 and _2 on SDPA's choice and on each of the other ``kernels``."""
    contenders = []
    for form in (1, 2):
        chosen = default_kernel(x.q1, x.k1, x.v.chunk(form, dim=-1)[0], is_causal)
        for k in (None, *(k for k in kernels if k not in (chosen, "math"))):
            name, function = named(f"{RIVAL}_{form}", k), flash_diff_attention(form, k)
            contenders.append(Contender(name, "rival", function, tuple(x), is_causal, facts={"sdpa": k or chosen}))
    return contenders


def backend_contenders(names: list[str], x: Inputs, is_causal: bool) -> list[Contender]:
    """All of ``names``. Where the Hopper kernels run, "triton" also takes part without them."""
    contenders = []
    for name in names:
        contenders.append(backend_contender(name, x, is_causal))
        if contenders[-1].facts.get("kernels") == "hopper":
            contenders.append(backend_contender(name, x, is_causal, "plain"))
    return contenders


def backend_contender(name: str, x: Inputs, is_causal: bool, variant: str | None = None) -> Contender:
    """One of the operator's backends, or a variant of "triton": "plain", without the Hopper kernels."""

    def function(q1, q2, k1, k2, v, lam, *, is_causal: bool) -> Tensor:
        with VARIANTS[variant]():
            return diff_attention(q1, q2, k1, k2, v, lam, is_causal=is_causal, backend=name)

    facts = {}
    if name == "triton" and variant is None:
        reason = unsupported_reason(check(*x, is_causal=is_causal))
        facts = {"kernels": "hopper" if reason is None else f"triton, since {reason}"}
    return Contender(named(name, variant), "backend", function, tuple(x), is_causal, facts)


@contextmanager
def _without_hopper() -> Generator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


VARIANTS = {None: nullcontext, "plain": _without_hopper}


def named(name: str, kernel: str | None) -> str:
    return name if kernel is None else f"{name}[{kernel}]"


def math_fits(shape: Shape, device: torch.device) -> bool:
    """True if the N x N maps of SDPA's math path fit a quarter of the free memory (on the CPU: 1 GiB)."""
    free = free_memory(device) // 4 if device.type == "cuda" else 2**30
    return 16 * shape.batch * 2 * shape.heads * shape.length**2 <= free


def refusal(run: Callable[[], object]) -> str | None:
    """Run once. Return one line on why the kernel refuses these tensors or runs out of memory; None if it ran.

    Raises:
        torch.AcceleratorError: if the device was lost.
        RuntimeError: if Triton could not launch one of our kernels.
    """
    try:
        run()
        wait_for_device()
    except FAULT:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        wait_for_device()
        if str(error).startswith("Triton Error"):
            raise
        return " ".join(str(error).split())[:300]
    return None


def wait_for_device() -> None:
    """Wait for the GPU, so that a kernel's fault is raised here and not at a later call."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


ROWS = 32  # queries compared at the full length

Function = Callable[..., Tensor]  # (*Inputs, is_causal=...)


class Gate:
    """The correctness gate at one shape. It computes the exact results once, for all contenders.

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
