"""Every backend through the whole contract, output and gradients, against the fp64 reference."""

from typing import Any

import pytest
import torch
from operator_cases import (
    as_bias,
    assert_good,
    assert_zero_where_nothing_is_visible,
    blind_rows,
    by,
    eager,
    in_fp64,
    random_mask,
    run,
)

from diff_transformer.ops import available_backends, diff_attention, diff_attention_maps, diff_attention_varlen
from diff_transformer.testing import assert_within_budget, make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy in Triton's interpreter


def padding(B, S):
    """The first keys of batch 1 are padding: [B, 1, 1, S]."""
    mask = torch.ones(B, 1, 1, S, dtype=torch.bool)
    mask[1, ..., : S // 3] = False
    return mask


def distance_bias(H, S):
    """A slope a head, as in ALiBi: [1, H, 1, S]."""
    return torch.linspace(0.1, 1, H).view(1, H, 1, 1) * torch.linspace(-3, 0, S)


# name: (arguments of make_inputs, arguments of diff_attention)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain 63": ({}, {}),
    "scale 0": ({}, {"scale": 0.0}),
    "scale 0, causal": ({"T": 111}, {"is_causal": True, "scale": 0.0}),
    "scale below 0, causal": ({"T": 111}, {"is_causal": True, "scale": -0.25}),
    "causal 111": ({"T": 111}, {"is_causal": True}),
    "causal 1000": ({"B": 1, "H": 2, "T": 1000, "D": 32}, {"is_causal": True}),
    "cross 63 on 111": ({"T": 63, "S": 111}, {}),
    "causal 63 on 250": ({"T": 63, "S": 250}, {"is_causal": True}),
    "causal 200 on 63": ({"T": 200, "S": 63}, {"is_causal": True}),
    "one query": ({"T": 1, "S": 111}, {"is_causal": True}),
    "one query and key": ({"T": 1}, {"is_causal": True}),
    "window 1": ({"T": 63}, {"is_causal": True, "window": 1}),
    "window 20": ({"T": 300}, {"is_causal": True, "window": 20}),
    "window 200": ({"T": 300}, {"is_causal": True, "window": 200}),
    "window beyond S": ({"T": 63}, {"is_causal": True, "window": 1000}),
    "window 20, 63 on 111": ({"T": 63, "S": 111}, {"is_causal": True, "window": 20}),
    "window 20, 111 on 63": ({"T": 111, "S": 63}, {"is_causal": True, "window": 20}),
    "grouped keys": ({"H": 4, "G": 2, "T": 111}, {"is_causal": True}),
    "one key head": ({"H": 4, "G": 1, "T": 111}, {"is_causal": True}),
    "shared noise": ({"H": 6, "Hn": 2, "T": 111}, {"is_causal": True}),
    "shared noise, grouped keys": ({"H": 6, "Hn": 2, "G": 1, "T": 111}, {"is_causal": True}),
    "values as wide as queries": ({"D": 16, "Dv": 16}, {"is_causal": True}),
    "narrow values": ({"D": 16, "Dv": 5}, {"is_causal": True}),
    "odd widths": ({"D": 24, "Dv": 41}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.7}),
    "sharp maps": ({"T": 300, "D": 32}, {"is_causal": True, "scale": 1.0}),
    "mask [T, S]": ({"S": 90}, {"attn_mask": random_mask(63, 90)}),
    "mask per head": ({"T": 150, "S": 90}, {"attn_mask": random_mask(2, 4, 150, 90)}),
    "mask per head, shared noise": ({"H": 4, "Hn": 2, "G": 1}, {"attn_mask": random_mask(1, 4, 63, 63)}),
    "mask per batch, grouped keys": ({"H": 4, "G": 2}, {"attn_mask": random_mask(2, 1, 63, 63), "is_causal": True}),
    "padding": ({"T": 63, "S": 90}, {"attn_mask": padding(2, 90)}),
    "padding, causal": ({"T": 150}, {"attn_mask": padding(2, 150), "is_causal": True}),
    "bias": ({"T": 150}, {"attn_mask": distance_bias(4, 150), "is_causal": True}),
    "bias, grouped keys": ({"T": 63, "H": 4, "G": 2}, {"attn_mask": distance_bias(4, 63)}),
    "additive mask": (
        {},
        {"attn_mask": as_bias(random_mask(2, 1, 63, 63))},
    ),
    "blind rows": ({}, {"attn_mask": blind_rows(2, 63, 63)}),
    "blind rows, causal": ({"T": 150, "H": 4, "G": 2}, {"attn_mask": blind_rows(2, 150, 150), "is_causal": True}),
    "blind rows, additive": (
        {},
        {"attn_mask": as_bias(blind_rows(2, 63, 63))},
    ),
    "mask and window": ({"T": 150}, {"attn_mask": random_mask(2, 1, 150, 150), "is_causal": True, "window": 30}),
    "strided": ({"T": 111, "strided": True}, {"is_causal": True}),
    "strided, grouped keys": ({"T": 150, "H": 4, "G": 2, "strided": True}, {"is_causal": True}),
    "lam scalar": ({"lam_shape": ()}, {}),
    "lam per head": ({"lam_shape": (4,)}, {}),
    "lam [H, 1, 1]": ({"lam_shape": (4, 1, 1)}, {}),
    "lam [T, 1]": ({"H": 4, "G": 2, "lam_shape": (63, 1)}, {}),
    "lam per batch": ({"lam_shape": (2, 1, 1, 1)}, {}),
    "lam per query": ({"lam_shape": (1, 1, 63, 1)}, {}),
}


