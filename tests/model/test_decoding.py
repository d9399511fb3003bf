"""Cached decoding in one call of the CPU kernel equals the modules, and is left to them where it must be."""

from dataclasses import replace

import pytest
import torch

from diff_transformer.model.attention import DiffAttention
from diff_transformer.model.heads import CORES
from diff_transformer.ops.cpu import decode
from diff_transformer.ops.cpu.library import available
from diff_transformer.testing import assert_within_budget

pytestmark = pytest.mark.skipif(not available(), reason="the CPU kernel is not built on this machine")

VARIANTS = {
    "diff": {"head_norm_init": 0.7},
    "plain norm": {"head_norm": "no_weight"},
    "no norm": {"head_norm": False},
    "diff_v2": {"attention": "diff_v2"},
    "diff_v3": {"attention": "diff_v3"},
    "diff_v3, norm": {"attention": replace(CORES["diff_v3"], head_norm="weighted", head_norm_init=0.7)},
    "diff_v2, gate": {"attention": replace(CORES["diff_v2"], gate="result")},
    "grouped_diff": {"attention": "grouped_diff", "num_heads": 8, "num_key_value_heads": 4},
}


@pytest.fixture
def calls(monkeypatch):
    """One entry for each call of the kernel."""
    made, check = [], decode.check
    monkeypatch.setattr(decode, "check", lambda status: made.append(1) or check(status))
    return made


def make(dtype, num_heads=4, num_key_value_heads=2, **settings):
    torch.manual_seed(0)
    layer = DiffAttention(
        64, num_heads, num_key_value_heads=num_key_value_heads, head_dim=24, layer_index=2, **settings
    )
    for parameter in layer.core.parameters():
        torch.nn.init.normal_(parameter, mean=0.3, std=0.4)
    return layer.to(dtype).requires_grad_(False).eval()


def rows_of(dtype, T):
    """Hidden states of T queries, and of 31 keys."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, length, 64, generator=generator).to(dtype) for length in (T, 31)]


def modules_alone(compute, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "available", lambda: False)
        return compute(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_equals_the_modules(variant, T, dtype, calls):
    layer = make(dtype, **VARIANTS[variant])
    hidden, memory = rows_of(dtype, T)
    with torch.no_grad():
        fused = layer(hidden, memory)[0]
        assert len(calls) == 1
        eager = modules_alone(layer, hidden, memory)[0]
        exact = modules_alone(layer.double(), hidden.double(), memory.double())[0]
    assert len(calls) == 1
    assert_within_budget(fused, exact, eager)


@pytest.mark.parametrize("variant", ["diff", "diff_v2", "diff_v3"])
def test_the_modules_run_where_they_have_to(variant, calls):
    layer, (hidden, memory) = make(torch.float32, **VARIANTS[variant]), rows_of(torch.float32, 1)
    core = layer.core

    def fused():
        before = len(calls)
        layer(hidden, memory)
        return len(calls) > before

    assert fused()
    attend = core.attend
    core.attend = lambda *args, **options: attend(*args, **options)  # as an evaluation looks inside
    assert not fused()
    del core.attend
    if core.head_norm is not None:
        handle = core.head_norm.register_forward_hook(lambda *_: None)
        assert not fused()
        handle.remove()
    core.requires_grad_(True)
    assert not fused()
    with torch.no_grad():
        assert fused()
        core.backend = "reference"
        assert not fused()


@pytest.mark.parametrize("T", [1, 8])  # of which the kernel takes the first
def test_lambda_is_computed_once(T, calls):
    layer, (hidden, memory), seen = make(torch.float32, attention="diff_v2"), rows_of(torch.float32, T), []
    layer.core.lam.register_forward_hook(lambda *_: seen.append(1))
    layer(hidden, memory)
    assert (len(seen), len(calls)) == (1, T == 1)
