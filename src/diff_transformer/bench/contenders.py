"""Contenders of the operator's benchmark.

They are the operator's backends, softmax attention with twice the heads, and FlashDiffAttn over SDPA, which has several
kernels and picks one by device. The default is named by the kernel that ran, and every other kernel takes part under
its own name: softmax[cudnn], FlashDiffAttn_2[flash].
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diff_transformer.bench.shapes import Shape
from diff_transformer.ops import diff_attention
from diff_transformer.ops.call import check
from diff_transformer.ops.hopper.support import unsupported_reason
from diff_transformer.testing import Inputs

BASELINE = "softmax"
RIVAL = "FlashDiffAttn"
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
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

    def calls(self, retain: bool = False) -> dict[str, Callable[[], object]]:
        """The functions to time, by kind. ``retain`` adds the backward pass alone, repeated over one retained graph."""

        def attend() -> Tensor:
            return self.function(*self.inputs, is_causal=self.is_causal)

        def forward() -> None:
            with torch.no_grad():
                attend()

        q, v = self.inputs[0], self.inputs[2 if self.role == "baseline" else 4]
        gradient = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(v.dtype)

        def both() -> None:
            torch.autograd.grad(attend(), self.inputs, gradient)

        if not retain:
            return {"forward": forward, "both": both}
        out = attend()

        def backward() -> None:
            torch.autograd.grad(out, self.inputs, gradient, retain_graph=True)

        return {"forward": forward, "backward": backward, "both": both}


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
    kernels = [k for k in kernels if k != chosen]
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


def backend_contender(name: str, x: Inputs, is_causal: bool) -> Contender:
    """One of the operator's backends. The fact ``kernels`` of "triton" says whether they are those for Hopper."""

    def function(q1, q2, k1, k2, v, lam, *, is_causal: bool) -> Tensor:
        return diff_attention(q1, q2, k1, k2, v, lam, is_causal=is_causal, backend=name)

    facts = {}
    if name == "triton":
        reason = unsupported_reason(check(*x, is_causal=is_causal))
        facts = {"kernels": "hopper" if reason is None else f"triton, since {reason}"}
    return Contender(name, "backend", function, tuple(x), is_causal, facts)


def named(name: str, kernel: str | None) -> str:
    return name if kernel is None else f"{name}[{kernel}]"
