"""The script for a GPU machine: every stage runs, dry, on the CPU; none takes another down."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import nullcontext
from pathlib import Path

import hopper_check
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def ends(folder):
    """How the stages ended."""
    return json.loads((folder / "stages.json").read_text())


@pytest.mark.slow
def test_dry_run_of_every_stage(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = ends(tmp_path)
    stages = ["hopper", "correctness", "attention", "decode", "decode_compiled", "throughput", "attention_fp32"]
    assert [(line["stage"], line["status"]) for line in summary] == [(stage, "done") for stage in stages]
    records = {stage: json.loads((tmp_path / f"{stage}.json").read_text()) for stage in stages}
    tried = [(row["form"], row["width"]) for row in records["hopper"]["rows"] if row["causal"]]
    assert tried == [("forward", 128), ("backward", 128)]
    tests = records["correctness"]["provenance"]["tests"].values()
    assert [(call["exit_status"], call["finished"]) for call in tests] == [(0, True), (0, True)]
    names = {row["backend"] for row in records["attention"]["rows"]}
    assert {"softmax", "softmax[cudnn]", "FlashDiffAttn_1", "FlashDiffAttn_2[cudnn]", "blockwise", "sdpa"} <= names
    assert {row["causal"] for row in records["attention"]["rows"]} == {True, False}
    assert {row["kind"] for row in records["decode"]["rows"]} == {"operator", "model"}
    assert [(row["batch"], row["compiled"]) for row in records["decode_compiled"]["rows"]] == [(1, True)] * 2 + [
        (2, True)
    ] * 2
    assert {row["side"] for row in records["throughput"]["rows"]} == {"softmax", "diff"}
    assert "decoding, DIFF / Transformer | ≥ 1 |  | not measured |" in done.stdout
    assert "blockwise bfloat16: batch 1" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"stages.json", *(f"{stage}.json" for stage in stages)}


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

    def unfinished(dry, seconds, out):
        child = subprocess.Popen(["sleep", "600"])
        out.write_text(json.dumps({"rows": [{"batch": 2, "backend": "a", "us": 0}], "child": child.pid}))
        raise gpu.gpu_records.Unfinished("out of time before the rest")

    stages = {"correctness": fine, "attention": broken, "hopper": killed, "decode": endless, "throughput": fine}
    stages["attention_fp32"] = unfinished
    monkeypatch.setattr(gpu_stages, "STAGES", stages)
    return gpu


def test_a_stage_that_breaks_or_dies_is_recorded_and_the_next_one_runs(gpu, tmp_path):
    stages = ["attention", "hopper", "correctness"]
    assert gpu.run_stages(stages, 60, True, tmp_path) == 1
    broken, killed, fine = ends(tmp_path)
    assert broken["status"] == "failed"
    assert broken["error"].endswith("ZeroDivisionError: oh no\n")
    assert (killed["status"], killed["error"]) == ("failed", "exit code -9")
    assert fine["status"] == "done"


def test_hopper_kernels_that_fail_fail_the_stage(gpu, tmp_path, monkeypatch):
    """A machine that cannot run them has not failed."""
    import gpu_stages

    wrong = ("forward", True)

    def check(device, dtype, causal, kernels):
        if (kernels, causal) == wrong:
            raise TimeoutError("it hangs")

    monkeypatch.setattr(hopper_check, "check", check)
    with pytest.raises(SystemExit, match=r"1 Hopper kernels fail, and are not used in what follows: see hopper\.json"):
        gpu_stages.hopper(True, 10, tmp_path / "hopper.json")
    rows = json.loads((tmp_path / "hopper.json").read_text())["rows"]
    said = {(row["form"], row["causal"]): row["gate"] for row in rows}
    assert said.pop(wrong) == "failed: TimeoutError: it hangs"
    assert set(said.values()) == {"passed"}
    monkeypatch.setattr(gpu_stages, "device_of", lambda dry: "cuda")
    monkeypatch.setattr("diff_transformer.bench.record.machine", lambda device: {})
    monkeypatch.setattr("diff_transformer.bench.record.on_device", lambda device: nullcontext())
    monkeypatch.setattr(gpu_stages, "unsupported_installation", lambda index: "too old")
    gpu_stages.hopper(True, 10, tmp_path / "old.json")
    rows = json.loads((tmp_path / "old.json").read_text())["rows"]
    assert [row["gate"] for row in rows] == ["failed: too old"] * 4


def test_later_stages_launch_hopper_kernels_only_if_they_passed_in_each_form(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv(gpu.SWITCH, "1")
    file, provenance = tmp_path / "hopper.json", {"forms": {"forward": 2, "backward": 2}}
    rows = [{"form": form, "gate": "passed"} for form in ("forward", "forward", "backward", "backward")]
    for found, allowed in (
        (rows, "1"),
        ([*rows[:3], rows[3] | {"gate": "failed: it is off by 1"}], "0"),
        (rows[:3], "0"),  # the stage was stopped before the last
    ):
        file.write_text(json.dumps({"rows": found, "provenance": provenance}))
        gpu.launch_only_what_passed(tmp_path)
        assert os.environ[gpu.SWITCH] == allowed
    gpu.launch_only_what_passed(tmp_path / "nowhere")
    assert os.environ[gpu.SWITCH] == "0"


def test_a_cache_of_compiled_kernels_is_unpacked_into_its_folder(gpu, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="its version is part of the key")
    folder = tmp_path / "cache"
    monkeypatch.setattr(gpu.gpu_cache, "FOLDER", folder)
    monkeypatch.setattr(gpu.gpu_cache, "KEY", folder / "key.json")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    folder.mkdir()
    with tarfile.open(tmp_path / "cache.tar.xz", "w:xz") as archive:
        for path, text in ((folder / "key.json", gpu.gpu_cache.key()), (folder / "a.cubin", "kernel")):
            path.write_text(text)
            archive.add(path)
    for path in (folder / "key.json", folder / "a.cubin"):
        path.unlink()
    assert "their keys are those of this Triton" in gpu.preflight(tmp_path / "cache.tar.xz")
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
    assert (folder / "a.cubin").read_text() == "kernel"
    monkeypatch.setattr(gpu.gpu_cache, "key", lambda: "another")
    assert "NOT found, made by" in gpu.preflight(tmp_path / "cache.tar.xz")


CACHE = """
import pathlib, sys, gpu_cache
folder = pathlib.Path(sys.argv[1])
gpu_cache.FOLDER, gpu_cache.KEY = folder, folder / "key.json"
if __name__ == "__main__":
    sys.exit(gpu_cache.main([sys.argv[2], "--jobs", "1", "--limit", "1", "--only", sys.argv[3]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "least"), [("hopper", 5), ("model,decode test", 20)])
def test_what_a_gpu_launches_is_found_without_one(tmp_path, calls, least):
    """Every decision falls as on a Hopper GPU; one kernel of them is compiled, under the key that a launch looks up."""
    pytest.importorskip("triton", reason="it compiles")
    script, archive = tmp_path / "cache.py", tmp_path / "cache.tar.xz"
    script.write_text(CACHE)
    paths = os.pathsep.join(str(ROOT / name) for name in ("src", "benchmarks"))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "folder"), str(archive), calls],
        env=environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [int(count) for count in re.findall(r": (\d+) kernels, ", done.stdout)]
    assert found[-1] >= least
    with tarfile.open(archive) as held:
        names = [Path(name).name for name in held.getnames()]
    assert "key.json" in names
    assert sum(name.endswith(".cubin") for name in names) == 1


