"""The CPU kernel in each library that this processor runs; the choice of a library; the build.

A slow test computes with tiles (AMX) that are emulated, on processors without them.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from operator_cases import by, eager, in_fp64, run

from diff_transformer.errors import UserError
from diff_transformer.ops import available_backends, diff_attention
from diff_transformer.ops.cpu import kernel, library
from diff_transformer.testing import assert_within_budget, make_inputs

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/diff_transformer/ops/cpu/native.cpp"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-w", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
USABLE = [name for name, flags in library.LIBRARIES.items() if flags <= library.processor_flags()]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def forget():
    library.library.cache_clear()


@pytest.fixture(params=[name for name in USABLE if library.path_of(name).exists()])
def name(request, monkeypatch):
    """Computes with each library that this processor runs."""
    monkeypatch.setattr(library, "LIBRARIES", {request.param: library.LIBRARIES[request.param]})
    forget()
    if library.library() is None:
        pytest.skip("Linux grants this process no tiles")
    yield request.param
    forget()


def assert_good(x, options):
    """In fp32 too the eager error is the yardstick: rows are long."""
    exact, usual = in_fp64(x, options), run(eager, x, options)
    for what, value in run(by("blockwise"), x, options).items():
        assert_within_budget(value, exact[what], usual[what], what=what)


def hidden_keys(S, *ranges):
    mask = torch.ones(1, 1, 1, S, dtype=torch.bool)
    for first, last in ranges:
        mask[..., first:last] = False
    return mask


LONG = {
    "causal": ({"T": 1100}, {"is_causal": True}),
    "full": ({"T": 600, "S": 1111}, {}),
    "window": ({"T": 1100}, {"is_causal": True, "window": 300}),
    "longer cache": ({"T": 300, "S": 1300}, {"is_causal": True}),
    "more queries than keys": ({"T": 700, "S": 540}, {"is_causal": True}),
    "a chunk hidden": ({"T": 530, "S": 1100}, {"attn_mask": hidden_keys(1100, (0, 512), (600, 1020))}),
    "the largest score last": ({"T": 64, "S": 1100}, {}),
    "shared noise, grouped keys": ({"T": 530, "H": 6, "Hn": 2, "G": 1}, {"is_causal": True}),
    "wide": ({"T": 530, "D": 128, "Dv": 256}, {"is_causal": True}),
    "odd widths": ({"T": 530, "D": 33, "Dv": 41}, {"is_causal": True}),
}


def assert_good_in_chunks(case, dtype):
    sizes, options = LONG[case]
    x = make_inputs(**{"B": 1, "H": 2, "D": 32, **sizes}, dtype=dtype)
    if case == "the largest score last":
        with torch.no_grad():  # earlier sums have to shrink to almost nothing
            x.k1[..., -1, :], x.k2[..., 600, :] = 8 * x.q1[:, :1, 5], 8 * x.q2[:, :1, 9]
    assert_good(x, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", LONG)
def test_several_chunks_of_keys(name, case, dtype):
    assert_good_in_chunks(case, dtype)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "window": 30}, {}], ids=str)
@pytest.mark.parametrize("rows", [8, 40, 128])
@pytest.mark.parametrize(("B", "G", "threads"), [(1, 1, 3), (3, 3, 1)])
def test_blocks_and_threads(name, monkeypatch, options, threads, rows, B, G):
    """Few key/value heads are packed once for all threads; of many, each thread packs its own."""
    monkeypatch.setattr(kernel, "MAX_SINGLE_THREAD_WORK", 0)
    monkeypatch.setattr(kernel, "block_rows", lambda *sizes: rows)
    torch.set_num_threads(threads)
    try:
        assert_good(make_inputs(B=B, H=6, Hn=3, G=G, T=163, S=190, D=8, dtype=torch.bfloat16), options)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("T", [1, 2, 4, 5])
def test_a_few_queries_over_a_cache(name, T):
    """Up to 8 rows that share a key head pack nothing."""
    mask = hidden_keys(111, (0, 40)).expand(2, -1, -1, -1).clone()
    mask[0] = True
    for D, Dv in ((16, 32), (24, 40), (33, 7)):
        for options in ({"is_causal": True}, {"is_causal": True, "window": 30}, {}):
            x = make_inputs(B=2, H=4, Hn=2, G=2, T=T, S=111, D=D, Dv=Dv)
            assert_good(x, options)
            assert_good(x, {**options, "attn_mask": mask})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_maps_cancel_exactly(name, dtype):
    x = make_inputs(T=600, dtype=dtype, requires_grad=False)
    assert not diff_attention(x.q1, x.q1, x.k1, x.k1, x.v, 1.0, is_causal=True, backend="blockwise").any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_hidden(name, value):
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    x.q1[0, 0, 5] = value
    out = diff_attention(*x, is_causal=True, backend="blockwise")
    assert out[0, 0, 5].isnan().all()
    assert out.isnan().sum() == x.v.shape[-1]


def test_row_of_nan_beneath_a_mask_that_hides_all_else(name):
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    x.k1[0, 0, 590] = float("nan")
    out = diff_attention(*x, attn_mask=hidden_keys(600, (0, 590), (591, 600)), backend="blockwise")
    assert out[0, 0].isnan().all()


# The choice of a library.


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """``processor(*names)``: a processor that runs these libraries, all of which are built."""

    def of(*names: str):
        flags = frozenset().union(*(library.LIBRARIES[each] for each in names))
        monkeypatch.setattr(library, "processor_flags", lambda: flags)
        monkeypatch.setattr(library, "path_of", lambda each: SOURCE.with_name(each) if each == "missing" else SOURCE)
        monkeypatch.setattr(library, "load", lambda path: object())
        monkeypatch.delenv(library.SWITCH, raising=False)
        forget()

    yield of
    forget()


@pytest.mark.parametrize(
    ("runs", "expected"), [(("amx",), "amx"), (("bf16",), "bf16"), (("v4",), "v4"), (("v3",), "v3"), ((), None)]
)
def test_the_best_library_of_the_processor_is_loaded(processor, caplog, runs, expected):
    processor(*runs)
    with caplog.at_level("INFO", "diff_transformer"):
        assert (library.library() is not None) == (expected is not None)
    said = f"CPU kernel {expected}" if expected else "no CPU kernel on this machine"
    assert caplog.messages == [f"blockwise: {said}"]


def test_another_value_of_the_switch_is_refused(processor, monkeypatch):
    processor("v4")
    monkeypatch.setenv(library.SWITCH, "v4")
    with pytest.raises(UserError, match=r"NATIVE is 'v4'; give 0, or leave it out$"):
        library.library()


def test_without_a_library_sdpa_serves(monkeypatch):
    monkeypatch.setenv(library.SWITCH, "0")
    forget()
    try:
        assert "blockwise" not in available_backends("cpu", torch.float32)
        x = make_inputs(T=5, requires_grad=False)
        assert torch.equal(diff_attention(*x), diff_attention(*x, backend="sdpa"))
        with pytest.raises(UserError, match="available: DIFF_TRANSFORMER_NATIVE=0 turns its kernel off; give"):
            diff_attention(*x, backend="blockwise")
    finally:
        forget()


# The build.


@needs_compiler
def test_a_number_is_broadcast_by_one_instruction(tmp_path):
    assembly = tmp_path / "native.s"
    subprocess.run(["g++", *FLAGS, "-march=x86-64-v3", "-S", str(SOURCE), "-o", str(assembly)], check=True)
    text = assembly.read_text()
    assert text.count("vinsertps") < text.count("vfmadd") / 10  # a broadcast by inserts triples the time of a product


@pytest.mark.slow  # compiles
@needs_compiler
def test_tiles_that_are_emulated(monkeypatch, tmp_path):
    """The library "amx" with its instructions as functions."""
    if "bf16" not in USABLE:
        pytest.skip("needs AVX512-BF16, which every processor with tiles has")
    emulation = ("-include", str(Path(__file__).with_name("emulated_tiles.h")))
    target = tmp_path / "native.so"
    march = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
    subprocess.run(["g++", *FLAGS, *march, *emulation, "-shared", str(SOURCE), "-o", str(target)], check=True)
    emulated = library.declare(ctypes.CDLL(str(target)))
    monkeypatch.setattr(kernel, "library", lambda: emulated)
    for case in LONG:
        assert_good_in_chunks(case, torch.bfloat16)
    for T in (1, 40, 163):
        assert_good(make_inputs(B=1, H=6, Hn=3, G=1, T=T, S=190, D=24, dtype=torch.bfloat16), {"is_causal": True})
    test_equal_maps_cancel_exactly("amx", torch.bfloat16)
    test_nan_and_infinity_are_not_hidden("amx", float("nan"))
    test_row_of_nan_beneath_a_mask_that_hides_all_else("amx")


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("compiler", [True, False])
def test_a_wheel_holds_the_libraries_and_is_built_without_a_compiler_too(compiler, tmp_path):
    if compiler and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    copy = tmp_path / "source"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for each in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "docs/package.md"):
        (copy / each).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / each, copy / each)
    environment = {**os.environ, **({} if compiler else {"CXX": "no-such-compiler"})}
    options = ("--no-deps", "--no-build-isolation", "-v", "-w", str(tmp_path))
    command = [sys.executable, "-m", "pip", "wheel", ".", *options]
    built = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    libraries = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".cpp", ".h"))}
    expected = {f"diff_transformer/ops/cpu/native_{name}.so" for name in library.LIBRARIES} if compiler else set()
    assert libraries == expected
    assert "-py3-none-" in wheel.name
    assert ("backend='sdpa' serves" in built.stdout + built.stderr) is not compiler
