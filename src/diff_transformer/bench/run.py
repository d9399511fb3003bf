"""``run_bench``: runs a benchmark, prints its rows as they come, and keeps the record as JSON."""

import time
from pathlib import Path
from typing import Any

import torch

from diff_transformer.bench.shapes import default_grid, parse_shapes
from diff_transformer.checks import require_device, require_known
from diff_transformer.durable import require_writable
from diff_transformer.errors import UserError

BENCHMARKS = ("attention", "decode", "throughput")
SIZES = ("batch", "heads", "kv_heads", "length", "cache", "width", "layers")
SHOWN = ("_ms", "ratio", "us", "copy_share", "tokens_per_second", "peak_bytes")  # ends of fields


def run_bench(
    name: str,
    out: Path | None = None,
    full: bool = False,
    device: str = "cpu",
    grid: str | None = None,
    **options: Any,
) -> dict:
    """Run benchmark ``name``, one of ``BENCHMARKS``, print its rows, return the record.

    The record is written after every row, to ``out`` or to a new file in runs/bench. The default grid of "attention"
    takes a few minutes on two cores. The full grid (lengths 512 to 8192, widths 32 to 128) takes most of an hour.

    Args:
        grid: shapes of "attention" to time instead: "1x4x2048x64,..." is batch x heads x length x width, with a final n
            for attention without the causal mask.
        options: further arguments of ``run_attention_benchmark`` and the other runners (repeats, backends, ...).

    Raises:
        UserError: before anything runs, for an unknown name or device, a malformed grid, an existing ``out``, and a
            folder that is not writable.
    """
    from diff_transformer.bench import attention, decode, pair

    require_known("benchmark", name, BENCHMARKS)
    if (full or grid is not None) and name != "attention":
        raise UserError(f"full and grid choose shapes of the benchmark 'attention'; {name!r} has its own")
    require_device(device)
    kind = torch.device(device).type
    require_known("benchmark on", kind, pair.SETTINGS)
    shapes = default_grid(device, full) if grid is None else parse_shapes(grid)
    out = out or Path("runs", "bench", f"{name}-{device}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    require_writable(out.parent)
    if out.exists():
        raise UserError(f"{out} exists; choose another --out, or leave it out for a new file in runs/bench")
    options |= {"device": device, "out": out, "on_row": lambda row: print(shown(row), flush=True)}
    if name in ("attention", "decode"):
        options = {"dtypes": (torch.bfloat16,) if kind == "cuda" else (torch.float32, torch.bfloat16), **options}
    if name == "attention":
        more: dict[str, Any] = {"repeats": 20, "seconds_each": 0.5} if kind == "cuda" else {}
        record = attention.run_attention_benchmark(shapes, **(more | options))
    elif name == "decode":
        caches = decode.GPU_GRID if kind == "cuda" else decode.CPU_GRID
        record = decode.run_decode_benchmark(caches, pair.MODELS[kind], **options)
    else:
        record = pair.run_pair_benchmark(pair.SETTINGS[kind], **options)
    print(f"record: {out}")
    return record


def shown(row: dict) -> str:
    """A row as one line: who, sizes, its numbers, and what its gate found."""
    who = row["backend"] if "backend" in row else f"{row['model']} {row['side']}{', compiled' * row['compiled']}"
    sizes = " ".join(f"{name} {row[name]}" for name in SIZES if name in row)
    values = {key: row[key] for key in row if key.endswith(SHOWN) and isinstance(row[key], int | float)}
    numbers = " ".join(f"{key} {value:.4g}" for key, value in values.items())
    full = "" if row.get("causal", True) else " not causal"
    return f"{who} {row['dtype']}: {sizes}{full}; {row.get('gate', '')} {numbers}"