def ended(process):
    """True if a process that was killed is gone; the system may take a moment."""
    state, until = Path(f"/proc/{process}/stat"), time.monotonic() + 10
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_a_stage_that_runs_out_is_stopped_with_all_it_started(gpu, tmp_path):
    began = time.monotonic()
    assert gpu.run_stages(["decode", "throughput"], 3, True, tmp_path) == 1
    assert time.monotonic() - began < 20
    stopped, fine = ends(tmp_path)
    assert stopped["status"] == "stopped"
    assert fine["status"] == "done"
    left = json.loads((tmp_path / "decode.json").read_text())
    share = gpu.SHARES["decode"] / (gpu.SHARES["decode"] + gpu.SHARES["throughput"])
    assert left["soft"] == pytest.approx(gpu.SOFT * 3 * share, rel=0.1)
    assert ended(left["child"])


def test_a_stage_that_did_not_get_to_all_is_not_done(gpu, tmp_path):
    assert gpu.run_stages(["attention_fp32"], 60, True, tmp_path) == 1
    (stage,) = ends(tmp_path)
    assert (stage["status"], stage["error"]) == ("unfinished", "out of time before the rest")
    assert ended(json.loads((tmp_path / "attention_fp32.json").read_text())["child"])


def test_tests_that_are_stopped_are_unfinished(gpu, monkeypatch, tmp_path):
    import gpu_stages

    monkeypatch.setattr(gpu_stages, "DRY_TESTS", {"endless": ["--version"]})
    monkeypatch.setattr(gpu_stages.sys, "executable", tmp_path / "sleep")
    (tmp_path / "sleep").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "sleep").chmod(0o700)
    with pytest.raises(gpu.gpu_records.Unfinished, match="not all tests ran: endless"):
        gpu_stages.correctness(True, 1.0, tmp_path / "correctness.json")
    tests = json.loads((tmp_path / "correctness.json").read_text())["provenance"]["tests"]
    assert (tests["endless"]["finished"], tests["endless"]["exit_status"]) == (False, None)


def test_kernels_are_compiled_for_every_width_form_and_stride(gpu):
    import gpu_stages

    shapes = gpu_stages.compiled_shapes()
    wanted = {(s.width, s.heads, s.causal) for s in gpu_stages.operator_shapes()}
    assert {(s.width, s.heads, s.causal) for s in shapes if s.length == 128} == wanted
    assert {(s.width, s.heads, s.causal) for s in shapes if s.length % 16} == wanted


def test_unknown_stages_are_refused(gpu, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--stages", "decode,toaster"])
    assert "no stage 'toaster'; there are: hopper, correctness, attention, " in capsys.readouterr().err


def test_without_a_gpu_it_says_so(gpu, monkeypatch):
    import torch

    import gpu_stages

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device here; --dry runs every stage on the CPU"):
        gpu_stages.device_of(dry=False)
