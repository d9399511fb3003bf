"""The self-test of the Hopper kernels in a subprocess; scripts stand in for a subprocess with a GPU."""

import json
import sys
import threading

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton's Gluon")
from diff_transformer.ops.gluon import self_test, verify
from diff_transformer.ops.triton.metadata import SERIALIZED

CPU = torch.device("cpu")
READY, WRONG, RIGHT = (
    "print('{\"ready\": true}', flush=True)",
    'print(\'{"fault": "out is off"}\')',
    "print('{\"fault\": null}')",
)


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Have these lines of Python run as the child; gives the file in which it says what it was given."""
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    seen = tmp_path / "seen"
    note = f"import os, sys, time; open({str(seen)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')"

    def become(*lines):
        self_test.fault_found.cache_clear()
        monkeypatch.setattr(self_test, "COMMAND", (sys.executable, "-c", "\n".join([note, *lines])))
        return seen

    yield become
    self_test.fault_found.cache_clear()
    self_test.untried.clear()


def found(**options):
    return self_test.fault_found(CPU, 128, torch.bfloat16, True, **options)


def test_a_verdict_is_asked_for_once_on_a_machine(child, caplog):
    seen = child(READY, RIGHT)
    with caplog.at_level("INFO", logger="diff_transformer"):
        assert found() is found() is None
        self_test.fault_found.cache_clear()  # as in the next process
        assert found() is None
    assert seen.read_text() == "forward 128 bfloat16 causal cpu\n"
    what = "the Hopper attention kernel (forward, 128, bfloat16, causal) on cpu"
    assert [record.message for record in caplog.records] == [
        f"trying {what} in a process of its own: up to a minute, once on this machine",
        *[f"{what} agrees with the reference and is used"] * 2,
    ]
    assert found(kernels="two_pass") is None
    assert seen.read_text().splitlines()[1:] == ["two_pass 128 bfloat16 causal cpu"]


def test_wrong_kernels_stay_out(child, caplog):
    seen = child(READY, WRONG)
    assert found() == "out is off"
    child(READY, RIGHT)
    assert found() == "out is off"
    assert len(seen.read_text().splitlines()) == 1
    assert "is not used, plain Triton is: out is off" in caplog.text


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([READY, "os.kill(os.getpid(), 11)"], "its process was lost: exit status -11: "),
        ([READY, "sys.exit('illegal address')"], "its process was lost: exit status 1: illegal address"),
    ],
)
def test_a_kernel_that_takes_its_process_with_it_is_not_launched_again(child, lines, said):
    child(*lines)
    assert found() == said
    child(READY, RIGHT)
    assert found() == said


def test_where_nothing_could_be_tried_the_next_process_tries_again(child):
    child("sys.exit('all CUDA devices are busy')")
    assert found() == found() == "it could not be tried: exit status 1: all CUDA devices are busy"
    child(READY, RIGHT)
    assert found() is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([READY, "os.kill(os.getpid(), 9)"], "exit status -9: "),  # as the kernel does when memory runs out
        ([READY, "time.sleep(600)"], "it has not ended after 2 s: "),
        ([READY, 'print(\'{"not_tried": "OutOfMemoryError: 2 GiB"}\')'], "OutOfMemoryError: 2 GiB"),
        (["sys.exit('busy or unavailable')"], "exit status 1: busy or unavailable"),
    ],
)
def test_what_need_not_be_the_kernels_fault_is_not_kept(child, monkeypatch, lines, said):
    monkeypatch.setattr(self_test, "SECONDS", 2.0)
    child(*lines)
    assert found() == f"it could not be tried: {said}"
    child(READY, RIGHT)
    assert found() is None


def test_processes_that_waited_share_an_attempt(child):
    """Eight ranks do not wait for eight time-outs, one after the other."""
    seen = child("time.sleep(1)", "sys.exit('all CUDA devices are busy')")
    form = ("forward", "128", "bfloat16", "causal")
    path = self_test.record(CPU, form)
    reasons = []

    def rank():
        try:
            self_test._kept(lambda: path, lambda: self_test.run_test("it", (*form, "cpu")))
        except self_test.NotTried as reason:
            reasons.append(str(reason))

    ranks = [threading.Thread(target=rank) for _ in range(8)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert reasons == ["exit status 1: all CUDA devices are busy"] * 8
    assert len(seen.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        verify.NotTried("it has not ended after 20 s"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_child_says_that_it_came_to_no_verdict(monkeypatch, capsys, error):
    def fails(*args, **lengths):
        raise error

    monkeypatch.setattr(verify, "compare", fails)
    monkeypatch.setattr(self_test.os, "_exit", lambda status: None)
    self_test.main(["forward", "128", "bfloat16", "causal", "cpu"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"ready": True}
    assert list(lines[1]) == ["not_tried"]
    assert str(error) in lines[1]["not_tried"]


def test_no_process_can_be_started(child, monkeypatch, tmp_path):
    child()
    monkeypatch.setattr(self_test, "COMMAND", (str(tmp_path / "missing"),))
    assert found().startswith("it could not be tried: no process can be started: ")


def test_a_folder_that_cannot_be_written_costs_a_trial_each_process(child, monkeypatch, tmp_path):
    seen = child(READY, RIGHT)
    (tmp_path / "file").touch()
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "file"))
    assert found() is None
    self_test.fault_found.cache_clear()
    assert found() is None
    assert len(seen.read_text().splitlines()) == 2


def test_no_home_folder_costs_a_trial_each_process(child, monkeypatch):
    seen = child(READY, RIGHT)

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(self_test, "cache_folder", unknown)
    assert found() is None
    assert len(seen.read_text().splitlines()) == 1


def test_a_full_disk_costs_no_more(child, monkeypatch):
    def full(path, text):
        raise OSError("No space left on device")

    monkeypatch.setattr(self_test, "write_whole", full)
    child(READY, WRONG)
    assert found() == "out is off"


def test_what_else_a_child_prints_does_not_matter(child):
    child("print('{a debugging line')", READY, "print('{}')", RIGHT)
    assert found() is None


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_a_damaged_record_is_made_anew(child, text):
    child(READY, RIGHT)
    path = self_test.record(CPU, ("forward", "128", "bfloat16", "causal"))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert found() is None
    assert json.loads(path.read_text()) == {"fault": None}


def test_another_gpu_or_version_is_another_record(child, monkeypatch):
    import triton

    form = ("forward", "128", "bfloat16", "causal")
    first = self_test.record(CPU, form)
    monkeypatch.setattr(triton, "__version__", "9.9")
    assert self_test.record(CPU, form) != first


def test_the_child_itself_without_a_gpu(monkeypatch, tmp_path):
    """Here a kernel cannot be launched, and that is the verdict."""
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    self_test.fault_found.cache_clear()
    fault = self_test.fault_found(CPU, 128, torch.float16, False, "two_pass")
    self_test.fault_found.cache_clear()
    assert "Error: " in fault
    assert not fault.startswith(("it could not be tried", "its process was lost"))


@pytest.mark.parametrize(
    ("printed", "fault"), [("ptxas info: Used 168 registers", "null"), (SERIALIZED, '"it serialises its wgmma')]
)
def test_the_child_reads_what_ptxas_says(monkeypatch, capsys, printed, fault):
    def right(*form):
        print(printed)

    monkeypatch.setattr(self_test, "fault_of", right)
    monkeypatch.setattr(self_test.os, "_exit", lambda status: None)
    self_test.main(["forward", "128", "bfloat16", "causal", "cpu"])
    assert capsys.readouterr().out.startswith('{"ready": true}\n{"fault": ' + fault)
