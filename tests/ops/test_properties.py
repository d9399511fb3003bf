"""Random shapes and options, k2 apart or k1: blockwise and sdpa agree with the reference in output and gradients."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diff_transformer.ops import diff_attention
from diff_transformer.testing import assert_within_budget, make_inputs


@st.composite
def calls(draw):
    """(arguments of make_inputs, options of diff_attention)"""
    G, noise, signal = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes = {
        "B": draw(st.integers(1, 3)),
        "H": G * noise * signal,
        "Hn": G * noise,
        "G": G,
        "T": draw(st.integers(1, 140)),
        "S": draw(st.integers(1, 140)),
        "D": draw(st.integers(1, 20)),
        "Dv": draw(st.integers(1, 40)),
        "strided": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }
    options = {"is_causal": draw(st.booleans())}
    if options["is_causal"]:
        options["window"] = draw(st.none() | st.integers(1, 150))
    full = (sizes["B"], sizes["H"], sizes["T"], sizes["S"])
    shape = [size if draw(st.booleans()) else 1 for size in full][draw(st.integers(0, 3)) :]
    generator = torch.Generator().manual_seed(sizes["seed"])
    visible = torch.rand(shape, generator=generator) > draw(st.sampled_from([0.1, 0.5, 0.95]))
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    options["attn_mask"] = {
        "none": None,
        "bool": visible,
        "bias": bias,
        "additive": bias.masked_fill(~visible, float("-inf")),
    }[draw(st.sampled_from(["none", "bool", "bias", "additive"]))]
    return sizes, options


@given(calls(), st.booleans(), st.sampled_from(["blockwise", "sdpa"]))
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_agrees_with_the_reference(call, shared_keys, backend):
    sizes, options = call
    x = make_inputs(**sizes, dtype=torch.float32 if backend == "blockwise" else torch.float64)
    wide = x.to(torch.float64)
    if shared_keys:  # the gradient of either is then that of both
        x, wide = x._replace(k2=x.k1), wide._replace(k2=wide.k1)
    exact = diff_attention(*wide, backend="reference", **options)
    out = diff_attention(*x, backend=backend, **options)
    dout = torch.randn(exact.shape).double()
    gradients = torch.autograd.grad(out, x, dout.to(out.dtype)), torch.autograd.grad(exact, wide, dout)
    for value, expected in zip((out, *gradients[0]), (exact, *gradients[1]), strict=True):
        if backend == "blockwise":
            assert_within_budget(value, expected)
        else:
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
