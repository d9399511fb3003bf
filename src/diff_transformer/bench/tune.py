"""Times what ``backend="auto"`` may be on a GPU, and keeps the verdicts, which it then takes.

Every candidate passes the benchmark's correctness gate before it is timed, or is left out. On a CPU "auto" is
"blockwise", which measures how it multiplies bf16 itself; here the plans of "sdpa" are timed there.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diff_transformer.bench.contenders import Gate
from diff_transformer.bench.record import collect, in_turn, machine
from diff_transformer.bench.shapes import Shape, too_large_reason
from diff_transformer.ops import measuring, table
from diff_transformer.ops.arguments import autocast_off
from diff_transformer.ops.backends import BACKENDS, unsupported_reason
from diff_transformer.ops.call import Call, check, replace

log = logging.getLogger("diff_transformer")
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

    def rows(shape: Shape, dtype: torch.dtype) -> list[dict]:
        return [row for kind in KINDS for row in forms_at(shape, dtype, device, kind)]

    work = [(f"{shape} in {dtype}", partial(rows, shape, dtype)) for dtype in dtypes for shape in shapes]
    facts = {"device": device, "machine": machine(device)}
    return collect("attention-tune", in_turn(work, seconds), facts, out=out, on_row=on_row)


def forms_at(shape: Shape, dtype: torch.dtype, device: str, kind: str) -> list[dict]:
    """A row for each form at a shape, the fastest first."""
    found = measured(Gate(shape, dtype, device), KINDS[kind])
    first = {"dtype": str(dtype).removeprefix("torch."), **asdict(shape), "kind": kind}
    times = sorted(found.milliseconds.items(), key=lambda item: item[1])
    rows = [{"form": name, **first, "ms": ms, "ratio": round(ms / times[0][1], 4)} for name, ms in times]
    return rows + [{"form": name, **first, "left_out": reason} for name, reason in found.left_out.items()]


def measured(gate: Gate, gradients: bool) -> measuring.Measurement:
    """Time all candidates at the gate's shape, and keep the fastest."""
    with torch.set_grad_enabled(gradients):
        call = check(*gate.full, is_causal=gate.shape.causal)
    kind, device = table.kind_of(call), call.q1.device
    assert kind is not None  # the gate's calls are of the kinds that are measured
    runs = {
        table.name_of(backend, variant): timed(replace(call, backend=backend, variant=variant), gate)
        for backend, variant in table.candidates(call, unsupported_reason("triton", call) is None)
    }
    table.forget(device.index, kind)
    return measuring.measure(table.key_of(device.type, device.index, kind), runs, clock(device), again=True)


def timed(call: Call, gate: Gate) -> Callable[[], None]:
    """A function that computes a resolved call, with gradients if it needs them. The first call checks it."""
    gradients, device, passed = bool(call.gradients), call.q1.device, False
    strict = {"strict": True} if call.backend == "sdpa" and device.type == "cuda" else {}

    def attend(*x: Tensor, is_causal: bool) -> Tensor:
        return BACKENDS[call.backend].attend(replace(check(*x, is_causal=is_causal), variant=call.variant), **strict)

    def run() -> None:
        nonlocal passed
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.set_grad_enabled(gradients), autocast_off(device.type), on_device:
            try:
                passed = passed or gate.check(attend, gradients) is None
            except AssertionError as error:
                name = table.name_of(call.backend, call.variant)
                log.warning("%s is wrong on %s and is not used: %s", name, device, error)
                raise
            out = BACKENDS[call.backend].attend(call, **strict)
            if gradients:
                torch.autograd.grad(out, gate.full, out.detach())

    return run


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
