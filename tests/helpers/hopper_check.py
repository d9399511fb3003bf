"""Compare the Hopper kernels with the fp64 reference on small problems, within the numerics budget.

Tests marked ``gpu`` do this, and benchmarks/gpu.py before it times the kernels.
"""

import math
import time
from typing import Any

import torch
from kernel_compiler import launched_faults
from torch import Tensor

from diff_transformer.ops.call import Call
from diff_transformer.ops.hopper import support
from diff_transformer.ops.masking import apply_masks, position_mask
from diff_transformer.testing import Inputs, assert_within_budget, eager_diff_attention, make_inputs

D = support.D
EMULATED = False  # True in tests that emulate the launches on the CPU
SECONDS = 20.0  # limit of a launched kernel, which takes well under one
# Odd lengths; fully masked rows (T > S); rows for one consumer only, and more key tiles than a ring has slots.
PROBLEMS = ({"T": 300, "S": 333}, {"T": 150, "S": 63}, {"T": 40, "S": 1000})


def check(device: torch.device, dtype: torch.dtype, is_causal: bool, kernels: str) -> None:
    """Raise unless ``kernels``, "forward" or "backward", pass on PROBLEMS. After a fault the device may be lost.

    On the CPU, for a rehearsal, launches are planned and not started, unless ``EMULATED``.
    """
    for lengths in PROBLEMS:
        (compare if kernels == "forward" else compare_gradients)(device, dtype, is_causal, **lengths)


@torch.no_grad()
def compare(device: torch.device, dtype: torch.dtype, is_causal: bool, T: int, S: int) -> None:
    """Raise unless the kernel is right for one problem in each of its forms, with and without a gradient's results."""
    from diff_transformer.ops.hopper.forward import plan_forward

    inputs = make_inputs(2, 2, T, D, S=S, G=1, dtype=dtype, device=device, strided=True, requires_grad=False)
    for given in forms_of(inputs):
        k2 = None if given.k2 is given.k1 else given.k2
        call = Call(*given[:3], k2, *given[4:], scale=D**-0.5, is_causal=is_causal)
        expected = expected_results(*given, is_causal=is_causal, scale=D**-0.5)
        for need_gradient in (True, False):
            results, launches = plan_forward(call, need_gradient)
            if device.type == "cpu" and not EMULATED:
                continue
            compiled = [launch.start() for launch in launches]
            wait(device)
            refuse_faults(compiled)
            results = results[0].transpose(1, 2), *results[1:]
            for (name, (exact, eager)), result in zip(expected.items(), results, strict=True):
                if name != "out" and not need_gradient:
                    continue
                if not torch.equal(result.isinf(), exact.isinf()):
                    raise AssertionError(f"{name} is not infinite where the reference is (T {T}, S {S})")
                result, exact = (x.masked_fill(x.isinf(), 0) for x in (result, exact))
                assert_within_budget(result, exact, eager, what=f"{name} (T {T}, S {S})")


