"""The gate of the Hopper kernels: on each machine they are used only for what has come out right there.

Gluon is experimental, and these kernels synchronise by hand. So the first use in a process of a width, dtype and
masking runs small problems through the kernel and compares with the fp64 reference, within the numerics budget. A
kernel that is wrong, spills registers or does not compile is reported once and not used; plain Triton takes its place.
"""

import logging
import math
import time

import torch
from torch import Tensor

from diff_transformer.ops.masking import apply_masks, position_mask

log = logging.getLogger("diff_transformer")

SECONDS = 60.0  # in which a launched kernel must end; it takes well under one
# Odd lengths; rows that see nothing (T > S); rows for one half only, and more tiles of keys than a ring holds.
PROBLEMS = ({"T": 300, "S": 333}, {"T": 150, "S": 63}, {"T": 40, "S": 1000})

_verdicts: dict[tuple, bool] = {}


class KernelHangs(RuntimeError):
    """A kernel does not end; the device is lost to this process."""


def verified(device: torch.device, D: int, dtype: torch.dtype, is_causal: bool) -> bool:
    """Whether the kernel for this width, dtype and masking is right on the device; the first call tries it, in seconds.

    While a CUDA graph is captured nothing can be tried, and what has not been tried counts as not verified.

    Raises:
        KernelHangs: the kernel did not end. torch.AcceleratorError: it faulted.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (torch.device(device.type, index), D, dtype, is_causal)
    if key not in _verdicts and not torch.cuda.is_current_stream_capturing():
        fault = fault_of(*key)
        what = f"the Hopper attention kernel (D {D}, {dtype}, {'causal' if is_causal else 'full'}) on {key[0]}"
        if fault is None:
            log.info("%s agrees with the reference and is used", what)
        else:
            log.warning("%s is not used, plain Triton is: %s", what, fault)
        _verdicts[key] = fault is None
    return _verdicts.get(key, False)


def fault_of(device: torch.device, D: int, dtype: torch.dtype, is_causal: bool) -> str | None:
    """What is wrong with the kernel, in words, or None."""
    try:
        with torch.no_grad():
            for lengths in PROBLEMS:
                compare(device, D, dtype, is_causal, **lengths)
    except (KernelHangs, getattr(torch, "AcceleratorError", KernelHangs)):  # the device is lost, not only the kernel
        raise
    except Exception as error:  # a compiler's errors have no common base
        return f"{type(error).__name__}: {error}"
    return None


def compare(device: torch.device, D: int, dtype: torch.dtype, is_causal: bool, T: int, S: int) -> None:
    """Raise unless the kernel is right for one problem in each of its forms: with gradients or not, k2 = k1 or not."""
    from diff_transformer.ops.triton.gluon.forward import launch
    from diff_transformer.testing import assert_within_budget, make_inputs

    inputs = make_inputs(2, 2, T, D, S=S, G=1, dtype=dtype, device=device, strided=True, requires_grad=False)
    for given in (inputs, inputs._replace(k2=inputs.k1)):
        k2 = None if given.k2 is given.k1 else given.k2
        expected = expected_results(*given, is_causal=is_causal, scale=D**-0.5)
        for need_gradient in (True, False):
            arguments = (*given[:3], k2, given.v, given.lam, is_causal, D**-0.5, need_gradient)
            results, compiled = launch(*arguments)
            wait(device)
            if getattr(compiled, "n_spills", 0):
                raise AssertionError(f"it spills {compiled.n_spills} registers a thread")
            for (name, (exact, eager)), result in zip(expected.items(), results, strict=True):
                if name != "out" and not need_gradient:
                    continue
                if not torch.equal(result.isinf(), exact.isinf()):
                    raise AssertionError(f"{name} is not infinite where the reference is (T {T}, S {S})")
                result, exact = (x.masked_fill(x.isinf(), 0) for x in (result, exact))
                assert_within_budget(result, exact, eager, what=f"{name} (T {T}, S {S})")


def expected_results(
    q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, lam: Tensor, *, is_causal: bool, scale: float
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """What ``attend_forward`` should return: the exact value (fp64) and, for out and out2, the eager formula's."""
    from diff_transformer.testing import eager_diff_attention

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
    eager2 = eager_diff_attention(q2, q2, k2, k2, v, torch.zeros_like(lam), is_causal=is_causal, scale=scale)
    difference = outs[0] - lam.double() * outs[1]
    return {"out": (difference, eager), "out2": (outs[1], eager2), "lse1": (lses[0], None), "lse2": (lses[1], None)}


def wait(device: torch.device) -> None:
    """Wait for the work on the current stream of the device, but not for ever."""
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + SECONDS
    while not done.query():
        if time.monotonic() > deadline:
            raise KernelHangs(
                f"the Hopper attention kernel has not ended after {SECONDS:.0f} s on {device}; end this process and "
                "set DIFF_TRANSFORMER_GLUON=0 to compute with plain Triton"
            )
        time.sleep(0.001)
