"""Time of the operator's backends relative to matched softmax attention: SDPA with twice the heads.

The correctness gate (``gate.py``) comes first, for each shape and dtype. A backend that fails is not timed. A rival
that fails is timed, and its row says what it missed. Contenders then take turns, every other turn in the opposite
order; the result is the median ratio of a turn. TFLOP/s count useful work in units of h N^2 d multiply-adds: 4 forward
and 10 backward for softmax attention, 6 and 10 for differential attention.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch._functorch import config as functorch_config

from diff_transformer.bench.contenders import (
    BASELINE,
    DIFF_UNITS,
    KERNELS,
    SOFTMAX_UNITS,
    Contender,
    backend_contender,
    baselines,
    rivals,
    softmax_inputs,
)
from diff_transformer.bench.gate import Gate, is_timed, verdict
from diff_transformer.bench.record import Options
from diff_transformer.bench.shapes import Shape
from diff_transformer.bench.timing import ratio
from diff_transformer.ops import available_backends
from diff_transformer.testing import peak_memory

LONGEST_REFERENCE = 1024  # the reference materialises the maps and is left out beyond this length
KINDS = ("forward", "backward", "both")


def run_attention_benchmark(
    shapes: list[Shape],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    *,
    backends: list[str] | None = None,
    kernels: list[str] | None = None,
    with_rivals: bool | None = None,
    **options,
) -> dict:
    """Benchmark the operator and return the record.

    A row has backend, role ("baseline", "backend" or "rival"), dtype, batch, heads, length, width, causal, gate
    ("passed", "is the baseline", or "failed: " or "skipped: " and why) and, for the kinds forward, backward (alone) and
    both: ..._ms, ..._quartiles_ms, ..._ratio (over SDPA's own choice: the median over the turns) and ..._tflops; ratios
    over every other baseline; peak_bytes of forward + backward.

    Args:
        backends: our backends, by default all available ones. The reference is left out beyond a length of 1024.
        kernels: SDPA's kernels for softmax attention ("flash", "cudnn", "efficient", "math"); by default the
            first three on CUDA, and SDPA's own choice on the CPU.
        with_rivals: also time FlashDiffAttn_1 and _2 on the same kernels; by default on CUDA only.
        options: fields of ``Options``.
    """
    run = Options(**options)
    kernels = ([name for name in KERNELS if name != "math"] if run.cuda else []) if kernels is None else kernels

    def rows(shape: Shape, dtype: torch.dtype) -> Iterator[dict]:
        gate = Gate(shape, dtype, run.device)
        names = available_backends(run.device, dtype) if backends is None else backends
        names = [name for name in names if name != "reference" or shape.length <= LONGEST_REFERENCE]
        contenders = baselines(shape, softmax_inputs(shape, dtype, run.device), kernels)
        contenders += [backend_contender(name, gate.full, shape.causal) for name in names]
        if run.cuda if with_rivals is None else with_rivals:
            contenders += rivals(gate.full, shape.causal, kernels)
        yield from measure(contenders, gate, run)

    work = [(f"{shape} in {dtype}", partial(rows, shape, dtype)) for dtype in dtypes for shape in shapes]
    facts = {
        "baseline": f"{BASELINE}: scaled_dot_product_attention, 2 * heads, the kernel that PyTorch chooses",
        "peak_bytes": "allocator peak" if run.cuda else "running sum of the profiler's allocations",
        "units": {"softmax": SOFTMAX_UNITS, "diff": DIFF_UNITS},
    }
    # A compiled backward may otherwise donate its saved buffers, and then runs only once per graph.
    with functorch_config.patch(donated_buffer=False):
        return run.collect("attention", work, **facts)


def measure(contenders: list[Contender], gate: Gate, options: Options) -> Iterator[dict]:
    """A row for each contender, all at the gate's shape; see ``run_attention_benchmark``."""
    dtype = str(gate.dtype).removeprefix("torch.")
    verdicts = {
        c.name: verdict(c.calls()["both"], None if c.role == "baseline" else partial(gate.check, c.function))
        for c in contenders
    }
    timed = [c for c in contenders if is_timed(verdicts[c.name], c.role)]
    peaks = {c.name: peak_memory(c.calls()["both"], gate.device) for c in timed}
    runs = {(c.name, kind): run for c in timed for kind, run in c.calls(retain=True).items()}
    times = options.times(runs, kernels=True)
    del runs  # and with them the retained graphs
    others = [b.name for b in timed if b.role == "baseline" and b.name != BASELINE]
    for c in contenders:
        row = {"backend": c.name, "role": c.role, "dtype": dtype, **asdict(gate.shape), **c.facts}
        row["gate"] = verdicts[c.name]
        if c.name in peaks:
            for kind in KINDS:
                t = times[c.name, kind]
                row |= {
                    f"{kind}_ms": round(t.median * 1e3, 4),
                    f"{kind}_quartiles_ms": [round(each * 1e3, 4) for each in t.quartiles],
                    f"{kind}_turns": len(t.seconds),
                    f"{kind}_tflops": round(2 * c.units[kind] * gate.shape.unit / t.median / 1e12, 6),
                    f"{kind}_ratio": ratio(times, c.name, BASELINE, kind),
                }
            row["ratios"] = {b: {kind: ratio(times, c.name, b, kind) for kind in KINDS} for b in others}
            row["peak_bytes"] = peaks[c.name]
        yield row
