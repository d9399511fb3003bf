"""bf16 on the CPU: chunks of keys, blocks, threads, and processors with tiles (AMX) and without.

Where the processor has no tiles, the same tests are of the form without.
"""

import platform

import pytest
import torch

from diff_transformer.ops import diff_attention
from diff_transformer.ops.cpu import build, native
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler with OpenMP on this machine")


def gradients(function, x, options):
    out = function(*x, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return (out, *torch.autograd.grad(out, x, dout))


def assert_good(x, options):
    exact = gradients(lambda *y, **more: diff_attention(*y, backend="reference", **more), x.to(torch.float64), options)
    eager = gradients(eager_diff_attention, x, options)
    ours = gradients(lambda *y, **more: diff_attention(*y, backend="blockwise", **more), x, options)
    for name, value, right, usual in zip(("out", *x._fields), ours, exact, eager, strict=True):
        assert_within_budget(value, right, usual, what=name)


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


@pytest.mark.parametrize("case", LONG)
def test_several_chunks_of_keys(case):
    sizes, options = LONG[case]
    x = make_inputs(**{"B": 1, "H": 2, "D": 32, **sizes}, dtype=torch.bfloat16)
    if case == "the largest score last":
        with torch.no_grad():  # what was summed before has to shrink to almost nothing
            x.k1[..., -1, :], x.k2[..., 600, :] = 8 * x.q1[:, :1, 5], 8 * x.q2[:, :1, 9]
    assert_good(x, options)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "window": 30}, {}], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [8, 40, 256])
@pytest.mark.parametrize(("B", "G"), [(1, 1), (3, 3)])
def test_blocks_and_threads(monkeypatch, options, threads, rows, B, G):
    monkeypatch.setattr(native, "MAX_SINGLE_THREAD_WORK", 0)
    monkeypatch.setattr(native, "block_rows", lambda T, measured: rows)
    torch.set_num_threads(threads)
    try:
        assert_good(make_inputs(B=B, H=6, Hn=3, G=G, T=163, S=190, D=8, dtype=torch.bfloat16), options)
    finally:
        torch.set_num_threads(1)


def test_equal_maps_cancel_exactly():
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    out = diff_attention(x.q1, x.q1, x.k1, x.k1, x.v, 1.0, is_causal=True, backend="blockwise")
    assert not out.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_hidden(value):
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    x.q1[0, 0, 5] = value
    out = diff_attention(*x, is_causal=True, backend="blockwise")
    assert out[0, 0, 5].isnan().all()
    assert out.isnan().sum() == x.v.shape[-1]


def test_row_of_nan_beneath_a_mask_that_hides_all_else():
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    x.k1[0, 0, 590] = float("nan")
    out = diff_attention(*x, attn_mask=hidden_keys(600, (0, 590), (591, 600)), backend="blockwise")
    assert out[0, 0].isnan().all()


needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the flags are of x86 compilers, and so are tiles"
)


@pytest.fixture
def without_tiles(monkeypatch, tmp_path):
    """A system that does not hand out tiles: the library is built once more, without."""
    load, asked = build._load, []

    def refusing(command, flags):
        path, library = load(command, flags)
        asked.append(flags)
        if flags == build.FLAGS:
            monkeypatch.setattr(library, "diff_attention_ready", lambda: False)
        return path, library

    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_load", refusing)
    build.library.cache_clear(), native.in_tiles.cache_clear()
    yield asked
    build.library.cache_clear(), native.in_tiles.cache_clear()


@needs_x86
def test_without_permission_for_tiles_bf16_goes_on(without_tiles):
    assert not native.in_tiles()
    assert without_tiles == [build.FLAGS, build.WITHOUT_TILES]
    assert_good(make_inputs(T=163, dtype=torch.bfloat16), {"is_causal": True})


def test_which_form_runs_is_told(caplog):
    build.library.cache_clear()
    try:
        with caplog.at_level("INFO", logger="diff_transformer"):
            build.library()
        assert ("in tiles" in caplog.text) is native.in_tiles()
    finally:
        build.library.cache_clear()
