"""Time of the operator's backends relative to matched softmax attention: SDPA with twice the heads.

The correctness gate comes first, for each shape and dtype: at the timed length, and with every gradient at a shorter
one. A backend that fails is not timed. A rival that fails is timed, and its row says what it missed. Contenders then
take turns, every other turn in the opposite order; the result is the median ratio of a turn. TFLOP/s count useful work
in units of h N^2 d multiply-adds: 4 forward and 10 backward for softmax attention, 6 and 10 for differential attention.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from diff_transformer.bench.contenders import (
    BASELINE,
    DIFF_UNITS,
    FAULT,
    KERNELS,
    SOFTMAX_UNITS,
    Contender,
    Gate,
    backend_contenders,
    baselines,
    refusal,
    rivals,
    softmax_inputs,
)
from diff_transformer.bench.record import collect, in_turn, machine
from diff_transformer.bench.shapes import Shape
from diff_transformer.bench.timing import Times, ceilings, interleaved_times
from diff_transformer.checks import require_positive
from diff_transformer.ops import available_backends
from diff_transformer.testing import peak_memory

LONGEST_REFERENCE = 1024  # the reference materialises the maps and is left out beyond this length
KINDS = ("forward", "backward", "both")


def run_attention_benchmark(
    shapes: list[Shape],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    *,
    device: str = "cpu",
    backends: list[str] | None = None,
    kernels: list[str] | None = None,
    with_rivals: bool | None = None,
    repeats: int = 7,
    seconds: float | None = None,
    seconds_each: float | None = None,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """Benchmark the operator and return the record. ``on_row`` receives each row, and ``out`` is written after each.

    A row has backend, role ("baseline", "backend" or "rival"), dtype, batch, heads, length, width, causal, gate
    ("passed", "is the baseline", or "failed: " or "skipped: " and why) and, for the kinds forward, backward (alone) and
    both: ..._ms, ..._quartiles_ms, ..._ratio (over SDPA's own choice: the median over the turns), ..._tflops and
    ..._share of the measured matrix product; ratios over every other baseline; peak_bytes of forward + backward.

    Args:
        backends: our backends, by default all available ones. The reference is left out beyond a length of 1024.
        kernels: SDPA's kernels for softmax attention ("flash", "cudnn", "efficient", "math"); by default all of them
            on CUDA, and SDPA's own choice on the CPU.
        with_rivals: also time FlashDiffAttn_1 and _2 on the same kernels; by default on CUDA only.
        repeats: turns.
        seconds: start no new shape after this time.
        seconds_each: time limit of one function at one shape.

    """
    require_positive(repeats=repeats, seconds=seconds, seconds_each=seconds_each)
    cuda = torch.device(device).type == "cuda"
    kernels = (list(KERNELS) if cuda else []) if kernels is None else kernels
    with_rivals = cuda if with_rivals is None else with_rivals

    def backends_at(shape: Shape, dtype: torch.dtype) -> list[str]:
        names = available_backends(device, dtype) if backends is None else backends
        return [n for n in names if n != "reference" or shape.length <= LONGEST_REFERENCE]

    ceiling = ceilings(device, dtypes)

    def rows(shape: Shape, dtype: torch.dtype) -> Iterator[dict]:
        gate = Gate(shape, dtype, device)
        contenders = baselines(shape, softmax_inputs(shape, dtype, device), kernels)
        contenders += backend_contenders(backends_at(shape, dtype), gate.full, shape.causal)
        contenders += rivals(gate.full, shape.causal, kernels) if with_rivals else []
        yield from measure(contenders, gate, ceiling, repeats, seconds_each)

    work = [(f"{shape} in {dtype}", partial(rows, shape, dtype)) for dtype in dtypes for shape in shapes]
    facts = {
        "repeats": repeats,
        "device": device,
        "baseline": f"{BASELINE}: scaled_dot_product_attention, 2 * heads, the kernel that PyTorch chooses",
        "peak_bytes": "allocator peak" if cuda else "running sum of the profiler's allocations",
        "units": {"softmax": SOFTMAX_UNITS, "diff": DIFF_UNITS},
        "ceilings": ceiling,
        "machine": machine(device),
    }
    # A compiled backward may otherwise donate its saved buffers, and then runs only once per graph.
    with functorch_config.patch(donated_buffer=False):
        return collect("attention", in_turn(work, seconds), facts, out=out, on_row=on_row)


def measure(
    contenders: list[Contender], gate: Gate, ceiling: dict, repeats: int, seconds_each: float | None = None
) -> Iterator[dict]:
    """A row for each contender, all at the gate's shape; see ``run_attention_benchmark``."""
    shape, dtype = gate.shape, str(gate.dtype).removeprefix("torch.")
    verdicts = {c.name: verdict(c, gate) for c in contenders}
    timed = [c for c in contenders if is_timed(c.role, verdicts[c.name])]
    peaks = {c.name: peak_memory(calls(c)["both"], gate.device) for c in timed}
    runs = {(c.name, kind): run for c in timed for kind, run in calls(c, retain=True).items()}
    times = interleaved_times(runs, repeats, gate.device, seconds=seconds_each, kernels=True)
    del runs  # and with them the retained graphs
    ceiling_tflops = ceiling["matmul_tflops"][dtype]
    for c in contenders:
        row = {**first_fields(c, gate), "gate": verdicts[c.name]}
        if c.name in peaks:
            for kind in KINDS:
                if (c.name, kind) in times:
                    row |= timed_fields(kind, times[c.name, kind], c.units[kind] * shape.unit, ceiling_tflops)
                    row[f"{kind}_ratio"] = ratio(times, c.name, BASELINE, kind)
            others = [b.name for b in timed if b.role == "baseline" and b.name != BASELINE]
            row["ratios"] = {
                b: {kind: ratio(times, c.name, b, kind) for kind in KINDS if (c.name, kind) in times} for b in others
            }
            row["peak_bytes"] = peaks[c.name]
        yield row


def first_fields(contender: Contender, gate: Gate) -> dict:
    """The fields of a row that name the contender and the shape."""
    dtype = str(gate.dtype).removeprefix("torch.")
    return {"backend": contender.name, "role": contender.role, "dtype": dtype, **asdict(gate.shape), **contender.facts}


def verdict(contender: Contender, gate: Gate) -> str:
    """The row's field "gate"."""
    return run_gate(contender.role, calls(contender)["both"], lambda: gate.check(contender.function))


def run_gate(role: str, run: Callable[[], object], check: Callable[[], object]) -> str:
    """Run once, then check: "passed", "is the baseline", "skipped: why" or "failed: what".

    A kernel refuses by RuntimeError, NotImplementedError or ValueError. Any other exception, such as a compiler error,
    is a failure of this contender only, except for a fault of the device, which ends the benchmark.
    """
    try:
        reason = refusal(run)
        if reason is not None:
            return f"skipped: {reason}"
        if role == "baseline":
            return "is the baseline"
        check()
    except FAULT:
        raise
    except AssertionError as error:
        return f"failed: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"[:1000]
    return "passed"


def is_timed(role: str, verdict: str) -> bool:
    """True if a contender is timed: only if it passed, except that a rival may miss the budget."""
    return verdict in ("passed", "is the baseline") or (role == "rival" and verdict.startswith("failed"))


def calls(contender: Contender, retain: bool = False) -> dict[str, Callable[[], object]]:
    """The functions to time, by kind. ``retain`` adds the backward pass alone, repeated over one retained graph."""

    def attend() -> Tensor:
        return contender.function(*contender.inputs, is_causal=contender.is_causal)

    def forward() -> None:
        with torch.no_grad():
            attend()

    q, v = contender.inputs[0], contender.values
    gradient = torch.randn(*q.shape[:3], v.shape[3], device=q.device).to(v.dtype)

    def both() -> None:
        torch.autograd.grad(attend(), contender.inputs, gradient)

    if not retain:
        return {"forward": forward, "both": both}
    out = attend()

    def backward() -> None:
        torch.autograd.grad(out, contender.inputs, gradient, retain_graph=True)

    return {"forward": forward, "backward": backward, "both": both}


def timed_fields(kind: str, times: Times, multiply_adds: float, ceiling_tflops: float) -> dict:
    """Median, quartiles, rate of useful work, and its share of the peak rate."""
    tflops = 2 * multiply_adds / times.median / 1e12
    return {
        f"{kind}_ms": round(times.median * 1e3, 4),
        f"{kind}_quartiles_ms": [round(times.low * 1e3, 4), round(times.high * 1e3, 4)],
        f"{kind}_turns": times.turns,
        f"{kind}_tflops": round(tflops, 6),
        f"{kind}_share": round(tflops / ceiling_tflops, 6),
    }


def ratio(times: dict[tuple[str, str], Times], name: str, baseline: str, kind: str) -> float | None:
    """Time over the baseline's, the median over the turns; None if the baseline was not timed."""
    if (baseline, kind) not in times:
        return None
    return round(times[name, kind].over(times[baseline, kind]), 4)
