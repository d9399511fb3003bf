"""Where a number comes from: versions, machine, commit. Read without touching installed-package metadata."""

import datetime
import os
import platform
import subprocess
from pathlib import Path


def provenance(**settings) -> dict:
    """Versions, processor, threads, commit and date as strings and numbers, with ``settings`` added."""
    import torch
    import transformers

    import diff_transformer

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "package_version": diff_transformer.__version__,
        "commit": commit(),
        "device": device,
        "cpu": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **settings,
    }


def processor() -> str:
    """The processor's name, its family and model (a virtual machine may hide which it is), and the number of cores."""
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().split("\n\n")[0].splitlines())
        facts = {key.strip(): value.strip() for key, _, value in lines}
        name = facts.get("model name", name)
        if "cpu family" in facts:
            name += f" (family {facts['cpu family']}, model {facts.get('model')})"
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit of the source tree this package runs from, or "unknown" outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
