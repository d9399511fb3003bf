"""Time of the operator's backends over that of softmax attention of matched size: SDPA with twice the heads, causal.

For each shape and dtype first the correctness gate, at the length timed and, with every gradient, at a shorter one. A
backend that does not pass has no time. Then baseline and backends take turns, every other turn in the opposite order,
and the ratio of the medians is the result. Peak memory is what forward and backward hold at most beyond the inputs.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from diff_transformer.checks import require_positive
from diff_transformer.evals.provenance import provenance
from diff_transformer.ops import available_backends, diff_attention
from diff_transformer.testing import Inputs, assert_within_budget, eager_diff_attention, make_inputs, peak_memory

BASELINE = "softmax"
LONGEST_REFERENCE = 1024  # the reference materialises the maps; longer, it is left out


@dataclass(frozen=True)
class Shape:
    """q1, q2, k1, k2 [batch, heads, length, width] and v twice as wide; the baseline has 2 * heads of width."""

    batch: int
    heads: int
    length: int
    width: int


SHORT_GRID = [
    Shape(16, 4, 128, 16),
    Shape(4, 4, 512, 32),
    Shape(1, 4, 1024, 128),
    Shape(1, 4, 2048, 32),
    Shape(1, 4, 2048, 64),
]
FULL_GRID = [
    Shape(16, 4, 128, 16),
    Shape(16, 4, 256, 32),
    *(
        Shape(batch, heads, length, width)
        for batch, heads, length in ((4, 4, 512), (2, 4, 1024), (1, 4, 2048), (1, 2, 4096), (1, 1, 8192))
        for width in (32, 64, 128)
    ),
]


def gate(backend: str, shape: Shape, dtype: torch.dtype, device: str, backward: bool) -> None:
    """Raise AssertionError unless the backend is within the numerics budget at this shape.

    At min(length, 555) the output and, with ``backward``, every gradient; at the full length the output of 32 queries.
    """
    x = _inputs(shape, dtype, device, length=min(shape.length, 555))
    with torch.set_grad_enabled(backward):
        actual = _with_gradients(diff_attention, x, backend=backend)
        exact = _with_gradients(diff_attention, x.to(torch.float64), backend="reference")
        eager = _with_gradients(eager_diff_attention, x)
    for name in actual:
        assert_within_budget(actual[name], exact[name], None if dtype == torch.float32 else eager[name], what=name)
    with torch.no_grad():
        x = _inputs(shape, dtype, device)
        rows = torch.linspace(0, shape.length - 1, 32, device=device).long().unique()
        some = x._replace(q1=x.q1[:, :, rows], q2=x.q2[:, :, rows], lam=x.lam[:, :, rows])
        seen = torch.arange(shape.length, device=device) <= rows[:, None]  # [32, length]
        actual = diff_attention(*x, is_causal=True, backend=backend)[:, :, rows]
        exact = diff_attention(*some.to(torch.float64), attn_mask=seen, backend="reference")
        eager = None if dtype == torch.float32 else eager_diff_attention(*some, attn_mask=seen)
        assert_within_budget(actual, exact, eager, what=f"out at length {shape.length}")


def measure(shape: Shape, dtype: torch.dtype, device: str, backends: list[str], repeats: int) -> Iterator[dict]:
    """A row for the baseline and one for each backend; see ``run_attention_benchmark``."""
    x = _inputs(shape, dtype, device)
    softmax = [_normal(shape, 2 * shape.heads, shape.width, dtype, device, seed).requires_grad_() for seed in (1, 2, 3)]
    dout, softmax_dout = torch.ones_like(x.v.detach()), torch.ones_like(softmax[0].detach())

    def forward(function: Callable[[], Tensor]) -> Callable[[], None]:
        def run():
            with torch.no_grad():
                function()

        return run

    def both(function: Callable[[], Tensor], inputs, gradient: Tensor) -> Callable[[], None]:
        def run():
            torch.autograd.grad(function(), inputs, gradient)

        return run

    def baseline():
        q, k, v = softmax
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    runs = {(BASELINE, "forward"): forward(baseline), (BASELINE, "both"): both(baseline, softmax, softmax_dout)}
    failures = {}
    for name in backends:
        backward = not (name == "flex" and device == "cpu")
        try:
            gate(name, shape, dtype, device, backward)
        except AssertionError as error:
            failures[name] = str(error)
            continue

        def ours(name=name):
            return diff_attention(*x, is_causal=True, backend=name)

        runs[name, "forward"] = forward(ours)
        if backward:
            runs[name, "both"] = both(ours, x, dout)
    seconds = interleaved_medians(runs, repeats, device)
    for name in [BASELINE, *backends]:
        row = {"backend": name, "dtype": str(dtype).removeprefix("torch."), **asdict(shape)}
        if name in failures:
            yield row | {"gate": f"failed: {failures[name]}"}
            continue
        row["gate"] = "is the baseline" if name == BASELINE else "passed"
        for kind in ("forward", "both"):
            if (name, kind) in seconds:
                row[f"{kind}_ms"] = round(seconds[name, kind] * 1e3, 4)
                row[f"{kind}_ratio"] = round(seconds[name, kind] / seconds[BASELINE, kind], 4)
        row["peak_bytes"] = peak_memory(runs.get((name, "both"), runs[name, "forward"]), device)
        yield row


def interleaved_medians(runs: dict, repeats: int, device: str) -> dict:
    """Median seconds of every function of ``runs``; two calls each to warm up, then all in turns, there and back."""
    for run in [*runs.values()] * 2:
        run()
    seconds: dict = {key: [] for key in runs}
    for repeat in range(repeats):
        for key in list(runs) if repeat % 2 == 0 else reversed(runs):
            _synchronize(device)
            start = time.perf_counter()
            runs[key]()
            _synchronize(device)
            seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in seconds.items()}


def run_attention_benchmark(
    shapes: list[Shape],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    *,
    device: str = "cpu",
    backends: list[str] | None = None,
    repeats: int = 7,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """The record: {"rows": [...], "provenance": {...}}; ``on_row`` sees each row as soon as it is there.

    A row has backend, dtype, batch, heads, length, width, gate ("passed", or "failed: " and the numbers) and, unless
    the gate failed, forward_ms, both_ms (forward + backward), forward_ratio, both_ratio (over the baseline's median in
    the same turns) and peak_bytes. Backends default to all available ones; the reference is left out beyond a length
    of 1024, and FlexAttention has no backward on the CPU.
    """
    require_positive(repeats=repeats)
    rows = []
    for dtype in dtypes:
        names = available_backends(device, dtype) if backends is None else backends
        for shape in shapes:
            timed = [n for n in names if n != "reference" or shape.length <= LONGEST_REFERENCE]
            for row in measure(shape, dtype, device, timed, repeats):
                rows.append(row)
                if on_row is not None:
                    on_row(row)
    settings = {"repeats": repeats, "device": device, "baseline": "scaled_dot_product_attention, 2 * heads, causal"}
    memory = "allocator peak" if torch.device(device).type == "cuda" else "running sum of the profiler's allocations"
    return {"benchmark": "attention", "rows": rows, "provenance": provenance(**settings, peak_bytes=memory)}


def main(
    out: Path | None = None,
    full: bool = False,
    device: str = "cpu",
    backends: list[str] | None = None,
    repeats: int = 7,
    overwrite: bool = False,
) -> dict:
    """Run the grid, print a table and write the record to ``out`` as JSON; returns the record.

    The default grid takes about two minutes on two cores, the full one (lengths 512 to 8192, widths 32 to 128) half an
    hour. Backends default to all available ones; on the CPU the default grid leaves FlexAttention out, whose
    compilation would take most of the time. Each shape is timed in ``repeats`` turns. Raises FileExistsError if
    ``out`` exists, before anything runs, unless ``overwrite``.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    if backends is None and device == "cpu" and not full:
        backends = [name for name in available_backends(device, torch.bfloat16) if name != "flex"]
    if out is not None and out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists; give another path, or overwrite=True")
    columns = ("backend", "dtype", "B, h, N, d", "fwd ms", "ratio", "all ms", "ratio", "MB")
    table = Table(title="time of forward and of forward + backward (all), over softmax with twice the heads")
    failures: list[str] = []
    for column in columns:
        table.add_column(column, no_wrap=True)

    def show(row: dict) -> None:
        shape = ", ".join(str(row[k]) for k in ("batch", "heads", "length", "width"))
        sizes = [row["backend"], row["dtype"], shape]
        if "forward_ms" not in row:
            table.add_row(*sizes, "gate failed", style="red")
            failures.append(f"{' '.join(sizes)}: {row['gate']}")
            return
        digits = {"forward_ms": 1, "forward_ratio": 2, "both_ms": 1, "both_ratio": 2}
        times = [f"{row[key]:.{places}f}" if key in row else "-" for key, places in digits.items()]
        peak = f"{row['peak_bytes'] / 2**20:.0f}"
        table.add_row(*sizes, *times, peak, style="dim" if row["backend"] == BASELINE else "")

    with Live(table, console=Console(), vertical_overflow="visible"):
        record = run_attention_benchmark(
            FULL_GRID if full else SHORT_GRID, device=device, backends=backends, repeats=repeats, on_row=show
        )
    for failure in failures:
        print(failure)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    return record


def _normal(shape: Shape, heads: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.batch, heads, shape.length, width, generator=generator).to(device, dtype)


def _inputs(shape: Shape, dtype: torch.dtype, device: str, length: int | None = None) -> Inputs:
    return make_inputs(shape.batch, shape.heads, length or shape.length, shape.width, dtype=dtype, device=device)


def _with_gradients(function: Callable[..., Tensor], x: Inputs, **options) -> dict[str, Tensor]:
    out = function(*x, is_causal=True, **options)
    if not out.requires_grad:
        return {"out": out}
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.device, x.v.dtype)
    names = (f"gradient of {name}" for name in x._fields)
    return {"out": out} | dict(zip(names, torch.autograd.grad(out, x, dout.to(out.dtype)), strict=True))


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
