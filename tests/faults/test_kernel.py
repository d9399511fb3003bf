"""The CPU kernel: built with the compiler's sanitizers, over random odd shapes; killed builds; libraries of others."""

import ctypes
import hashlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diff_transformer.ops.cpu import build

pytestmark = pytest.mark.faults
CALLS = 300
LOADED = 20
KILLS = 12
SANITIZERS = {"address": "AddressSanitizer", "undefined": "UndefinedBehaviorSanitizer"}

# Draws calls of the operator (forward, backward, decoding) and compares each with the reference.
DRIVER = """
import random, sys, torch
from diff_transformer import diff_attention
from diff_transformer.ops.cpu.build import library
from diff_transformer.testing import assert_within_budget, eager_diff_attention
assert library() is not None, "no native library"
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
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" -g -fsanitize={kind} -fno-sanitize-recover=all\n')
    compiler.chmod(0o755)
    library = {"address": "libasan.so", "undefined": "libubsan.so"}[kind]
    found = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True).stdout.strip()
    environment = {
        **os.environ, "CXX": str(compiler), "DIFF_TRANSFORMER_CACHE": str(tmp_path / "cache"), "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    command = [sys.executable, "-c", DRIVER, str(CALLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-5000:]
    assert f"calls: {CALLS}" in done.stdout
    reliability("CPU kernel under sanitizers", SANITIZERS[kind], {"no finding, and equal to the reference": CALLS})


LOADS = """
import logging, sys
from diff_transformer.ops.cpu.build import library
logging.basicConfig(level=logging.INFO)
assert library() is not None
"""
FOREIGN = '#include <fcntl.h>\n__attribute__((constructor)) void run() { open("%s", O_CREAT | O_WRONLY, 0600); }'
EXCHANGE = """
import ctypes, os, sys
os.setgid(65534); os.setuid(65534)
exchange, mine, theirs = ctypes.CDLL(None).renameat2, sys.argv[1].encode(), sys.argv[2].encode()
while True:
    exchange(-100, mine, -100, theirs, 2)  # AT_FDCWD, RENAME_EXCHANGE
"""


def loads(cache: Path, **environment) -> str:
    """What a process says that loads the library from this cache."""
    given = {**os.environ, "DIFF_TRANSFORMER_CACHE": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", LOADS], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of other users")
def test_a_library_of_another_user(tmp_path, reliability):
    """The cache folder is another user's, who exchanges the private folder in it for one of his, all the time."""
    compiler, cache, sprung = tmp_path / "compiler", tmp_path / "theirs", tmp_path / "sprung"
    built = tmp_path / "built.so"
    build.build(build.compiler(), built)
    with built.open("r+b") as file:
        file.truncate(built.stat().st_size - build.DIGEST_BYTES)
    compiler.write_text(
        f'#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\ncp "{built}" "$out"\n'
    )
    compiler.chmod(0o755)
    for folder in (*reversed(tmp_path.parents), tmp_path)[-3:]:
        folder.chmod(0o755)
    cache.mkdir(mode=0o777)
    mine, foreign = cache / f"native-{os.geteuid()}", cache / "foreign"
    path = build.identity(str(compiler))
    for folder in (mine, foreign):
        folder.mkdir(mode=0o700)
    (mine / f"native-{path}.so").write_bytes(built.read_bytes() + hashlib.sha256(built.read_bytes()).digest())
    (mine / f"native-{path}.so").chmod(0o700)
    made = tmp_path / "foreign.so"
    (tmp_path / "foreign.c").write_text(FOREIGN % sprung)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(tmp_path / "foreign.c")], check=True)
    (foreign / f"native-{path}.so").write_bytes(made.read_bytes() + hashlib.sha256(made.read_bytes()).digest())
    for one in (cache, foreign, *foreign.iterdir()):
        os.chown(one, 65534, 65534)
    command = [sys.executable, "-c", EXCHANGE, str(mine), str(foreign)]
    exchanging = subprocess.Popen(command)
    try:
        for _ in range(LOADED):
            said = loads(cache, CXX=str(compiler))
            assert exchanging.poll() is None
            assert not sprung.exists(), "foreign code ran"
            assert "compiled in each process, because" in said, said
    finally:
        exchanging.kill()
        exchanging.wait()
    ctypes.CDLL(str(made))
    assert sprung.exists(), "this library would have shown itself"
    outcome = "said, and compiled in a private folder; nothing of theirs ran"
    reliability("Hostile files", "a cache folder of another user, who exchanges the kernels in it", {outcome: LOADED})


def test_kills(tmp_path, reliability):
    """kill -9 of processes that compile, in a cache folder and (every other time) in a temporary one."""
    draw, shared, hit = random.Random(7), tmp_path / "shared", 0
    shared.mkdir()
    shared.chmod(0o777)
    places = [tmp_path / "cache", tmp_path / "temporary"]
    for place in places:
        place.mkdir()
    for kill in range(KILLS):
        given = {**os.environ, "DIFF_TRANSFORMER_CACHE": str(shared if kill % 2 else places[0])}
        process = subprocess.Popen([sys.executable, "-c", LOADS], env={**given, "TMPDIR": str(places[1])})
        end = time.monotonic() + 60
        while not compiling(places):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(4 * draw.random())
        hit += bool(compiling(places))
        process.kill()
        process.wait()
        end = time.monotonic() + 10
        while compiling(places) or [*places[1].iterdir(), *places[0].glob("native-*/*-building-*")]:
            assert time.monotonic() < end, (compiling(places), [*tmp_path.rglob("*")])
            time.sleep(0.05)
    assert hit > KILLS / 2
    assert "native form" in loads(places[0])
    assert "each process" not in loads(places[0])
    reliability(
        "kill -9 at random moments, then `--resume`", "a process that compiles the CPU kernel",
        {"the compiler ends, its folder is gone, and the next process compiles": KILLS},
    )  # fmt: skip


def compiling(places: list[Path]) -> list[str]:
    """The processes that compile in one of these places."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [text] if any(str(place) in text for place in places) else []
    return found
