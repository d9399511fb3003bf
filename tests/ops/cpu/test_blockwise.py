"""The custom operator: PyTorch's own checks, torch.compile, memory, FLOPs; test_libraries.py has the numbers."""

import pytest
import torch

from diff_transformer.ops import cpu, diff_attention
from diff_transformer.ops.call import OPERANDS, check
from diff_transformer.ops.cpu import kernel, library
from diff_transformer.testing import assert_within_budget, make_inputs, peak_memory

pytestmark = pytest.mark.skipif(not library.available(), reason="the CPU kernel is not built on this machine")

OPCHECKS = [
    {},
    {"is_causal": True, "window": 3},
    {"attn_mask": torch.rand(1, 1, 7, 9) > 0.3},
]


@pytest.mark.parametrize("options", OPCHECKS, ids=lambda options: ", ".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(options, dtype):
    x = make_inputs(H=4, Hn=2, G=1, T=7, S=9, D=3, Dv=5, dtype=dtype)
    operands = check(*x, **options)[:OPERANDS]
    torch.library.opcheck(cpu.forward, operands)
    detached = [y.detach() if isinstance(y, torch.Tensor) else y for y in operands]
    torch.library.opcheck(cpu.backward, (torch.randn(2, 4, 7, 5).to(dtype), *detached))


def test_compiles_for_lengths_not_known_beforehand():
    compiled = torch.compile(
        lambda *x: diff_attention(*x, is_causal=True), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for T in (63, 111):
        x = make_inputs(T=T, requires_grad=False)
        assert torch.equal(compiled(*x), diff_attention(*x, is_causal=True))


def test_compiles_for_scales_not_known_beforehand():
    compiled = torch.compile(lambda *x, scale: diff_attention(*x, scale=scale), fullgraph=True, backend="aot_eager")
    x = make_inputs(T=5, requires_grad=False)
    for scale in (0.2, 0.3, 0.4):
        assert torch.equal(compiled(*x, scale=scale), diff_attention(*x, scale=scale))


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
    ("T", "D", "window", "threads", "rows"),
    [(2048, 64, None, 2, 64), (8192, 128, None, 2, 128), (8192, 128, 1024, 2, 64), (8192, 128, None, 32, 64)],
)
def test_blocks_are_larger_where_keys_come_from_memory(monkeypatch, T, D, window, threads, rows):
    """Not with a window that leaves few keys, nor with so many threads that large blocks would leave some idle."""
    monkeypatch.setattr(kernel, "second_level_cache", lambda: 2**19)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, v = torch.empty(1, 1, T, D, device="meta"), torch.empty(1, 1, T, 2 * D, device="meta")
    assert kernel.forward_rows(q, q, v, window) == rows
    assert kernel.backward_rows(q, q, q, v, window) == rows