EVERY = pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"], indirect=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
@EVERY
def test_equals_the_reference_in_fp64(backend, case, dtype):
    sizes, options = CASES[case]
    assert_good(backend, make_inputs(**sizes, dtype=dtype), options)


@pytest.mark.parametrize("case", ["causal 111", "shared noise, grouped keys"])
@pytest.mark.parametrize("backend", ["reference", "blockwise"], indirect=True)
def test_fp16(backend, case):
    sizes, options = CASES[case]
    assert_good(backend, make_inputs(**sizes, dtype=torch.float16), options)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_nothing_are_exactly_zero(backend, dtype):
    x = make_inputs(T=63, dtype=dtype)
    assert_zero_where_nothing_is_visible(run(by(backend), x, {"attn_mask": blind_rows(2, 63, 63)}))


@pytest.mark.parametrize("case", ["causal 111", "shared noise, grouped keys", "blind rows, causal", "window 20"])
@pytest.mark.parametrize("backend", ["sdpa"])
def test_fp64_is_exact(backend, case):
    sizes, options = CASES[case]
    inputs = make_inputs(**sizes, dtype=torch.float64)
    exact = in_fp64(inputs, options)
    for name, value in run(by(backend), inputs, options).items():
        torch.testing.assert_close(value, exact[name], rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@EVERY
def test_queries_before_the_first_key_are_exactly_zero(backend):
    results = run(by(backend), make_inputs(T=200, S=63), {"is_causal": True})
    assert not results["out"][:, :, : 200 - 63].any()
    assert results["out"][:, :, 200 - 63].all()


@EVERY
def test_shared_keys(backend):
    """k2 may be k1: its gradient is the sum of both."""
    x = make_inputs(T=63)
    separate = run(by(backend), x._replace(k2=x.k1.detach().clone().requires_grad_()), {"is_causal": True})
    out = diff_attention(x.q1, x.q2, x.k1, x.k1, x.v, x.lam, is_causal=True, backend=backend)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (dk,) = torch.autograd.grad(out, x.k1, dout)
    assert_within_budget(out, separate["out"])
    assert_within_budget(dk, separate["dk1"] + separate["dk2"], what="dk")


AND_TRITON = pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "triton"], indirect=True)


@AND_TRITON
def test_gradient_of_the_output_may_be_broadcast(backend):
    """sum() hands backward a gradient whose strides are 0."""
    x = make_inputs(B=1, H=2, T=40)
    summed = torch.autograd.grad(diff_attention(*x, is_causal=True, backend=backend).sum(), x)
    out = diff_attention(*x, is_causal=True, backend="reference")
    for value, exact in zip(summed, torch.autograd.grad(out, x, torch.ones_like(out)), strict=True):
        assert_within_budget(value, exact)


@AND_TRITON
@pytest.mark.parametrize("packed", [False, True])
def test_the_output_can_be_changed_in_place(backend, packed):
    x = make_inputs(B=1, H=2, T=9, D=8)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)

    def attend():
        if not packed:
            return diff_attention(*x, is_causal=True, backend=backend)
        rows = (y[0].transpose(0, 1) for y in x)
        return diff_attention_varlen(*rows, ends, ends, is_causal=True, backend=backend)

    dout = torch.randn(attend().shape)
    expected = torch.autograd.grad(attend() * 2, x, dout)
    out = attend()
    out *= 2
    for gradient, exact in zip(torch.autograd.grad(out, x, dout), expected, strict=True):
        assert torch.equal(gradient, exact)
    torch.nn.functional.dropout(attend(), 0.5, training=True, inplace=True).sum().backward()


@EVERY
def test_gradients_of_some_inputs_only(backend):
    x = make_inputs(T=63)
    every = dict(zip(x._fields, torch.autograd.grad(diff_attention(*x, backend=backend).sum(), x), strict=True))
    for name in x._fields:
        alone = x._replace(**{other: getattr(x, other).detach() for other in x._fields if other != name})
        (gradient,) = torch.autograd.grad(diff_attention(*alone, backend=backend).sum(), getattr(alone, name))
        assert torch.equal(gradient, every[name]), name


