"""A benchmark's record: its rows, the machine they were measured on, and the time left.

The file is rewritten after every row, so an interrupted run keeps what it has.
"""

import gc
import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from diff_transformer.bench.timing import on_device
from diff_transformer.durable import write_whole
from diff_transformer.evals.provenance import provenance

QUERY = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def machine(device: str) -> dict:
    """Name, memory, driver, clocks and library versions of a CUDA device; {} for any other."""
    if torch.device(device).type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version_of("triton"),
        "nvidia_smi": smi(),
    }


def free_memory(device: str | torch.device) -> int:
    """Free bytes of a CUDA device, after PyTorch has released its cache; for the CPU, of the machine."""
    gc.collect()
    if torch.device(device).type != "cuda":
        return available_memory()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def available_memory() -> int:
    """Bytes that the machine can give without swapping; all of its memory where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def version_of(module: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
        return getattr(importlib.import_module(module), "__version__", "unknown")
    except (ImportError, ValueError):
        return None


def smi() -> dict[str, str]:
    """Driver, clocks in MHz, power limit in W and temperature in °C, as nvidia-smi reports them now; {} without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(",") if done.stdout.strip() else []
    return {name: value.strip() for name, value in zip(QUERY, values, strict=False)}


class Deadline:
    """A time limit from now; ``seconds=None`` is no limit."""

    def __init__(self, seconds: float | None = None):
        self.end = None if seconds is None else time.monotonic() + seconds

    def passed(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end


def in_turn(work: Sequence[tuple[str, Callable[[], Iterable[dict]]]], seconds: float | None) -> Iterator[dict]:
    """The rows of each piece of ``work``. None begins after ``seconds``; {"unfinished": ...} then has their names."""
    deadline = Deadline(seconds)
    for i, (_, rows) in enumerate(work):
        if deadline.passed():
            yield {"unfinished": f"out of time before {', '.join(name for name, _ in work[i:])}"}
            return
        yield from rows()


def collect(
    benchmark: str,
    rows: Iterator[dict],
    facts: dict,
    *,
    out: Path | None = None,
    on_row: Callable[[dict], None] | None = None,
) -> dict:
    """Collect a generator of rows, run on facts["device"], to {"benchmark": name, "rows": [...], "provenance": {...}}.

    {"unfinished": reason} is not a row: it sets the record's field of that name. ``out`` is written after every row.
    """
    record: dict = {"benchmark": benchmark, "rows": [], "provenance": provenance(**facts)}
    save(record, out)
    with on_device(facts.get("device", "cpu")):
        for row in rows:
            if "unfinished" in row:
                record["unfinished"] = row["unfinished"]
            else:
                record["rows"].append(row)
                if on_row is not None:
                    on_row(row)
            save(record, out)
    return record


def save(record: dict, out: Path | None) -> None:
    """Write the record atomically; do nothing where ``out`` is None."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(record, indent=1) + "\n")
