"""Decoding on a GPU: half precision, CUDA graphs, and generation through the kernel."""

from typing import Any

import pytest
import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, diff_attention, diff_attention_decode
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

decode = pytest.importorskip("diff_transformer.ops.triton.decode", reason="the kernel is written in Triton")

pytestmark = pytest.mark.gpu

LENGTHS = [63, 1000, 16384]
SIZES: list[dict[str, Any]] = [
    {"D": 64},
    {"D": 96},
    {"D": 128},
    {"D": 24, "Dv": 41},
    {"D": 128, "H": 12, "Hn": 6, "G": 2, "T": 3},
    {"D": 64, "H": 32, "G": 2, "T": 8, "strided": True},
]


def inputs(dtype=torch.bfloat16, **sizes: Any):
    defaults: dict[str, Any] = {"B": 2, "H": 4, "T": 1, "D": 64, "device": "cuda", "requires_grad": False}
    return make_inputs(**(defaults | sizes), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_budget(dtype, S, sizes):
    x = inputs(dtype, S=S, **sizes)
    exact = diff_attention(*x.to(torch.float64), is_causal=True, backend="reference")
    eager = None if dtype == torch.float32 else eager_diff_attention(*x, is_causal=True)
    assert_within_budget(diff_attention_decode(*x, backend="triton"), exact, eager)


def test_budget_with_mask_window_and_lengths():
    x = inputs(T=3, S=1000, H=4, G=2)
    mask = torch.rand(2, 4, 3, 1000, device="cuda") > 0.3
    out = diff_attention_decode(*x, attn_mask=mask, window=300, backend="triton")
    exact = diff_attention(*x.to(torch.float64), attn_mask=mask, is_causal=True, window=300, backend="reference")
    eager = eager_diff_attention(*x, attn_mask=mask, is_causal=True, window=300)
    assert_within_budget(out, exact, eager)
    lengths = torch.tensor([1000, 257], dtype=torch.int32, device="cuda")
    out = diff_attention_decode(*x, lengths=lengths, backend="triton")
    for b, n in enumerate(lengths.tolist()):
        alone = type(x)(*(y[b : b + 1, :, :n] if i in (2, 3, 4) else y[b : b + 1] for i, y in enumerate(x)))
        exact = diff_attention(*alone.to(torch.float64), is_causal=True, backend="reference")
        assert_within_budget(out[b : b + 1], exact, eager_diff_attention(*alone, is_causal=True))


def test_offsets_beyond_32_bits():
    """A cache of 2.1e9 values a tensor: the last heads of the last batch entry lie beyond 2 ** 31."""
    B, G, S, D = 2, 8, 1_050_000, 128
    k = torch.randn(1, 1, S, D, device="cuda", dtype=torch.bfloat16).expand(B, G, S, D).contiguous()
    assert k.numel() > 2**31
    q1, q2 = torch.randn(2, B, G, 1, D, device="cuda", dtype=torch.bfloat16)
    out = diff_attention_decode(q1, q2, k, k, k, 0.5, backend="triton")
    last = [y[-1:, -1:] for y in (q1, q2, k, k, k)]
    exact = diff_attention(*(y.double() for y in last), 0.5, backend="reference")
    eager = eager_diff_attention(*last, torch.tensor(0.5, device="cuda"))
    assert_within_budget(out[-1:, -1:], exact, eager)


def test_a_captured_step_follows_the_cache():
    """The graph is captured with 10 keys in use and replayed with more: lengths are read when it runs."""
    x = inputs(S=2048)
    lengths = torch.full((2,), 10, dtype=torch.int32, device="cuda")
    diff_attention_decode(*x, lengths=lengths, backend="triton")  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = diff_attention_decode(*x, lengths=lengths, backend="triton")
    for used in (10, 11, 700, 2048):
        lengths.fill_(used)
        x.q1.normal_()
        graph.replay()
        assert torch.equal(out, diff_attention_decode(*x, lengths=lengths, backend="triton"))
        exact = diff_attention(
            *x.to(torch.float64)._replace(**{n: getattr(x, n)[:, :, :used].double() for n in ("k1", "k2", "v")}),
            is_causal=True,
            backend="reference",
        )
        cut = x._replace(**{n: getattr(x, n)[:, :, :used] for n in ("k1", "k2", "v")})
        assert_within_budget(out, exact, eager_diff_attention(*cut, is_causal=True))


def test_compiled_with_reduced_overhead():
    x, lengths = inputs(S=1024), torch.tensor([1000, 3], dtype=torch.int32, device="cuda")

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def step(*x, lengths):
        return diff_attention_decode(*x, lengths=lengths) * 2

    with torch.no_grad():
        for _ in range(3):
            out = step(*x, lengths=lengths)
        assert torch.equal(out, diff_attention_decode(*x, lengths=lengths) * 2)


def model():
    torch.manual_seed(0)
    config = DiffTransformerConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=256,
        max_position_embeddings=2048,
    )
    return DiffTransformerForCausalLM(config).eval().cuda()


def use_backend(network, name):
    for module in network.modules():
        if hasattr(module, "backend"):
            module.backend = name


def test_compiled_generation_with_a_static_cache():
    network, ids = model(), torch.randint(1, 512, (2, 300), device="cuda")
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    use_backend(network, "reference")
    expected = network.generate(ids, **options)
    use_backend(network, "auto")
    assert torch.equal(network.generate(ids, cache_implementation="static", **options), expected)
