"""``diff-transformer bench NAME``: run a benchmark, show its rows as they come, keep the record as JSON."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diff_transformer.bench import tables
from diff_transformer.bench.shapes import default_grid, parse_shapes
from diff_transformer.checks import require_known
from diff_transformer.durable import require_writable
from diff_transformer.ops import available_backends

BENCHMARKS = ("attention", "decode", "throughput", "step")


def run_bench(
    name: str,
    out: Path | None = None,
    full: bool = False,
    device: str = "cpu",
    grid: str | None = None,
    *,
    overwrite: bool = False,
    **options: Any,
) -> dict:
    """Run benchmark ``name``, one of ``BENCHMARKS``, print a table, return the record.

    The record is written to ``out``, after every row, or to a new file in runs/bench. The default grid of "attention"
    takes a few minutes on two cores, the full one (lengths 512 to 8192, widths 32 to 128) the better part of an hour;
    on the CPU the default one leaves FlexAttention out, whose compilation would take most of the time. ``grid`` names
    the shapes of "attention" instead: "1x4x2048x64,..." for batch x heads x length x width, an n behind for attention
    without the causal limit. ``options`` go to ``run_attention_benchmark`` and its like (repeats, backends, ...).

    Raises:
        ValueError: for an unknown name or device, or a grid that is none. FileExistsError: if ``out`` exists, before
        anything runs, unless ``overwrite``. DiskError: if its folder may not be written to.
    """
    require_known("benchmark", name, BENCHMARKS)
    if grid is not None and name != "attention":
        raise ValueError(f"grid gives shapes of the benchmark 'attention'; {name!r} has its own")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and PyTorch sees no CUDA device here; give device='cpu'")
    if grid is not None:
        parse_shapes(grid)
    out = out or Path("runs", "bench", f"{name}-{device}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    require_writable(out.parent)
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists; choose another --out, or leave it out for a new file in runs/bench")
    with tables.live(name) as show:
        record = _run(name, full, device, grid, {**options, "out": out, "on_row": show})
    tables.print_failures(record)
    print(f"record: {out}")
    return record


def _run(name: str, full: bool, device: str, grid: str | None, options: dict) -> dict:
    cuda = torch.device(device).type == "cuda"
    runner: Callable[..., dict]
    if name == "attention":
        from diff_transformer.bench.attention import run_attention_benchmark

        shapes = default_grid(device, full) if grid is None else parse_shapes(grid)
        if cuda:
            options = {"dtypes": (torch.bfloat16,), "repeats": 20, "seconds_each": 0.5, **options}
        elif not full and "backends" not in options:
            options["backends"] = [n for n in available_backends(device, torch.bfloat16) if n != "flex"]
        return run_attention_benchmark(shapes, device=device, **options)
    if name == "decode":
        from diff_transformer.bench import caches, generation
        from diff_transformer.bench.decode import run_decode_benchmark

        shapes = (caches.GPU_GRID if full else caches.GPU_SHORT_GRID) if cuda else caches.CPU_GRID
        models = generation.GPU_MODELS if cuda else generation.CPU_MODELS
        options = {"dtypes": (torch.bfloat16,) if cuda else (torch.float32, torch.bfloat16), **options}
        return run_decode_benchmark(shapes, models, device=device, **options)
    if name == "step":
        from diff_transformer.bench import step

        return step.run_step_benchmark(step.GPU_SETTINGS if cuda else step.CPU_SETTINGS, device=device, **options)
    from diff_transformer.bench import pair_throughput

    settings = pair_throughput.GPU_SETTINGS if cuda else pair_throughput.CPU_SETTINGS
    runner = pair_throughput.run_throughput_benchmark
    return runner(settings, device=device, **options)
