"""The custom operator: PyTorch's own checks, torch.compile, memory, chunks and blocks of every size."""

import pytest
import torch

from diff_transformer.ops import blockwise, diff_attention
from diff_transformer.testing import assert_within_budget, make_inputs, peak_memory

OPCHECKS = [
    {},
    {"is_causal": True, "window": 3},
    {"attn_mask": torch.rand(1, 1, 7, 9) > 0.3},
]


@pytest.mark.parametrize("options", OPCHECKS, ids=lambda options: ", ".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(options, dtype):
    x = make_inputs(H=4, Hn=2, G=1, T=7, S=9, D=3, Dv=5, dtype=dtype)
    rest = (options.get("attn_mask"), options.get("is_causal", False), options.get("window"), 0.5)
    torch.library.opcheck(blockwise.forward, (*x, *rest))
    detached = [y.detach() for y in x]
    torch.library.opcheck(blockwise.backward, (torch.randn(2, 4, 7, 5).to(dtype), *detached, *rest))


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"attn_mask": torch.rand(1, 1, 63, 63) > 0.3}], ids=["causal", "mask"]
)
@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
def test_compiles_into_one_graph(backend, options):
    x = make_inputs(H=4, G=2, T=63)

    def loss(*x):
        return diff_attention(*x, backend=backend, **options).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*x), x)
    for value, exact in zip(torch.autograd.grad(compiled(*x), x), expected, strict=True):
        assert_within_budget(value, exact)


def test_compiles_for_lengths_not_known_beforehand():
    compiled = torch.compile(
        lambda *x: diff_attention(*x, is_causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for T in (63, 111):
        x = make_inputs(T=T, requires_grad=False)
        assert torch.equal(compiled(*x), diff_attention(*x, is_causal=True))


@pytest.mark.slow
def test_compiles_with_inductor():
    x = make_inputs(T=63)
    compiled = torch.compile(lambda *x: diff_attention(*x, is_causal=True).square().sum(), fullgraph=True)
    expected = torch.autograd.grad(diff_attention(*x, is_causal=True).square().sum(), x)
    for value, exact in zip(torch.autograd.grad(compiled(*x), x), expected, strict=True):
        assert_within_budget(value, exact)


def test_memory_grows_with_the_length_not_its_square():
    def peak(backend, T):
        x = make_inputs(B=1, H=1, T=T, D=8)
        return peak_memory(lambda: diff_attention(*x, is_causal=True, backend=backend).sum().backward())

    assert peak("reference", 2048) > 3.5 * peak("reference", 1024)
    assert peak("blockwise", 8192) < 2.2 * peak("blockwise", 4096)
    assert peak("blockwise", 8192) < peak("reference", 2048) / 2


def test_only_inputs_are_saved_for_backward():
    x = make_inputs(T=111)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        diff_attention(*x, is_causal=True)
    assert sum(t.numel() for t in saved) <= sum(t.numel() for t in x)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"is_causal": True, "window": 30}, {}], ids=["causal", "window", "full"]
)
@pytest.mark.parametrize("room", [1, 2**13, 2**15, 2**20])
@pytest.mark.parametrize("rows", [1, 7, 32, 200])
def test_result_does_not_depend_on_blocks_and_chunks(monkeypatch, options, room, rows):
    x = make_inputs(B=3, H=12, Hn=6, G=3, T=63, S=90, D=8)
    exact = diff_attention(*x, backend="reference", **options)
    exact_gradients = torch.autograd.grad(exact.square().sum(), x)
    monkeypatch.setattr(blockwise, "ROOM", room)
    monkeypatch.setattr(blockwise, "rows_of_a_block", lambda T, D, dtype: rows)
    out = diff_attention(*x, backend="blockwise", **options)
    assert_within_budget(out, exact)
    for value, gradient in zip(torch.autograd.grad(out.square().sum(), x), exact_gradients, strict=True):
        assert_within_budget(value, gradient)


def test_repeats_bit_for_bit():
    x = make_inputs(T=300)
    first, second = (torch.autograd.grad(diff_attention(*x, is_causal=True).square().sum(), x) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_in_an_input_is_not_hidden():
    x = make_inputs(T=63, requires_grad=False)
    x.q1[0, 0, 5] = float("nan")
    out = diff_attention(*x, is_causal=True, attn_mask=torch.ones(63, 63, dtype=torch.bool))
    assert out[0, 0, 5].isnan().all()
    assert out.isnan().sum() == 32