def compare_gradients(device: torch.device, dtype: torch.dtype, is_causal: bool, T: int, S: int) -> None:
    """Raise unless the gradient kernels are right for one problem in each of their forms."""
    from diff_transformer.ops.hopper.backward import plan_backward, summed

    scale = D**-0.5
    inputs = make_inputs(2, 2, T, D, S=S, G=1, dtype=dtype, device=device, strided=True, requires_grad=False)
    dout = torch.randn(2, 2, T, 2 * D, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    for given in forms_of(inputs):
        k2 = None if given.k2 is given.k1 else given.k2
        call = Call(*given[:3], k2, *given[4:], scale=scale, is_causal=is_causal)
        with torch.no_grad():
            saved = [exact for exact, _ in expected_results(*given, is_causal=is_causal, scale=scale).values()][1:]
            saved = [x.to(dtype) for x in saved[:2]] + [x.float() for x in saved[2:]]
            results, launches = plan_backward(call, dout, saved)
            if device.type == "cpu" and not EMULATED:
                continue
            compiled = [launch.start() for launch in launches][1:]  # the first adds up rows, by plain Triton
            results = summed(call, results)
        wait(device)
        refuse_faults(compiled)
        expected = expected_gradients(dout, saved[1], *given, is_causal=is_causal, scale=scale)
        for (name, (exact, eager)), result in zip(expected.items(), results, strict=True):
            if name == "dk2" and k2 is None:
                continue
            assert_within_budget(result, exact, eager, what=f"{name} (T {T}, S {S})")


def forms_of(inputs: Inputs) -> tuple[Inputs, ...]:
    """The inputs as given, with k2 = k1, and with one noise head for all signal heads."""
    return inputs, inputs._replace(k2=inputs.k1), inputs._replace(q2=inputs.q2[:, :1])


def refuse_faults(compiled: list[Any]) -> None:
    """Raise if a kernel that was launched spills registers, or arrives at a barrier before its warps have met."""
    for kernel in compiled:
        if found := launched_faults(kernel):
            raise AssertionError(f"it {' and '.join(found)}")


def expected_gradients(
    dout: Tensor, out2: Tensor, q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, lam: Tensor,
    *, is_causal: bool, scale: float,
) -> dict[str, tuple[Tensor, Tensor | None]]:  # fmt: skip
    """Expected gradients, ``summed``: the exact value (fp64) and, except for dlam, the eager formula's.

    dlam is a sum over the saved ``out2``, so the rounding of out2 is part of the input.
    """
    from diff_transformer.ops.call import check
    from diff_transformer.ops.reference import attend

    def exact(*given: Tensor) -> Tensor:
        return attend(check(*given, is_causal=is_causal, scale=scale))

    def eager(*given: Tensor) -> Tensor:
        return eager_diff_attention(*given, is_causal=is_causal, scale=scale)

    gradients = []
    for function, dtype in ((exact, torch.float64), (eager, q1.dtype)):
        tensors = [x.detach().to(dtype) for x in (q1, q2, k1)]
        tensors += [tensors[2] if k2 is k1 else k2.detach().to(dtype), v.detach().to(dtype)]
        tensors.append(lam.detach().to(torch.float64 if dtype == torch.float64 else lam.dtype))
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in tensors]
            gradients.append(torch.autograd.grad(function(*leaves), leaves, dout.to(dtype)))
    names = ("dq1", "dq2", "dk1", "dk2", "dv")
    expected = dict(zip(names, list(zip(*gradients, strict=True))[:5], strict=True))
    return expected | {"dlam": (-(dout.double() * out2.double()).sum(-1, keepdim=True), None)}


def expected_results(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, lam: Tensor, *, is_causal: bool, scale: float
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Expected results of the forward: the exact value (fp64) and, for outputs, the eager formula's."""
    H, T, S = q1.shape[1], q1.shape[2], k1.shape[2]
    q2, k1, k2, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (q2, k1, k2, v))
    seen = position_mask(T, S, is_causal, None, q1.device)
    outs, lses = [], []
    for q, k in ((q1, k1), (q2, k2)):
        scores = apply_masks(q.double() @ k.double().mT * scale, seen, None)
        lse = scores.logsumexp(-1)
        outs.append((scores - lse.unsqueeze(-1)).exp().nan_to_num(0) @ v.double())
        lses.append((lse * math.log2(math.e)).masked_fill(lse == -math.inf, math.inf))
    eager = eager_diff_attention(q1, q2, k1, k2, v, lam, is_causal=is_causal, scale=scale)
    eager1, eager2 = (
        eager_diff_attention(q, q, k, k, v, torch.zeros_like(lam), is_causal=is_causal, scale=scale)
        for q, k in ((q1, k1), (q2, k2))
    )
    expected = {"out": (outs[0] - lam.double() * outs[1], eager), "out1": (outs[0], eager1), "out2": (outs[1], eager2)}
    return expected | {"lse1": (lses[0], None), "lse2": (lses[1], None)}


def wait(device: torch.device) -> None:
    """Wait for the work on the current stream of the device.

    Raises:
        TimeoutError: it has not ended after SECONDS.
    """
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the Hopper attention kernel has not ended after {SECONDS:.0f} s on {device}")
        time.sleep(0.001)