@EVERY
@pytest.mark.parametrize("lam", [0.3, 1, -0.2])
def test_lam_as_a_number(backend, lam):
    x = make_inputs(T=63, requires_grad=False)
    expected = diff_attention(*x[:5], torch.full((2, 4, 63, 1), float(lam)), backend="reference")
    assert_within_budget(diff_attention(*x[:5], lam, backend=backend), expected)


@EVERY
def test_lam_is_not_rounded_to_bf16(backend):
    """Two equal maps cancel to 2^-12 of softmax attention; a lam rounded to bf16 would be 1 and leave nothing."""
    x = make_inputs(T=63, dtype=torch.bfloat16, requires_grad=False)
    maps_cancel = (x.q1, x.q1, x.k1, x.k1, x.v)
    out = diff_attention(*maps_cancel, torch.tensor(1 - 2**-12), backend=backend)
    softmax_attention = diff_attention(*maps_cancel, 0.0, backend=backend)
    torch.testing.assert_close(out * 2**12, softmax_attention, rtol=0.02, atol=1e-3)


@EVERY
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64], ids=str)
def test_additive_masks_are_not_rounded_to_bf16(backend, mask_dtype):
    """A constant added to all scores of a row changes nothing, but leaves a mask in bf16 steps of 1."""
    x, bias = make_inputs(H=4, G=2, T=150, dtype=torch.bfloat16), distance_bias(4, 150)
    options = {"attn_mask": bias, "is_causal": True}
    exact, by_eager = in_fp64(x, options), run(eager, x, options)
    shifted = {"attn_mask": bias.to(mask_dtype) + 200.3, "is_causal": True}
    for name, value in run(by(backend), x, shifted).items():
        assert_within_budget(value, exact[name], by_eager[name], what=name)


@pytest.mark.parametrize(
    ("backend", "mean"),
    [("reference", True), ("blockwise", False), ("sdpa", True), ("triton", False)],
    indirect=["backend"],
)
def test_rows_hidden_by_finite_values(backend, mean):
    x = make_inputs(B=1, H=2, T=20)
    mask = torch.zeros(20, 20)
    mask[3] = torch.finfo(torch.float32).min
    out = diff_attention(*x, attn_mask=mask, backend=backend)
    expected = x.v.mean(2) * (1 - x.lam[:, :, 3]) * mean
    torch.testing.assert_close(out[:, :, 3], expected, rtol=1e-5, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
def test_shapes_alone(backend):
    """On the meta device nothing is computed, and autocast is not there to ask for."""
    x = make_inputs(H=4, Hn=2, T=7, S=9, device="meta")
    assert backend == "auto" or backend in available_backends("meta", torch.float32)
    out = diff_attention(*x, is_causal=True, backend=backend)
    assert (out.device.type, out.shape) == ("meta", (2, 4, 7, 32))
    assert diff_attention_maps(*x[:4], x.lam).difference.shape == (2, 4, 7, 9)


@EVERY
def test_autocast_casts_as_sdpa_does(backend):
    x = make_inputs(T=63)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = diff_attention(*x, is_causal=True, backend=backend)
        mixed = diff_attention(x.q1.bfloat16(), *x[1:], is_causal=True, backend=backend)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, diff_attention(*x.to(torch.bfloat16), is_causal=True, backend=backend))
    assert torch.equal(out, mixed)
    gradients = torch.autograd.grad(out.float().square().sum(), x)
    assert {g.dtype for g in gradients} == {torch.float32}
    assert all(g.any() for g in gradients)


@AND_TRITON
def test_nan_in_an_input_is_not_hidden(backend):
    x = make_inputs(B=1, H=2, T=40, requires_grad=False)
    x.q1[0, 0, 5] = float("nan")
    out = diff_attention(*x, is_causal=True, attn_mask=torch.ones(40, 40, dtype=torch.bool), backend=backend)
    assert out[0, 0, 5].isnan().all()
    assert out.isnan().sum() == 32


@AND_TRITON
def test_repeats_bit_for_bit(backend):
    x = make_inputs(B=1, H=4, Hn=2, G=1, T=40)
    first, second = (run(by(backend), x, {"is_causal": True}) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": random_mask(33, 33)}], ids=["causal", "mask"])
@AND_TRITON
def test_compiled_into_one_graph_and_checkpointed(backend, options):
    x = make_inputs(B=1, H=2, G=1, T=33)

    def loss(*x):
        return diff_attention(*x, backend=backend, **options).square().sum()

    def checkpointed(*x):
        return torch.utils.checkpoint.checkpoint(loss, *x, use_reentrant=False)

    expected = torch.autograd.grad(loss(*x), x)
    for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), checkpointed):
        for value, exact in zip(torch.autograd.grad(function(*x), x), expected, strict=True):
            assert_within_budget(value, exact)
