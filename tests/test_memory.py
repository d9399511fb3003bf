"""Freed memory is kept by processes that ask for it."""

import platform
import subprocess
import sys

import pytest

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


def run(ask):
    command = [sys.executable, "-c", PROGRAM.format(ask=ask)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    said, faults = printed.split()
    return said == "True", int(faults)


@glibc
def test_pages_are_taken_from_the_system_once():
    said, kept = run("keep_freed_memory()")
    assert said
    assert kept < 0.5 * run("None")[1]  # small allocations may take a piece of what was freed: then the next one is new


def test_no_such_library(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
