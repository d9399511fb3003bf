"""Shared by operator tests and benchmarks: inputs, the numerics budget, peak memory.

Shapes: B batch, H signal heads, Hn noise heads, G key/value heads, T queries, S keys, D query width, Dv value width.
"""

import os
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.masking import position_mask
from diff_transformer.ops.reference import attention_map


class Inputs(NamedTuple):
    """The tensors of one call, in the order of ``diff_attention``'s arguments."""

    q1: Tensor  # [B, H, T, D]
    q2: Tensor  # [B, Hn, T, D]
    k1: Tensor  # [B, G, S, D]
    k2: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, Dv]
    lam: Tensor  # fp32 (fp64 for fp64 inputs), of the shape asked for

    def to(self, dtype: torch.dtype) -> "Inputs":
        """New leaf tensors with the same values in ``dtype``; lam in fp32 (fp64 for fp64)."""
        lam_dtype = torch.promote_types(dtype, torch.float32)
        cast = [x.detach().to(dtype, copy=True) for x in self[:5]] + [self.lam.detach().to(lam_dtype, copy=True)]
        return Inputs(*(y.requires_grad_(x.requires_grad) for x, y in zip(self, cast, strict=True)))


def make_inputs(
    B: int = 2,
    H: int = 4,
    T: int = 63,
    D: int = 16,
    *,
    Hn: int | None = None,
    G: int | None = None,
    S: int | None = None,
    Dv: int | None = None,
    lam_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    strided: bool = False,
    requires_grad: bool = True,
    seed: int = 0,
    drawn_on: str | torch.device = "cpu",
) -> Inputs:
    """Normal q, k, v and a lam uniform in (0, 1). Values are the same on every device, unless ``drawn_on`` that device.

    Hn defaults to H, G to Hn, S to T, Dv to 2 D, and lam to one value a row, [B, H, T, 1]. ``strided`` gives tensors
    the memory layout of a layer's projections: [B, length, heads, width], viewed as [B, heads, length, width].
    """
    Hn, S, Dv = Hn or H, S or T, Dv or 2 * D
    G = G or Hn
    generator = torch.Generator(drawn_on).manual_seed(seed)

    def normal(heads: int, length: int, width: int) -> Tensor:
        x = torch.randn(B, heads, length, width, generator=generator, device=drawn_on).to(device, dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x
        return x.requires_grad_(requires_grad)

    q1, q2, k1, k2, v = normal(H, T, D), normal(Hn, T, D), normal(G, S, D), normal(G, S, D), normal(G, S, Dv)
    lam = torch.rand((B, H, T, 1) if lam_shape is None else lam_shape, generator=generator, device=drawn_on)
    lam = lam.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_(requires_grad)
    return Inputs(q1, q2, k1, k2, v, lam)


def eager_diff_attention(q1, q2, k1, k2, v, lam, *, attn_mask=None, is_causal=False, window=None, scale=None) -> Tensor:
    """The formula in plain PyTorch, products in the dtype of the inputs, softmax and subtraction in fp32.

    The budget allows a backend twice its distance from the fp64 reference. lam and attn_mask must broadcast to
    [B, H, T, 1] and [B, H, T, S].
    """
    H, T, S = q1.shape[1], q1.shape[2], k1.shape[2]
    scale = q1.shape[-1] ** -0.5 if scale is None else scale
    q2, k1, k2, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (q2, k1, k2, v))
    seen = position_mask(T, S, is_causal, window, q1.device)
    first, second = (attention_map(q, k, seen, attn_mask, scale) for q, k in ((q1, k1), (q2, k2)))
    return (first - lam * second).to(v.dtype) @ v


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor | None = None, *, what: str = "out") -> None:
    """Raise AssertionError, with the numbers, unless ``actual`` is within the numerics budget of ``exact``.

    Without ``eager``: error <= 1e-5 * max(1, largest value), the budget of fp32 against the reference. With it (the
    same quantity from ``eager_diff_attention`` in the dtype of actual): error <= 2 * eager error + one rounding of the
    largest value, or the fp32 budget if that is more: bf16 need not be more accurate than fp32. Errors and values are
    the largest absolute ones. NaN or infinity in ``actual`` never passes.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{what} has shape {list(actual.shape)}; expected {list(exact.shape)}")
    if not bool(actual.isfinite().all()):
        raise AssertionError(f"{what} has {int((~actual.isfinite()).sum())} values that are NaN or infinite")
    actual, exact = actual.detach(), exact.detach().double()
    largest = float(exact.abs().max())
    error = float((actual.double() - exact).abs().max())
    allowed, why = 1e-5 * max(1.0, largest), f"1e-5 * max(1, largest value {largest:.3e})"
    if eager is not None:
        eager_error = float((eager.detach().double() - exact).abs().max())
        rounding = torch.finfo(actual.dtype).eps / 2 * largest
        if 2 * eager_error + rounding > allowed:
            allowed, why = 2 * eager_error + rounding, f"2 * eager error {eager_error:.3e} + rounding {rounding:.3e}"
    if not error <= allowed:
        raise AssertionError(f"{what} ({actual.dtype}) is off by {error:.3e}; allowed is {allowed:.3e} = {why}")


def peak_memory(function: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """Peak bytes held by tensors during ``function``, minus the bytes held before the call.

    On CUDA the allocator's peak, on the CPU the running sum of the profiler's allocation events.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints two lines at every start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max([0, *accumulate(event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()))])
