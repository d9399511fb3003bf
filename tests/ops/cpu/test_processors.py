"""The native library as older x86 processors get it: with AVX2, and with SSE alone."""

from pathlib import Path

import pytest
import torch

from diff_transformer.ops import diff_attention
from diff_transformer.ops.cpu import build, native
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

INFO = Path("/proc/cpuinfo")
SHAPES = ({"T": 163, "D": 24, "Dv": 40}, {"T": 300, "H": 6, "Hn": 2, "G": 1, "D": 64})
ABLE = "avx2" in INFO.read_text() if INFO.exists() else False

pytestmark = pytest.mark.skipif(
    native.library() is None or not ABLE, reason="needs an x86 processor with AVX2, Linux and a C++ compiler"
)


@pytest.fixture(scope="module", params=["x86-64-v3", "x86-64-v2"])
def processor(request, tmp_path_factory):
    flags = tuple(f"-march={request.param}" if flag == "-march=native" else flag for flag in build.FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", flags)
        patch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        forget()
        try:
            assert build.library() is not None
            yield request.param
        finally:
            forget()


def forget():
    """What is known of the processor."""
    for known in (build.library, native.available_multiplies, native._fastest_multiply):
        known.cache_clear()


def gradients(function, x, **options):
    out = function(*x, is_causal=True, **options)
    return (out, *torch.autograd.grad(out, x, torch.ones_like(out)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients(processor, dtype, shape):
    assert native.available_multiplies() == ("fp32",)
    x = make_inputs(**shape, dtype=dtype)
    exact = gradients(diff_attention, x.to(torch.float64), backend="reference")
    eager = gradients(eager_diff_attention, x)
    ours = gradients(diff_attention, x, backend="blockwise")
    for name, value, right, usual in zip(("out", *x._fields), ours, exact, eager, strict=True):
        assert_within_budget(value, right, usual, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_maps_cancel_exactly(processor, dtype):
    x = make_inputs(T=600, dtype=dtype, requires_grad=False)
    assert not diff_attention(x.q1, x.q1, x.k1, x.k1, x.v, 1.0, is_causal=True, backend="blockwise").any()


def test_one_query_over_a_cache(processor):
    x = make_inputs(T=1, S=300, requires_grad=False)
    exact = diff_attention(*x.to(torch.float64), is_causal=True, backend="reference")
    ours = diff_attention(*x, is_causal=True, backend="blockwise")
    assert_within_budget(ours, exact, eager_diff_attention(*x, is_causal=True))


def test_a_number_is_broadcast_by_one_instruction(tmp_path):
    flags = [flag for flag in build.FLAGS if flag not in ("-march=native", "-shared")]
    made = tmp_path / "native.s"
    command = [build.compiler(), *flags, "-march=x86-64-v3", "-S", str(build.SOURCE), "-o", str(made)]
    assert build.run_compiler(command, tmp_path) is None
    text = made.read_text()
    assert text.count("vinsertps") < text.count("vfmadd") / 10  # a broadcast by inserts triples the time of a product
