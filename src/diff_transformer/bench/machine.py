"""What a GPU's number depends on: the card, its clocks, and the versions of what computes."""

import gc
import importlib.util
import subprocess

import psutil
import torch

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
        "flash_attn": version_of("flash_attn"),
        "nvidia_smi": smi(),
    }


def free_memory(device: str | torch.device) -> int:
    """Free bytes: of a CUDA device, after PyTorch has given back what it only kept; else of the machine."""
    gc.collect()
    if torch.device(device).type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def version_of(module: str) -> str | None:
    """The version of a package, None where it is not installed."""
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
