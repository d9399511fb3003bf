"""Shared by every benchmark: its options, the machine it ran on, and its record of rows.

The record is rewritten after every row, so an interrupted run keeps what it has.
"""

import importlib.metadata
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diff_transformer.bench.timing import Times, interleaved_times, on_device
from diff_transformer.checks import require_positive
from diff_transformer.durable import write_whole
from diff_transformer.evals.provenance import provenance

QUERY = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")
Work = Sequence[tuple[str, Callable[[], Iterable[dict]]]]  # pieces of a benchmark: a name, and a generator of rows


@dataclass(frozen=True)
class Options:
    """Options of every benchmark.

    device: "cpu" or "cuda".
    repeats: turns.
    seconds: begin no new piece of work after this time; the record's field "unfinished" then names what is left.
    seconds_each: time limit of one function of one piece.
    out: JSON file, written after each row.
    on_row: receives each row.
    """

    device: str = "cpu"
    repeats: int = 7
    seconds: float | None = None
    seconds_each: float | None = None
    out: Path | None = None
    on_row: Callable[[dict], None] | None = None

    def __post_init__(self):
        require_positive(repeats=self.repeats, seconds=self.seconds, seconds_each=self.seconds_each)

    @property
    def cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def times(self, runs: dict, *, kernels: bool = False) -> dict[Any, Times]:
        """``interleaved_times`` of ``runs``."""
        return interleaved_times(runs, self.repeats, self.device, seconds=self.seconds_each, kernels=kernels)

    def collect(self, benchmark: str, work: Work, **facts) -> dict:
        """Run the pieces of ``work``; return {"benchmark": name, "rows": [...], "provenance": {...}}."""
        facts |= {"repeats": self.repeats, "device": self.device, "machine": machine(self.device)}
        record: dict = {"benchmark": benchmark, "rows": [], "provenance": provenance(**facts)}
        began = time.monotonic()
        self._save(record)
        with on_device(self.device):
            for i, (_, rows) in enumerate(work):
                if self.seconds is not None and time.monotonic() - began >= self.seconds:
                    record["unfinished"] = f"out of time before {', '.join(name for name, _ in work[i:])}"
                    break
                for row in rows():
                    record["rows"].append(row)
                    self._save(record)
                    if self.on_row is not None:
                        self.on_row(row)
        self._save(record)
        return record

    def _save(self, record: dict) -> None:
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.out, json.dumps(record, indent=1) + "\n")


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
        "triton": importlib.metadata.version("triton"),
        "nvidia_smi": smi(),
    }


def smi() -> dict[str, str]:
    """Driver, clocks in MHz, power in W and temperature in °C, as nvidia-smi reports them now; {} without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {name: value.strip() for name, value in zip(QUERY, output.split("\n")[0].split(","), strict=False)}
