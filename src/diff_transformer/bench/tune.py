"""Times what ``backend="auto"`` may be on a GPU, and keeps the verdicts, which it then takes.

Every candidate is compared with the fp64 reference before it is timed, and left out if it is wrong: our kernels by the
numerics budget, others by ``TOLERANCE``. On a CPU "auto" is "blockwise", which measures how it multiplies bf16 itself;
here the plans of "sdpa" are timed there.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diff_transformer.bench.contenders import shape_inputs
from diff_transformer.bench.record import Deadline, collect, machine
from diff_transformer.bench.shapes import Shape, too_large_reason
from diff_transformer.ops import measuring, table, triton
from diff_transformer.ops.arguments import autocast_off
from diff_transformer.ops.backends import BACKENDS
from diff_transformer.ops.call import Call, check
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

log = logging.getLogger("diff_transformer")

CHECKED = 160, 192  # queries and keys of the comparison with the reference, at most
# Relative error of public kernels, or twice the eager form's, since they round the output of each map. In fp64 and at
# the lengths above, a window one key too wide changes the output by 5 %, a scale a tenth too large by 12 %.
TOLERANCE = 0.02
KINDS = {"forward": False, "both": True}  # whether gradients are computed


def tune_attention(
    shapes: list[Shape],
    dtypes: tuple[torch.dtype, ...],
    device: str,
    *,
    seconds: float | None = None,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """Measure each kind of call among the shapes, keep the verdicts, which "auto" then takes, and return the record.

    A row is one form at one shape and kind ("forward", or "both" for forward + backward): form, dtype, batch, heads,
    length, width, causal, kind, and ms and ratio (over the fastest form) or left_out (why).
    After ``seconds`` no further shape is begun.

    Raises:
        ValueError: DIFF_TRANSFORMER_TUNE is 0 or invalid, or a shape does not fit the memory.
    """
    if measuring.tuning() == "0":
        raise ValueError(f"{measuring.SWITCH} is 0, with which nothing is measured; unset it, or give 1 or force")
    for dtype in dtypes:
        for shape in shapes:
            reason = too_large_reason(shape, dtype, 1, device)
            if reason is not None:
                raise ValueError(reason)

    def rows() -> Iterator[dict]:
        deadline = Deadline(seconds)
        todo = [(shape, dtype) for dtype in dtypes for shape in shapes]
        for i, (shape, dtype) in enumerate(todo):
            if deadline.passed():
                left = ", ".join(f"{s} in {d}" for s, d in todo[i:])
                yield {"unfinished": f"out of time before {left}"}
                return
            for kind in KINDS:
                yield from forms_at(shape, dtype, device, kind)

    return collect("attention-tune", rows(), {"device": device, "machine": machine(device)}, out=out, on_row=on_row)


def forms_at(shape: Shape, dtype: torch.dtype, device: str, kind: str) -> list[dict]:
    """A row for each form at a shape, the fastest first."""
    with torch.set_grad_enabled(KINDS[kind]):
        found = measured(check(*shape_inputs(shape, dtype, device), is_causal=shape.causal))
    first = {"dtype": str(dtype).removeprefix("torch."), **asdict(shape), "kind": kind}
    times = sorted(found.milliseconds.items(), key=lambda item: item[1])
    rows = [{"form": name, **first, "ms": ms, "ratio": round(ms / times[0][1], 4)} for name, ms in times]
    return rows + [{"form": name, **first, "left_out": reason} for name, reason in found.left_out.items()]


def measured(call: Call) -> measuring.Verdict:
    """Time all candidates for the kind of a call, on this call, and keep the fastest. Not for packed documents."""
    kind, device = table.kind_of(call), call.q1.device
    found = table.candidates(call, kind)
    runs = {name: timed(call._replace(backend=backend, variant=variant)) for name, (backend, variant) in found.items()}
    table.forget(device.index, kind)
    return measuring.measure(table.key_of(device.type, device.index, kind), runs, clock(device), again=True)


def timed(call: Call) -> Callable[[], None]:
    """A function that computes a resolved call, with gradients if it needs them. The first call checks it."""
    gradients, device = bool(call.gradients), call.q1.device
    strict = {"strict": True} if call.backend == "sdpa" and device.type == "cuda" else {}
    checked = False

    def run() -> None:
        nonlocal checked
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.set_grad_enabled(gradients), autocast_off(device.type), on_device:
            if not checked:
                assert_right(call)
                checked = True
            given: list[Any] = [
                x if x is None else x.detach().requires_grad_(x.requires_grad and gradients) for x in call[:6]
            ]
            out = BACKENDS[call.backend].attend(Call(*given, *call[6:]), **strict)
            if gradients:
                leaves = [x for x in given if x is not None and x.requires_grad]
                torch.autograd.grad(out, leaves, out.detach())

    return run


def assert_right(call: Call) -> None:
    """Raise AssertionError unless a resolved call is right on a small problem of its kind, with its gradients."""
    (_, H, T, D), Hn, (G, S), shared = call.q1.shape, call.q2.shape[1], call.k1.shape[1:3], call.k2 is None
    # A few queries: over a cache that is long enough for the decoding kernel.
    most = 2 * triton.MIN_DECODE_KEYS if T <= triton.MAX_DECODE_QUERIES else CHECKED[1]
    if T == S:  # needs no mask for the causal limit, and shall need none here
        most = CHECKED[0]
    T, S, dtype, device = min(T, CHECKED[0]), min(S, most), call.q1.dtype, call.q1.device
    of_keys: dict[str, Any] = {"Hn": Hn, "G": G, "S": S, "Dv": call.v.shape[3]}
    x = make_inputs(1, H, T, D, **of_keys, dtype=dtype, device=device, requires_grad=False)
    mask = None if call.attn_mask is None else call.attn_mask[:1, :, :T, :S]
    window = None if call.window is None else min(call.window, CHECKED[0] // 2)  # one that leaves keys out
    options = {"attn_mask": mask, "is_causal": call.is_causal, "window": window, "scale": call.scale}
    names = [name for name in x._fields if not (shared and name == "k2")]
    gradients = torch.is_grad_enabled()

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        y = x.to(dtype)
        y = y._replace(k2=y.k1) if shared else y
        leaves = [getattr(y, name).requires_grad_(gradients) for name in names]
        out = function(*y)
        return [out.detach(), *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if gradients else ())]

    def by(backend: str, *y: Tensor) -> Tensor:
        small = check(*y, **options)._replace(variant=call.variant if backend == call.backend else None)
        return BACKENDS[backend].attend(small)

    ours, exact = partial(by, call.backend), partial(by, "reference")
    eager = partial(eager_diff_attention, **options)
    values = results(ours, dtype), results(exact, torch.float64), results(eager, dtype)
    try:
        for what, actual, expected, by_eager in zip(("out", *names), *values, strict=False):
            if call.backend == "triton":
                assert_within_budget(actual, expected, by_eager, what=what)
            elif (size := float(expected.norm())) > 1e-6:  # of one key, queries have no gradient
                error, of_eager = (float((y - expected).norm()) / size for y in (actual, by_eager))
                if not error <= max(TOLERANCE, 2 * of_eager):
                    raise AssertionError(f"{what} has a relative error of {error:.1%}")
    except AssertionError as error:
        log.warning("%s is wrong on %s and is not used: %s", table.name_of(call.backend, call.variant), device, error)
        raise


def clock(device: torch.device) -> measuring.Timer:
    """A timer for functions that run on the device."""
    if device.type != "cuda":
        return measuring.wall_clock

    def seconds(run: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return seconds
