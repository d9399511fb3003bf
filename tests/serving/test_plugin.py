"""The vLLM plugin's own code on fakes of vLLM's classes; tests/vllm runs it in vLLM."""

import importlib
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from diff_transformer import DiffTransformerConfig
from diff_transformer.model.attention import Attention
from diff_transformer.model.heads import CORES
from diff_transformer.model.inputs import Visible
from diff_transformer.serving.vllm.checks import check_parallel

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


class ColumnParallelLinear(torch.nn.Linear):
    def __init__(self, inputs, outputs, bias, quant_config, prefix):
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x):
        return super().forward(x), None


@pytest.fixture
def cores(monkeypatch):
    """``diff_transformer.serving.vllm.cores`` on fakes."""
    names = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.linear")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].ColumnParallelLinear = ColumnParallelLinear
    monkeypatch.delitem(sys.modules, "diff_transformer.serving.vllm.cores", raising=False)
    yield importlib.import_module("diff_transformer.serving.vllm.cores")
    sys.modules.pop("diff_transformer.serving.vllm.cores")


ATTENTIONS = [name for name in CORES if name != "dint"]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_core_finishes_the_heads_as_ours_does(cores, attention):
    """The result of vLLM's attention, A1 V and A2 V of each head, computed in full."""
    config = DiffTransformerConfig(**SIZES, attention=attention)
    torch.manual_seed(0)
    ours = Attention.from_config(config, 1)
    for parameter in ours.core.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    theirs = cores.core_of(config, 1, None, "core")
    theirs.load_state_dict(ours.core.state_dict(), strict=False)
    cores.finish(theirs)
    heads, x = config.heads, torch.randn(1, 5, 32)
    q, k, v = torch.randn(1, heads.queries, 5, 8), torch.randn(1, heads.keys, 5, 8), None
    v = torch.randn(1, heads.values, 5, heads.value_dim)
    if config.variant.maps == 1:
        maps = [(q, k)]
    else:
        q1, q2, k1, k2 = ours.core.split(q, k)
        maps = [(q1, k1), (q2, k2)]
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    outs = [sdpa(q, k, v)[0].transpose(0, 1) for q, k in maps]  # [T, h, dv]
    group = 1 if len(outs) == 1 else config.variant.signal_heads
    out = outs[0].unflatten(1, (-1, group))
    if len(outs) == 2:
        out = torch.cat((out, outs[1][:, :, None]), 2)
    expected = ours.core(q, k, v, Visible(), hidden_states=x)[0]
    torch.testing.assert_close(theirs(out.flatten(1, 2), x[0]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_core_is_whole_in_its_state_dict(cores, attention):
    """``--load-format sharded_state`` copies a state dict and never calls ``load_weights``."""
    norm = {"softmax_head_norm": attention == "softmax"}
    config = DiffTransformerConfig(**SIZES, attention=attention, **norm)
    torch.manual_seed(0)
    source, copy = (cores.core_of(config, 1, None, "core") for _ in range(2))
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    cores.finish(source)
    copy.load_state_dict(source.state_dict())
    out, hidden = torch.randn(5, config.heads.queries, config.heads.value_dim), torch.randn(5, 32)
    torch.testing.assert_close(copy(out, hidden), source(out, hidden), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("attention", "ranks", "fit"),
    [("diff", 3, "1, 2, 4"), ("diff_v2", 16, "1, 2, 4, 8"), ("grouped_diff", 2, "1")],
)
def test_a_refused_tensor_parallel_size_names_those_that_fit(attention, ranks, fit):
    heads = {"grouped_diff": (8, 2)}.get(attention, (8, 4))
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    config = DiffTransformerConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, attention=attention, **sizes)
    with pytest.raises(ValueError, match=f"sizes that fit: {fit}$"):
        check_parallel(config, ranks)
    for size in map(int, fit.split(", ")):
        check_parallel(config, size)
