"""``run_bench``: runs a benchmark, shows its rows as they come, and keeps the record as JSON."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from diff_transformer.bench.shapes import default_grid, parse_shapes
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
        ValueError: for an unknown name or device, or a malformed grid.
        FileExistsError: before anything runs, if ``out`` exists and ``overwrite`` is False.
        UserError: if the folder of ``out`` is not writable.
    """
    require_known("benchmark", name, BENCHMARKS)
    if grid is not None and name != "attention":
        raise UserError(f"grid gives shapes of the benchmark 'attention'; {name!r} has its own")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {device!r}, and PyTorch sees no CUDA device here; give device='cpu'")
    if grid is not None:
        parse_shapes(grid)
    out = out or Path("runs", "bench", f"{name}-{device}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    require_writable(out.parent)
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; choose another --out, or leave it out for a new file in runs/bench")
    with live_table(name) as show:
        record = _run(name, full, device, grid, {**options, "out": out, "on_row": show})
    print_failures(record)
    print(f"record: {out}")
    return record


def _run(name: str, full: bool, device: str, grid: str | None, options: dict) -> dict:
    cuda = torch.device(device).type == "cuda"
    if name == "attention":
        from diff_transformer.bench.attention import run_attention_benchmark

        shapes = default_grid(device, full) if grid is None else parse_shapes(grid)
        if cuda:
            options = {"dtypes": (torch.bfloat16,), "repeats": 20, "seconds_each": 0.5, **options}
        return run_attention_benchmark(shapes, device=device, **options)
    if name == "decode":
        from diff_transformer.bench import decode, generation

        shapes = (decode.GPU_GRID if full else decode.GPU_SHORT_GRID) if cuda else decode.CPU_GRID
        models = generation.GPU_MODELS if cuda else generation.CPU_MODELS
        options = {"dtypes": (torch.bfloat16,) if cuda else (torch.float32, torch.bfloat16), **options}
        return decode.run_decode_benchmark(shapes, models, device=device, **options)
    if name == "step":
        from diff_transformer.bench import step

        return step.run_step_benchmark(step.GPU_SETTINGS if cuda else step.CPU_SETTINGS, device=device, **options)
    from diff_transformer.bench import throughput

    settings = throughput.GPU_SETTINGS if cuda else throughput.CPU_SETTINGS
    return throughput.run_throughput_benchmark(settings, device=device, **options)


TITLES = {
    "attention": "time over that of softmax attention with twice the heads",
    "decode": "one query over a cache; time over that of softmax attention with twice the heads",
    "throughput": "tokens a second, and over the Transformer's",
    "step": "a training step, and where its time goes",
}
COLUMNS = {
    "attention": ("who", "", "B, h, N, d", "fwd", "bwd", "both", "ms", "peak", "MB"),
    "decode": ("who", "", "B, h/g, S, d", "ratio", "us", "GB/s", "copy", "tokens/s"),
    "throughput": ("who", "", "B, N, layers", "fwd+bwd", "ratio", "MFU", "prefill", "ratio", "MFU"),
    "step": (
        "who",
        "",
        "B, N, layers",
        "ms",
        "tokens/s",
        "ratio",
        "MFU",
        "attention",
        "norm",
        "RoPE",
        "W_QKVO",
        "MLP",
        "output",
        "AdamW",
        "data",
        "other",
    ),
}
WIDTH = 120  # characters, if the output is not a terminal
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
    for i, column in enumerate(COLUMNS[name]):
        table.add_column(column, no_wrap=True, justify="left" if i < 3 else "right")

    def show(row: dict) -> None:
        faint = "dim" if row.get("role") == "baseline" or row.get("side") == "softmax" else ""
        table.add_row(*cells(name, row), style="red" if row.get("gate", "").startswith("failed") else faint)

    try:
        with Live(table, console=console, vertical_overflow="visible"):
            yield show
    finally:
        console.print()  # ends the table's last line, also before an error message


def cells(name: str, row: dict) -> list[str]:
    """The cells of a row, as text."""
    make = {"attention": _attention, "decode": _decode, "throughput": _throughput, "step": _step}[name]
    return make(row)


def print_failures(record: dict) -> None:
    """Print the full messages of failed and skipped gates."""
    for row in record["rows"]:
        if row.get("gate", "").startswith(("failed", "skipped")):
            size = ", ".join(str(row[k]) for k in ("batch", "heads", "length", "cache", "width") if k in row)
            print(f"{row['backend']} {row['dtype']} {size}: {row['gate']}")
    if "unfinished" in record:
        print(record["unfinished"])


def _attention(row: dict) -> list[str]:
    shape = ", ".join(str(row[k]) for k in ("batch", "heads", "length", "width"))
    first = [_who(row), DTYPES[row["dtype"]], shape + ("" if row["causal"] else " full")]
    if "forward_ms" not in row:
        return [*first, row["gate"].split(":")[0]]
    ratios = [_number(row, f"{kind}_ratio", 2) for kind in ("forward", "backward", "both")]
    ms = _number(row, "both_ms" if "both_ms" in row else "forward_ms", 2)
    return [*first, *ratios, ms, _percent(row, "both_share"), f"{row['peak_bytes'] / 2**20:.0f}"]


def _decode(row: dict) -> list[str]:
    if row["kind"] == "model":
        who = f"{row['model']} {row['side']}, {row['layers']} of {row['layers_of_preset']} layers{_compiled(row)}"
        rates = [_number(row, "ratio", 2), "", "", "", f"{row['tokens_per_second']:,.0f}"]
        return [who, DTYPES[row["dtype"]], f"{row['batch']}, {row['cache']}", *rates]
    size = f"{row['batch']}, {row['heads']}/{row['kv_heads']}, {row['cache']}, {row['width']}"
    if "us" not in row:
        return [_who(row), DTYPES[row["dtype"]], size, row["gate"].split(":")[0]]
    rate = [_number(row, "ratio", 2), _number(row, "us", 1), _number(row, "gb_per_s", 0), _percent(row, "copy_share")]
    return [_who(row), DTYPES[row["dtype"]], size, *rate]


def _throughput(row: dict) -> list[str]:
    size = f"{row['batch']}, {row['length']}, {row['layers']} of {row['layers_of_preset']}"
    rates = []
    for kind in ("forward_backward", "prefill"):
        rates += [f"{row[f'{kind}_tokens_per_second']:,.0f}", _number(row, f"{kind}_ratio", 3)]
        rates.append(_percent(row, f"{kind}_mfu"))
    return [f"{row['model']} {row['side']}{_compiled(row)}", DTYPES[row["dtype"]], size, *rates]


def _step(row: dict) -> list[str]:
    size = f"{row['batch']}, {row['length']}, {row['layers']} of {row['layers_of_preset']}"
    rates = [f"{row['step_ms']:.1f}", f"{row['tokens_per_second']:,.0f}", _number(row, "ratio", 3)]
    shares = [_percent(row["shares"], part) for part in row["shares"]]
    return [f"{row['model']} {row['side']}", DTYPES[row["dtype"]], size, *rates, _percent(row, "mfu"), *shares]


def _compiled(row: dict) -> str:
    return ", compiled" if row.get("compiled") else ""


def _who(row: dict) -> str:
    """The contender's name; a default is named with the kernel that ran."""
    kernel = row.get("sdpa")
    return row["backend"] if kernel is None or "[" in row["backend"] else f"{row['backend']} = {kernel}"


def _number(row: dict, key: str, digits: int) -> str:
    return "-" if row.get(key) is None else f"{row[key]:.{digits}f}"


def _percent(row: dict, key: str) -> str:
    return "-" if row.get(key) is None else f"{100 * row[key]:.0f} %"
