"""bf16 on the CPU in each form that this processor has: chunks of keys, blocks, threads; and the choice of a form.

A slow test computes with tiles (AMX) that are emulated, on processors without them.
"""

from pathlib import Path

import pytest
import torch

from diff_transformer.ops import diff_attention, measuring
from diff_transformer.ops.cpu import build, native
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler with OpenMP on this machine")


@pytest.fixture(params=native.available_multiplies())
def form(request, monkeypatch):
    """Computes in each form that this processor has."""
    monkeypatch.setattr(native, "fastest_multiply", lambda direction, D: request.param)
    return request.param


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
def test_several_chunks_of_keys(form, case):
    assert_good_in_chunks(case)


def assert_good_in_chunks(case):
    sizes, options = LONG[case]
    x = make_inputs(**{"B": 1, "H": 2, "D": 32, **sizes}, dtype=torch.bfloat16)
    if case == "the largest score last":
        with torch.no_grad():  # what was summed before has to shrink to almost nothing
            x.k1[..., -1, :], x.k2[..., 600, :] = 8 * x.q1[:, :1, 5], 8 * x.q2[:, :1, 9]
    assert_good(x, options)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "window": 30}, {}], ids=str)
@pytest.mark.parametrize("rows", [8, 40, 128])
@pytest.mark.parametrize(("B", "G", "threads"), [(1, 1, 3), (3, 3, 1)])
def test_blocks_and_threads(form, monkeypatch, options, threads, rows, B, G):
    monkeypatch.setattr(native, "MAX_SINGLE_THREAD_WORK", 0)
    monkeypatch.setattr(native, "block_rows", lambda *sizes: rows)
    torch.set_num_threads(threads)
    try:
        assert_good(make_inputs(B=B, H=6, Hn=3, G=G, T=163, S=190, D=8, dtype=torch.bfloat16), options)
    finally:
        torch.set_num_threads(1)


def test_equal_maps_cancel_exactly(form):
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    out = diff_attention(x.q1, x.q1, x.k1, x.k1, x.v, 1.0, is_causal=True, backend="blockwise")
    assert not out.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_hidden(form, value):
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    x.q1[0, 0, 5] = value
    out = diff_attention(*x, is_causal=True, backend="blockwise")
    assert out[0, 0, 5].isnan().all()
    assert out.isnan().sum() == x.v.shape[-1]


def test_row_of_nan_beneath_a_mask_that_hides_all_else(form):
    x = make_inputs(T=600, dtype=torch.bfloat16, requires_grad=False)
    x.k1[0, 0, 590] = float("nan")
    out = diff_attention(*x, attn_mask=hidden_keys(600, (0, 590), (591, 600)), backend="blockwise")
    assert out[0, 0].isnan().all()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No verdict yet, as in the first process on a machine; gives the folder of verdicts."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(measuring.SWITCH, raising=False)
    monkeypatch.setattr(measuring, "_measurements", {})
    native._fastest_multiply.cache_clear()
    yield tmp_path / "cache" / "fastest"
    native._fastest_multiply.cache_clear()


@pytest.fixture
def times(fresh, monkeypatch):
    """Sets the seconds that a trial in each form takes; gives a function that sets them and returns the trials made."""
    made = []

    def trial(form, direction, D):
        made.append((form, direction, D))

    def set_times(**seconds):
        def clock(run):
            run()
            return seconds[made[-1][0]]

        monkeypatch.setattr(native, "_thread_clock", clock)
        return made

    monkeypatch.setattr(native, "trial", trial)
    monkeypatch.setattr(native, "available_multiplies", lambda: ("dpbf16", "fp32"))
    return set_times


def test_the_faster_form_is_chosen_for_each_width_and_direction_and_kept(fresh, times):
    trials = times(dpbf16=2e-3, fp32=1e-3)
    assert native.fastest_multiply("forward", 64) == native.fastest_multiply("forward", 33) == "fp32"
    times(dpbf16=1e-3, fp32=2e-3)
    assert native.fastest_multiply("forward", 64) == "fp32"
    assert native.fastest_multiply("backward", 64) == native.fastest_multiply("forward", 128) == "dpbf16"
    assert {trial[1:] for trial in trials} == {("forward", 64), ("backward", 64), ("forward", 128)}
    count = len(trials)
    native._fastest_multiply.cache_clear(), measuring._measurements.clear()  # the next process
    assert native.fastest_multiply("forward", 64) == "fp32"
    assert len(trials) == count
    assert len([*fresh.glob("*.json")]) == 3


@pytest.mark.usefixtures("fresh")
def test_a_thread_that_finds_another_measuring_tries_again_later(times):
    trials = times(dpbf16=2e-3, fp32=1e-3)
    with measuring._measuring:
        assert native.fastest_multiply("forward", 64) == "dpbf16", "the default"
    assert not trials
    assert native.fastest_multiply("forward", 64) == "fp32"


def test_nothing_is_measured_when_told_so_or_with_one_form(times, monkeypatch):
    trials = times(dpbf16=2e-3, fp32=1e-3)
    monkeypatch.setenv(measuring.SWITCH, "0")
    assert native.fastest_multiply("forward", 64) == "dpbf16"
    monkeypatch.setenv(measuring.SWITCH, "1")
    monkeypatch.setattr(native, "available_multiplies", lambda: ("fp32",))
    native._fastest_multiply.cache_clear()
    assert native.fastest_multiply("forward", 64) == "fp32"
    assert not trials


def test_the_chosen_form_computes(form, monkeypatch):
    x = make_inputs(T=163, D=64, dtype=torch.bfloat16, requires_grad=False)
    prepare, numbers = native.prepare, []
    monkeypatch.setattr(native, "prepare", lambda name, call: numbers.append(call.multiply) or prepare(name, call))
    diff_attention(*x, is_causal=True, backend="blockwise")
    assert numbers == [native.BF16_MULTIPLY[form]]


def test_a_trial_computes_in_each_form(fresh):
    forms = native.available_multiplies()
    assert forms[-1] == "fp32"
    for direction in ("forward", "backward"):
        for D in (16, 256):
            assert native.fastest_multiply(direction, D) in forms
    for verdict in measuring._measurements.values():
        assert set(verdict.milliseconds) == set(forms)
        assert 0 < min(verdict.milliseconds.values()) < 1000


@pytest.mark.slow  # compiles
def test_tiles_that_are_emulated(monkeypatch, tmp_path):
    """The form "amx" with the instructions as functions, and a system that does not hand out tiles."""
    if "dpbf16" not in native.available_multiplies():
        pytest.skip("needs AVX512-BF16, which every processor with tiles has")
    header = Path(__file__).with_name("emulated_tiles.h")
    flags = (*build.FLAGS, "-mno-amx-tile", "-mno-amx-bf16", "-include", str(header))
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path))
    _, library = build._load(build.compiler(), flags)
    if "amx" not in native.available_multiplies():  # the system refuses
        assert library.diff_attention_forms() == 0b110
    monkeypatch.setattr(native, "library", lambda: library)
    monkeypatch.setattr(native, "fastest_multiply", lambda direction, D: "amx")
    for case in LONG:
        assert_good_in_chunks(case)
    for T in (1, 40, 163):
        assert_good(make_inputs(B=1, H=6, Hn=3, G=1, T=T, S=190, D=24, dtype=torch.bfloat16), {"is_causal": True})
    test_equal_maps_cancel_exactly("amx")
    test_nan_and_infinity_are_not_hidden("amx", float("nan"))
    test_row_of_nan_beneath_a_mask_that_hides_all_else("amx")
