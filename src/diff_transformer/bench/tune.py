"""Times the forms among which ``backend="auto"`` chooses on a GPU, and keeps the verdicts, which it then takes.

On a CPU "auto" is "blockwise", which chooses its form of bf16 itself; here the forms of "sdpa" are timed there.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from diff_transformer.bench.contenders import shape_inputs
from diff_transformer.bench.record import Deadline, collect, machine
from diff_transformer.bench.shapes import Shape, too_large_reason
from diff_transformer.ops import choice, dispatch
from diff_transformer.ops.arguments import check

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
    if dispatch.tuning() == "0":
        raise ValueError(f"{dispatch.SWITCH} is 0, with which nothing is measured; unset it, or give 1 or force")
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
    x = shape_inputs(shape, dtype, device)
    with torch.set_grad_enabled(KINDS[kind]):
        arguments = check(*x, None, shape.causal, None, None)
        found = choice.verdict(x[:5], arguments)
    first = {"dtype": str(dtype).removeprefix("torch."), **asdict(shape), "kind": kind}
    times = sorted(found.milliseconds.items(), key=lambda item: item[1])
    rows = [{"form": name, **first, "ms": ms, "ratio": round(ms / times[0][1], 4)} for name, ms in times]
    return rows + [{"form": name, **first, "left_out": reason} for name, reason in found.left_out.items()]
