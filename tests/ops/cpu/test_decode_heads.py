"""A few queries over a cache, with lambda, gates and head norm, in one call of the CPU kernel: equal to the formula."""

import pytest
import torch
from torch.nn import functional as F

from diff_transformer.ops import diff_attention
from diff_transformer.ops.cpu import library
from diff_transformer.ops.cpu.decode import can_decode, decode_heads
from diff_transformer.testing import assert_within_budget

pytestmark = pytest.mark.skipif(not library.available(), reason="the CPU kernel is not built on this machine")

B, S, D, Dv = 2, 31, 24, 40


def make(dtype, T=1, H=4, Hn=4, G=2):
    generator = torch.Generator().manual_seed(3)

    def of(*shape):
        return torch.randn(*shape, generator=generator)

    rows = [of(B, T, heads, D).transpose(1, 2) for heads in (H, Hn)]
    keys = [of(B, S, G, width).transpose(1, 2) for width in (D, D, Dv)]
    return [x.to(dtype) for x in (*rows, *keys)], {
        "lam": torch.rand(B, H, T, 1, generator=generator),
        "lambda_vectors": [0.3 * of(D) for _ in range(4)],
        "first": torch.rand(B, H, T, 1, generator=generator),
        "gate": torch.rand(B, H, T, 1, generator=generator),
        "norm_weight": 1 + 0.1 * of(Dv),
    }


def formula(q1, q2, k1, k2, v, lam=0.0, *, lambda_vectors=(), first=None, gate=None, norm_weight=None, norm_eps=None,
            gain=1.0, is_causal=True, window=None):  # fmt: skip
    """The same in PyTorch, in the dtype of the inputs; lambda in fp32 at least."""
    options = {"is_causal": is_causal, "window": window, "backend": "reference"}
    if lambda_vectors:
        a, b, c, d = lambda_vectors
        lam = lam + torch.exp(a @ b) - torch.exp(c @ d)
    if first is None:
        out = diff_attention(q1, q2, k1, k2, v, lam, **options)
    else:
        second = diff_attention(q2, q2, k2, k2, v, 0.0, **options).repeat_interleave(q1.shape[1] // q2.shape[1], 1)
        out = diff_attention(q1, q1, k1, k1, v, 0.0, **options) * first - second * lam
    out = out.transpose(1, 2)
    if norm_eps is not None:
        out = F.rms_norm(out, (out.shape[-1],), None if norm_weight is None else norm_weight.to(out.dtype), norm_eps)
    out = out * gain
    return (out if gate is None else out * gate.transpose(1, 2)).to(v.dtype)


CASES = {
    "number": {"lam": 0.4},
    "token": {"lam": ...},
    "vectors": {"lam": 0.2, "lambda_vectors": ...},
    "norm": {"lam": 0.4, "norm_eps": 1e-5, "norm_weight": ..., "gain": 0.8},
    "norm without weight": {"lam": 0.4, "norm_eps": 1e-5},
    "gate after the norm": {"lam": 0.4, "norm_eps": 1e-5, "gate": ...},
    "first": {"lam": ..., "first": ...},
    "window": {"lam": ..., "window": 7},
    "not causal": {"lam": ..., "is_causal": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [{}, {"H": 6, "Hn": 2}, {"T": 3}, {"G": 4}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula(case, heads, dtype):
    tensors, weights = make(dtype, **heads)
    options = {name: weights[name] if value is ... else value for name, value in CASES[case].items()}
    out = decode_heads(*tensors, **options)

    def double(x):
        if isinstance(x, list):
            return [double(each) for each in x]
        return x.double() if isinstance(x, torch.Tensor) else x

    exact = formula(*map(double, tensors), **{name: double(x) for name, x in options.items()})
    assert out is not None
    assert out.shape == exact.shape
    assert_within_budget(out, exact, formula(*tensors, **options))


def test_shared_keys_and_bf16_norm_weights():
    (q1, q2, k1, _, v), weights = make(torch.bfloat16)
    options = {"lam": 0.4, "norm_eps": 1e-5, "norm_weight": weights["norm_weight"].bfloat16()}
    out = decode_heads(q1, q2, k1, k1, v, **options)
    assert_within_budget(
        out, formula(*(x.double() for x in (q1, q2, k1, k1, v)), **options), formula(q1, q2, k1, k1, v, **options)
    )


REFUSED = {
    "float64": lambda q, k, v: (q.double(), k.double(), v.double()),
    "two dtypes": lambda q, k, v: (q, k, v.bfloat16()),
    "gradient": lambda q, k, v: (q.requires_grad_(), k, v),
    "negated": lambda q, k, v: (torch._neg_view(q), k, v),
    "meta": lambda q, k, v: (q.to("meta"), k, v),
    "many queries": lambda q, k, v: (q.expand(-1, -1, 9, -1), k, v),
}


@pytest.mark.parametrize("case", REFUSED)
def test_leaves_to_the_modules(case):
    (q, _, k, _, v), _ = make(torch.float32)
    assert can_decode(q, k, v)
    assert not can_decode(*REFUSED[case](q, k, v))


@pytest.mark.parametrize("change", [lambda x: make(torch.float32, T=5)[0], lambda x: (*x[:4], x[4][:, :, :5]),
                                    lambda x: (x[0][:, :3], *x[1:])])  # fmt: skip
def test_leaves_other_shapes_to_the_modules(change):
    tensors, _ = make(torch.float32)
    assert decode_heads(*change(tensors), 0.4) is None


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(1, Dv), torch.ones(2 * Dv)[::2], torch.ones(Dv).double()])
def test_leaves_other_norm_weights_to_the_modules(weight):
    tensors, _ = make(torch.float32)
    assert decode_heads(*tensors, 0.4, norm_eps=1e-5, norm_weight=weight) is None


def test_leaves_traced_and_transformed_calls_to_the_modules():
    (q, _, k, _, v), _ = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_decode(q, k, v)
    assert not torch.vmap(lambda x: torch.tensor(can_decode(x, k, v)))(q[None]).any()
