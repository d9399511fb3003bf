import subprocess
from types import SimpleNamespace

import torch

from diff_transformer.bench import record
from diff_transformer.bench.record import Deadline
from diff_transformer.bench.timing import ceilings


def test_a_gpu_is_described(monkeypatch):
    properties = SimpleNamespace(
        name="A GPU", major=9, minor=0, multi_processor_count=132, total_memory=100, L2_cache_size=50
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    answer = SimpleNamespace(stdout="580.1, 1980, 3201, 1980, 700.00, 41\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: answer)
    found = record.machine("cuda")
    assert found["gpu"] == "A GPU"
    assert found["capability"] == "9.0"
    assert found["nvidia_smi"]["driver_version"] == "580.1"
    assert found["nvidia_smi"]["clocks.sm"] == "1980"
    assert {"triton", "cudnn", "cuda"} <= found.keys()
    assert record.machine("cpu") == {}


def test_without_nvidia_smi(monkeypatch):
    def missing(*args, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert record.smi() == {}


def test_versions():
    assert record.version_of("torch") == torch.__version__
    assert record.version_of("no_such_package_at_all") is None


def test_ceilings_count_operations_and_both_ways_of_a_copy(monkeypatch):
    from diff_transformer.bench import timing as measured
    from diff_transformer.bench.timing import Times

    monkeypatch.setattr(
        measured, "interleaved_times", lambda runs, *rest: {name: Times(0.5, 0.5, 0.5, (0.5,)) for name in runs}
    )
    found = ceilings("cpu", (torch.float32, torch.bfloat16), size=100, copied=10**9 // 2**10)
    assert found["matmul_tflops"] == {"float32": 4e-6, "bfloat16": 4e-6}
    assert found["copy_gb_per_s"] == round(2 * (10**9 // 2**10) / 0.5 / 1e9, 2)


def test_deadlines():
    assert not Deadline().passed()
    assert not Deadline(60).passed()
    assert Deadline(0).passed()
