"""The CPU kernel, compiled with sanitizers, over random odd shapes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diff_transformer.ops import cpu

pytestmark = pytest.mark.faults
CALLS = 300
SANITIZERS = {"address": "AddressSanitizer", "undefined": "UndefinedBehaviorSanitizer"}

# Draws calls of the operator (forward, backward, decoding) and compares each with the reference.
DRIVER = """
import random, sys, torch
from pathlib import Path
from diff_transformer import diff_attention
from diff_transformer.ops.cpu import library
from diff_transformer.testing import assert_within_budget, eager_diff_attention
library.LIBRARIES, library.path_of = {"checked": frozenset()}, lambda name: Path(sys.argv[2])
assert library.library() is not None
draw, calls = random.Random(7), int(sys.argv[1])
torch.manual_seed(7)
torch.set_num_threads(2)
for call in range(calls):
    G, ways, shared, B = draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((1, 2))
    Hn = G * ways
    H = Hn * shared
    T, S = (draw.choice((1, 2, 3)), draw.randrange(1, 300)) if call % 3 == 0 else (draw.randrange(1, 140),) * 2
    if call % 5 == 4:
        S = T + draw.randrange(0, 90)
    D, Dv = draw.choice((1, 3, 8, 17, 32, 40, 63, 64, 96, 128, 129, 256)), draw.choice((1, 5, 16, 33, 64, 80, 127, 256))
    dtype = draw.choice((torch.float32, torch.bfloat16))
    def make(heads, length, width):
        room = torch.randn(B, length, heads, width + draw.choice((0, 3)), dtype=dtype)
        x = room[..., :width].transpose(1, 2) if draw.random() < 0.5 else room[..., :width].transpose(1, 2).contiguous()
        return x.requires_grad_()
    q1, q2, k1, k2, v = make(H, T, D), make(Hn, T, D), make(G, S, D), make(G, S, D), make(G, S, Dv)
    lam = torch.rand(H).requires_grad_()
    mask = draw.choice((None, torch.rand(T, S) < 0.7, torch.randn(B, 1, T, S)))
    options = {"is_causal": mask is None and draw.random() < 0.6, "attn_mask": mask}
    if options["is_causal"]:
        options["window"] = draw.choice((None, draw.randrange(1, S + 2)))
    tensors = (q1, q2, k1, k2, v)
    with torch.set_grad_enabled(call % 2 == 0):
        out = diff_attention(*tensors, lam, backend="blockwise", **options)
    if call % 2 == 0:
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.float().sum(), (*tensors, lam)))
    if mask is not None and mask.dtype != torch.bool:
        options["attn_mask"] = mask.double()
    exact = diff_attention(*(x.double() for x in tensors), lam.double(), backend="reference", **options)
    options["attn_mask"] = mask
    eager = eager_diff_attention(*tensors, lam.view(H, 1, 1), **options).nan_to_num()  # rows that see nothing: 0
    assert_within_budget(out, exact, None if dtype == torch.float32 else eager)
print("calls:", calls)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ with its sanitizers")
@pytest.mark.parametrize("kind", SANITIZERS)
def test_sanitizers(tmp_path, reliability, kind):
    target, source = tmp_path / "native.so", Path(cpu.__file__).with_name("native.cpp")
    flags = ("-O2", "-g", "-std=c++17", "-fPIC", "-shared", "-w", "-fopenmp", "-march=native")
    checks = (f"-fsanitize={kind}", "-fno-sanitize-recover=all")
    subprocess.run(["g++", *flags, *checks, str(source), "-o", str(target)], check=True)
    runtime = {"address": "libasan.so", "undefined": "libubsan.so"}[kind]
    preload = subprocess.run(["g++", f"-print-file-name={runtime}"], capture_output=True, text=True).stdout.strip()
    environment = {
        **os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    command = [sys.executable, "-c", DRIVER, str(CALLS), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-5000:]
    assert f"calls: {CALLS}" in done.stdout
    reliability("CPU kernel under sanitizers", SANITIZERS[kind], {"no finding, and equal to the reference": CALLS})
