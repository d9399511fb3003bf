"""A benchmark's record: its rows, the machine they were measured on, and the time left.

The file is rewritten after every row, so an interrupted run keeps what it has.
"""

import gc
import importlib.metadata
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
    """Free bytes of a CUDA device, after PyTorch has released its cache; of the machine for the CPU."""
    gc.collect()
    if torch.device(device).type != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def version_of(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
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


def in_turn(work: Sequence[tuple[str, Callable[[], Iterable[dict]]]], seconds: float | None) -> Iterator[dict]:
    """The rows of each piece of ``work``. None begins after ``seconds``; {"unfinished": ...} then has their names."""
    began = time.monotonic()
    for i, (_, rows) in enumerate(work):
        if seconds is not None and time.monotonic() - began >= seconds:
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
    _save(record, out)
    with on_device(facts.get("device", "cpu")):
        for row in rows:
            if "unfinished" in row:
                record["unfinished"] = row["unfinished"]
            else:
                record["rows"].append(row)
                if on_row is not None:
                    on_row(row)
            _save(record, out)
    return record


def _save(record: dict, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, json.dumps(record, indent=1) + "\n")
