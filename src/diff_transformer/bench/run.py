"""``run_bench``: runs a benchmark, shows its rows as they come, and keeps the record as JSON."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from diff_transformer.bench.shapes import Shape, default_grid, parse_shapes
from diff_transformer.checks import require_known
from diff_transformer.durable import require_writable
from diff_transformer.errors import UserError

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

    The record is written after every row, to ``out`` or to a new file in runs/bench. The default grid of "attention"
    takes a few minutes on two cores. The full grid (lengths 512 to 8192, widths 32 to 128) takes most of an hour.

    Args:
        grid: shapes of "attention" to time instead: "1x4x2048x64,..." is batch x heads x length x width, with a final n
            for attention without the causal mask.
        overwrite: replace ``out`` if it exists.
        options: further arguments of ``run_attention_benchmark`` and the other runners (repeats, backends, ...).

    Raises:
        UserError: before anything runs, for an unknown name or device, a malformed grid, an existing ``out`` without
            ``overwrite``, and a folder that is not writable.
    """
    require_known("benchmark", name, BENCHMARKS)
    if grid is not None and name != "attention":
        raise UserError(f"grid gives shapes of the benchmark 'attention'; {name!r} has its own")
    kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {device!r}, and PyTorch sees no CUDA device here; give device='cpu'")
    shapes = default_grid(device, full) if grid is None else parse_shapes(grid)
    out = out or Path("runs", "bench", f"{name}-{device}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    require_writable(out.parent)
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; choose another --out, or leave it out for a new file in runs/bench")
    with live_table(name) as show:
        record = _run(name, kind, full, shapes, {**options, "device": device, "out": out, "on_row": show})
    for row in record["rows"]:
        if row.get("gate", "").startswith(("failed", "skipped")):
            size = ", ".join(str(row[field]) for field in SIZES if field in row)
            print(f"{row['backend']} {row['dtype']} {size}: {row['gate']}")
    if "unfinished" in record:
        print(record["unfinished"])
    print(f"record: {out}")
    return record


def _run(name: str, kind: str, full: bool, shapes: list[Shape], options: dict) -> dict:
    cuda = kind == "cuda"
    if name == "attention":
        from diff_transformer.bench.attention import run_attention_benchmark

        if cuda:
            options = {"dtypes": (torch.bfloat16,), "repeats": 20, "seconds_each": 0.5, **options}
        return run_attention_benchmark(shapes, **options)
    from diff_transformer.bench import decode, pair

    if name == "decode":
        caches = (decode.GPU_GRID if full else decode.GPU_SHORT_GRID) if cuda else decode.CPU_GRID
        options = {"dtypes": (torch.bfloat16,) if cuda else (torch.float32, torch.bfloat16), **options}
        return decode.run_decode_benchmark(caches, pair.MODELS[kind], **options)
    return pair.run_pair_benchmark(name, pair.SETTINGS[name, kind], **options)


TITLES = {
    "attention": "time over that of softmax attention with twice the heads",
    "decode": "one query over a cache; time over that of softmax attention with twice the heads",
    "throughput": "tokens a second, and over the Transformer's",
    "step": "tokens a second of a training step, and over the Transformer's",
}
COLUMNS = {  # title, field of a row, format
    "attention": [
        ("fwd", "forward_ratio", ".2f"), ("bwd", "backward_ratio", ".2f"), ("both", "both_ratio", ".2f"),
        ("ms", "both_ms", ".2f"), ("peak", "both_share", ".0%"), ("bytes", "peak_bytes", ".2g"),
    ],
    "decode": [
        ("ratio", "ratio", ".2f"), ("us", "us", ".1f"), ("GB/s", "gb_per_s", ".0f"), ("copy", "copy_share", ".0%"),
        ("tokens/s", "tokens_per_second", ",.0f"),
    ],
    "throughput": [
        ("fwd+bwd", "forward_backward_tokens_per_second", ",.0f"), ("ratio", "forward_backward_ratio", ".3f"),
        ("MFU", "forward_backward_mfu", ".0%"), ("prefill", "prefill_tokens_per_second", ",.0f"),
        ("ratio", "prefill_ratio", ".3f"), ("MFU", "prefill_mfu", ".0%"),
    ],
    "step": [
        ("tokens/s", "step_tokens_per_second", ",.0f"), ("ratio", "step_ratio", ".3f"), ("MFU", "step_mfu", ".0%"),
    ],
}  # fmt: skip
SIZES = ("batch", "heads", "kv_heads", "length", "cache", "width", "layers")
WIDTH = 100  # characters, if the output is not a terminal
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@contextmanager
def live_table(name: str) -> Generator[Callable[[dict], None]]:
    """A table on the screen. Yields a function that adds a row."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(title=TITLES[name], title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("who", "", "size"):
        table.add_column(column, no_wrap=True)
    for title, _, _ in COLUMNS[name]:
        table.add_column(title, no_wrap=True, justify="right")

    def show(row: dict) -> None:
        faint = "dim" if row.get("role") == "baseline" or row.get("side") == "softmax" else ""
        table.add_row(*cells(name, row), style="red" if row.get("gate", "").startswith("failed") else faint)

    try:
        with Live(table, console=console, vertical_overflow="visible"):
            yield show
    finally:
        console.print()  # ends the table's last line, also before an error message


def cells(name: str, row: dict) -> list[str]:
    """The cells of a row, as text. A default of SDPA is named with the kernel that ran."""
    who = row["backend"] if "backend" in row else f"{row['model']} {row['side']}{', compiled' * row['compiled']}"
    if row.get("sdpa") and "[" not in who:
        who += f" = {row['sdpa']}"
    if row.get("gate", "").startswith(("failed", "skipped")):
        who += f", {row['gate'].split(':')[0]}"
    size = ", ".join(str(row[field]) for field in SIZES if field in row) + " full" * (not row.get("causal", True))
    values = ("-" if row.get(field) is None else format(row[field], form) for _, field, form in COLUMNS[name])
    return [who, DTYPES[row["dtype"]], size, *values]
