"""One graph for the step, no break in it, no recompilation after the first text: for every attention and cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diff_transformer.model.heads import ATTENTIONS

# By case: how many graphs it takes. A sliding window is one step before and one after it is full. DINT has no cache,
# and transformers compiles only with a static one.
CASES = {
    **{attention: int(attention != "dint") for attention in ATTENTIONS},
    "diff,sliding_window=6": 2,
    "softmax,sliding_window=6": 2,
}
QUICK = ("diff", "softmax")


def check(backend: str, *cases: str):
    command = [sys.executable, Path(__file__).with_name("run_compiled.py"), backend, *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-3000:]
    results = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))
    assert results == {case: {"graphs": CASES[case], "breaks": 0, "same": True} for case in cases}


def test_both_sides_of_the_pair_compile_to_one_graph():
    check("aot_eager", *QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_every_attention_and_cache(case):
    check("aot_eager", case)


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_generated_code_gives_the_same_tokens(case):
    check("inductor", case)
