import subprocess
from types import SimpleNamespace

import torch

from diff_transformer.bench import record


def test_a_gpu_is_described(monkeypatch):
    properties = SimpleNamespace(
        name="A GPU", major=9, minor=0, multi_processor_count=132, total_memory=100, L2_cache_size=50
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    answer = SimpleNamespace(stdout="580.1, 1980, 3201, 1980, 120.50, 700.00, 41\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: answer)
    found = record.machine("cuda")
    assert found["gpu"] == "A GPU"
    assert found["capability"] == "9.0"
    assert found["nvidia_smi"]["driver_version"] == "580.1"
    assert found["nvidia_smi"]["clocks.sm"] == "1980"
    assert found["nvidia_smi"]["temperature.gpu"] == "41"
    assert {"triton", "cudnn", "cuda"} <= found.keys()
    assert record.machine("cpu") == {}


def test_without_nvidia_smi(monkeypatch):
    def missing(*args, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert record.smi() == {}
