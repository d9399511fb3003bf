"""Freed memory is kept by the processes that ask for it, each of these a process of its own."""

import platform
import subprocess
import sys
from importlib import import_module

import pytest
from typer.testing import CliRunner

from diff_transformer.cli import app
from diff_transformer.memory import keep_freed_memory

# A tensor of 64 MB, made and freed over and over; prints what was said, and the page faults of the last turns.
PROGRAM = """
import resource
import torch
from diff_transformer.memory import keep_freed_memory

said = {ask}
faults = [0]
for _ in range(20):
    x = torch.ones(1 << 24)
    del x
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(said, faults[-1] - faults[5])
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")


def run(ask, **environment):
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-c"]
    printed = subprocess.run([*command, PROGRAM.format(ask=ask)], capture_output=True, text=True, check=True).stdout
    said, faults = printed.split()
    return said == "True", int(faults)


@glibc
def test_pages_are_taken_from_the_system_once():
    said, kept = run("keep_freed_memory()")
    assert said
    assert kept < 0.5 * run("None")[1]  # small allocations may take a piece of what was freed: then the next one is new


@glibc
def test_a_users_own_setting_is_left_alone():
    said, faults = run("keep_freed_memory()", MALLOC_MMAP_THRESHOLD_=65536)
    assert not said
    assert faults > 100


def test_no_such_library(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()


class Asked(Exception):
    """What ``keep_freed_memory`` raises here: the process has asked for it."""


def ask():
    raise Asked


@pytest.mark.parametrize("module", ["lab.worker"])
def test_processes_that_train_ask_for_it(monkeypatch, module):
    process = import_module(f"diff_transformer.{module}")
    monkeypatch.setattr(process, "keep_freed_memory", ask)
    with pytest.raises(Asked):
        process.main()


@pytest.mark.parametrize(
    "command",
    ["compare --out x", "train --out x", "eval needle --model debug --out x.json", "bench step", "generate x text"],
)
def test_commands_that_compute_ask_for_it(monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diff_transformer.memory.keep_freed_memory", ask)
    assert isinstance(CliRunner().invoke(app, command.split()).exception, Asked)
