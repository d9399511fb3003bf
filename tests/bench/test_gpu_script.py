"""The script for a GPU machine: every stage runs, dry, on the CPU; none takes another down."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def test_dry_run_of_every_stage(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    stages = ["correctness", "attention", "attention_slow", "decode", "throughput"]
    assert [(line["stage"], line["status"]) for line in summary] == [(stage, "done") for stage in stages]
    records = {stage: json.loads((tmp_path / f"{stage}.json").read_text()) for stage in stages}
    assert records["correctness"]["provenance"]["tests"]["exit_status"] == 0
    names = {row["backend"] for row in records["attention"]["rows"]}
    assert {"softmax", "softmax[cudnn]", "FlashDiffAttn_1", "FlashDiffAttn_2[cudnn]", "blockwise", "sdpa"} <= names
    assert {row["causal"] for row in records["attention"]["rows"]} == {True, False}
    assert {row["kind"] for row in records["decode"]["rows"]} == {"operator", "model"}
    assert {row["side"] for row in records["throughput"]["rows"]} == {"softmax", "diff"}
    assert "blockwise  bf16" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"summary.json", *(f"{stage}.json" for stage in stages)}


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module, with stages of our own."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu
    import gpu_stages

    def fine(dry, seconds, out):
        out.write_text("{}")

    def broken(dry, seconds, out):
        raise ZeroDivisionError("oh no")

    def killed(dry, seconds, out):
        os.kill(os.getpid(), signal.SIGKILL)

    def endless(dry, seconds, out):
        child = subprocess.Popen(["sleep", "600"])
        out.write_text(json.dumps({"child": child.pid, "soft": seconds}))
        child.wait()

    stages = {"correctness": fine, "attention": broken, "attention_slow": killed, "decode": endless, "throughput": fine}
    monkeypatch.setattr(gpu_stages, "STAGES", stages)
    return gpu


def test_a_stage_that_breaks_or_dies_is_recorded_and_the_next_one_runs(gpu, tmp_path):
    stages = ["attention", "attention_slow", "correctness"]
    assert gpu.run_stages(stages, 60, True, tmp_path) == 1
    broken, killed, fine = json.loads((tmp_path / "summary.json").read_text())
    assert broken["status"] == "failed"
    assert broken["error"].endswith("ZeroDivisionError: oh no\n")
    assert (killed["status"], killed["error"]) == ("failed", "exit code -9")
    assert fine["status"] == "done"
    assert (tmp_path / "correctness.json").exists()


def test_a_stage_that_runs_out_is_stopped_with_all_it_started(gpu, tmp_path):
    began = time.monotonic()
    assert gpu.run_stages(["decode", "throughput"], 3, True, tmp_path) == 1
    assert time.monotonic() - began < 20
    stopped, fine = json.loads((tmp_path / "summary.json").read_text())
    assert stopped["status"] == "stopped"
    assert fine["status"] == "done"
    left = json.loads((tmp_path / "decode.json").read_text())
    share = gpu.SHARES["decode"] / (gpu.SHARES["decode"] + gpu.SHARES["throughput"])
    assert left["soft"] == pytest.approx(gpu.SOFT * 3 * share, rel=0.1)
    state = Path(f"/proc/{left['child']}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_unknown_stages_are_refused(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--stages", "decode,toaster"])
    assert "no stage 'toaster'; there are: correctness, attention, " in capsys.readouterr().err


def test_without_a_gpu_it_says_so(gpu, monkeypatch):
    import torch

    import gpu_stages

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device here; --dry runs every stage on the CPU"):
        gpu_stages.device_of(dry=False)


def test_gates_find_a_wrong_backend(gpu, monkeypatch):
    import gpu_stages
    from diff_transformer.ops import blockwise

    verdicts = {(row["backend"], row["gate"]) for row in gpu_stages.gates(dry=True)}
    assert {("reference", "passed"), ("blockwise", "passed"), ("sdpa", "passed")} == verdicts
    attend = blockwise.attend
    monkeypatch.setattr(blockwise, "attend", lambda *args: attend(*args) * 1.1)
    wrong = [row["gate"] for row in gpu_stages.gates(dry=True) if row["backend"] == "blockwise"]
    assert all(gate.startswith("failed: out") for gate in wrong)


def test_shapes_of_the_goals_come_first(gpu):
    import gpu_stages

    shapes = gpu_stages.operator_shapes()
    assert {(s.length, s.width) for s in shapes[:6]} == {(n, d) for n in (4096, 2048) for d in (64, 96, 128)}
    assert {s.length for s in shapes} == {512, 1024, 2048, 4096, 8192, 16384, 32768}
