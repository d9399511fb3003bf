"""Several training processes on this machine (gloo, CPU), and whether they train as one does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diff_transformer.train.metrics import read_metrics

WORKER = Path(__file__).with_name("parallel_worker.py")
STRATEGIES = {
    "ddp": ["train.parallel.strategy=ddp"],
    "fsdp": ["train.parallel.strategy=fsdp"],
    "tp": ["train.parallel.tensor_parallel=2"],
    "context": ["train.parallel.context_parallel=2"],
    "hsdp": ["train.parallel.replicas=2"],
    "fsdp and tp": ["train.parallel.strategy=fsdp", "train.parallel.tensor_parallel=2"],
}
SECONDS = 1000  # for all jobs of a group of processes; a few, but on a machine that is busy with other things
LOSS, NORM = 1e-5, 1e-3  # absolute, relative


def run_together(tmp_path: Path, jobs: list[dict], processes: int = 2) -> tuple[list[list], list[int], str]:
    """The errors of each rank's jobs, exit codes, and the output; the processes run all jobs, one after another."""
    path = tmp_path / f"jobs{processes}.json"
    path.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes), "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(path)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    results = [Path(f"{path}.{rank}") for rank in range(processes)]
    raised = [json.loads(result.read_text()) if result.exists() else [] for result in results]
    return raised, [process.returncode for process in started], "\n".join(printed)


def logged(folder: Path, name: str) -> list:
    return [line[name] for line in read_metrics(folder / "metrics.jsonl") if name in line]


def assert_same_training(folder: Path, expected: Path):
    """Losses, and what is logged of the model: Adam would hide a gradient that is wrong by a factor."""
    assert len(logged(expected, "loss")) == 20
    for name in ("loss", "validation_loss"):
        assert logged(folder, name) == pytest.approx(logged(expected, name), abs=LOSS, rel=0), (folder.name, name)
    for name in ("grad_norm_by_part", "lambda", "head_norm_gain"):
        pairs = zip(logged(folder, name), logged(expected, name), strict=True)
        assert all(found == pytest.approx(wanted, rel=NORM, abs=1e-7) for found, wanted in pairs), (folder.name, name)


def job(folder: Path, settings: list[str], **more) -> dict:
    return {"folder": str(folder), "set": settings, **more}
