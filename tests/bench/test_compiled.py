"""The record of the compiled GPU kernels has the tiles that ship, and none that must not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="it is about Triton kernels")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import compiled

    return compiled


KEYS = """
import compiled, json
print(json.dumps([[compiled.key(*each) for each in compiled.wanted_of(of)] for of in compiled.CAPABILITIES]))
"""


def test_the_record_is_of_the_kernels_and_tiles_that_ship(compiled):
    """If it fails: python benchmarks/compiled.py. The interpreter's kernels have no digest of their source."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = json.loads(subprocess.check_output([sys.executable, "-c", KEYS], cwd=BENCHMARKS, env=environment))
    rows = json.loads(compiled.OUT.read_text())["rows"]
    other = {"triton": "", "source": ""} if rows[0]["triton"] != triton.__version__ else {}
    for capability, keys in zip(compiled.CAPABILITIES, found, strict=True):
        recorded = [{name: row[name] for name in keys[0]} for row in rows if row["capability"] == capability]
        assert [made | other for made in recorded] == [made | other for made in keys]


def test_no_kernel_of_the_record_spills_repeats_products_or_does_not_fit(compiled):
    rows = json.loads(compiled.OUT.read_text())["rows"]
    assert [row for row in rows if compiled.unfit(row)] == []


@pytest.mark.parametrize(
    ("change", "unfit"),
    [
        ({}, False),
        ({"executed_over_needed": 1.2}, True),
        ({"faults": ["spills 8 bytes a thread"], "spilled_bytes": 8}, True),
        ({"dtype": "float32", "faults": ["spills 8 bytes a thread"], "spilled_bytes": 8}, False),
        ({"dtype": "float32", "spilled_bytes": 48}, True),
        ({"dtype": "float32", "shared_kib": 228.0}, True),
    ],
)
def test_what_must_not_ship(compiled, change, unfit):
    row = {"capability": 90, "dtype": "bfloat16", "width": 128, "language": "triton", "form": "backward", "faults": []}
    row |= {"executed_over_needed": 1.0, "spilled_bytes": 0, "shared_kib": 100.0}
    assert compiled.unfit(row | change) == unfit
