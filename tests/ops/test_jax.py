"""The operator in JAX through the whole contract, output and gradients, against the fp64 reference in PyTorch."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from operator_cases import as_bias, assert_zero_where_nothing_is_visible, blind_rows, eager, random_mask

from diff_transformer import ops
from diff_transformer.errors import UserError
from diff_transformer.testing import assert_within_budget, make_inputs

# Compiling is what these tests spend their time on; JAX reads the variable at its first computation.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), QUICK]).strip()
jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

from diff_transformer.ops.jax import diff_attention  # noqa: E402

NAMES = ("q1", "q2", "k1", "k2", "v", "lam")


# name: (arguments of make_inputs, arguments of diff_attention)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"T": 31}, {}),
    "causal": ({"T": 63}, {"is_causal": True}),
    "causal 31 on 90": ({"T": 31, "S": 90}, {"is_causal": True}),
    "causal 90 on 31": ({"T": 90, "S": 31}, {"is_causal": True}),
    "one query": ({"T": 1, "S": 31}, {"is_causal": True}),
    "window 1": ({"T": 31}, {"is_causal": True, "window": 1}),
    "window 20, 63 on 90": ({"T": 63, "S": 90}, {"is_causal": True, "window": 20}),
    "window 20, 90 on 31": ({"T": 90, "S": 31}, {"is_causal": True, "window": 20}),
    "grouped keys": ({"T": 31, "G": 2}, {"is_causal": True}),
    "shared noise, grouped keys": ({"T": 31, "H": 8, "Hn": 4, "G": 2}, {"is_causal": True}),
    "one noise head": ({"T": 31, "H": 3, "Hn": 1}, {"is_causal": True}),
    "narrow values, scale": ({"T": 31, "Dv": 5}, {"scale": 0.7}),
    "mask [T, S]": ({"T": 31, "S": 40}, {"attn_mask": random_mask(31, 40)}),
    "mask per head, shared noise": ({"T": 31, "Hn": 2, "G": 1}, {"attn_mask": random_mask(1, 4, 31, 31)}),
    "bias per head": ({"T": 31, "G": 2}, {"attn_mask": torch.linspace(-3, 0, 31) * torch.rand(1, 4, 1, 1)}),
    "blind rows, causal": ({"T": 31}, {"attn_mask": blind_rows(2, 31, 31), "is_causal": True}),
    "blind rows, additive": ({"T": 31}, {"attn_mask": as_bias(blind_rows(2, 31, 31))}),
    "strided": ({"T": 31, "strided": True}, {"is_causal": True}),
    "lam scalar": ({"T": 31, "lam_shape": ()}, {}),
    "first per row": ({"T": 31}, {"is_causal": True, "first": torch.linspace(0, 1, 2 * 4 * 31).view(2, 4, 31, 1)}),
    "first per head": ({"T": 31}, {"first": torch.tensor([0.0, 0.3, 0.6, 1.0])}),
    "lam per head": ({"T": 31, "lam_shape": (4,)}, {}),
    "lam [H, 1, 1]": ({"T": 31, "lam_shape": (4, 1, 1)}, {}),
    "lam per batch": ({"T": 31, "lam_shape": (2, 1, 1, 1)}, {}),
}


def to_jax(x: torch.Tensor):
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.detach().float().numpy(), jnp.bfloat16)
    return jnp.asarray(x.detach().numpy())


def to_torch(x) -> torch.Tensor:
    dtype = getattr(torch, x.dtype.name)
    return torch.from_numpy(np.array(x.astype(jnp.float32) if dtype == torch.bfloat16 else x)).to(dtype)


def in_jax(inputs, options):
    """The output and the gradients of every input, computed with JAX in one compiled function, as PyTorch tensors."""
    options = {name: to_jax(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}

    def run(x, dout):
        out, backward = jax.vjp(partial(diff_attention, **options), *x)
        return out, *backward(dout)

    shape = (*inputs.q1.shape[:3], inputs.v.shape[3])
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(inputs.v.dtype)
    return [to_torch(x) for x in jax.jit(run)(tuple(map(to_jax, inputs)), to_jax(dout))]


def in_torch(function, inputs, options):
    """The same with PyTorch; an additive mask is cast to the inputs' dtype."""
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options = options | {"attn_mask": mask.to(inputs.q1.dtype)}
    out = function(*inputs, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, dout)]


exact_result = partial(in_torch, partial(ops.diff_attention, backend="reference"))


@pytest.mark.parametrize("case", CASES)
def test_fp32(case):
    sizes, options = CASES[case]
    inputs = make_inputs(**sizes)
    exact = exact_result(inputs.to(torch.float64), options)
    values = in_jax(inputs, options)
    for name, value, expected in zip(("out", *NAMES), values, exact, strict=True):
        assert value.dtype == torch.float32
        assert_within_budget(value, expected, what=name)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("causal", torch.bfloat16),
        ("shared noise, grouped keys", torch.bfloat16),
        ("blind rows, causal", torch.bfloat16),
        ("lam per head", torch.bfloat16),
        ("causal", torch.float16),
    ],
    ids=str,
)
def test_half_precision(case, dtype):
    sizes, options = CASES[case]
    inputs = make_inputs(**sizes, dtype=dtype)
    exact = exact_result(inputs.to(torch.float64), options)
    by_eager = in_torch(eager, inputs, options)
    values = in_jax(inputs, options)
    for name, value, expected, rounded in zip(("out", *NAMES), values, exact, by_eager, strict=True):
        assert value.dtype == (torch.float32 if name == "lam" else dtype)
        assert_within_budget(value, expected, rounded, what=name)


@pytest.mark.parametrize("case", ["shared noise, grouped keys", "blind rows, causal"])
def test_fp64_is_exact(case):
    sizes, options = CASES[case]
    inputs = make_inputs(**sizes, dtype=torch.float64)
    with jax.enable_x64(True):
        values = in_jax(inputs, options)
    for name, value, expected in zip(("out", *NAMES), values, exact_result(inputs, options), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("mask", [blind_rows(2, 31, 31), as_bias(blind_rows(2, 31, 31))], ids=["bool", "additive"])
def test_rows_that_see_nothing_are_exactly_zero(mask):
    values = in_jax(make_inputs(T=31), {"attn_mask": mask})
    assert_zero_where_nothing_is_visible(
        dict(zip(("out", "dq1", "dq2", "dk1", "dk2", "dv", "dlam"), values, strict=True))
    )


def test_shared_keys():
    """k2 may be k1: its gradient is the sum of both."""
    q1, q2, k, _, v, lam = map(to_jax, make_inputs(T=31))
    shared = jax.grad(lambda k: diff_attention(q1, q2, k, k, v, lam).sum())(k)
    first, second = jax.grad(lambda k1, k2: diff_attention(q1, q2, k1, k2, v, lam).sum(), argnums=(0, 1))(k, k)
    np.testing.assert_allclose(shared, first + second, atol=1e-5)


def test_additive_mask_has_a_gradient():
    inputs, bias = make_inputs(T=31), torch.randn(4, 31, 31, generator=torch.Generator().manual_seed(3))
    exact_bias = bias.double().requires_grad_()
    exact = ops.diff_attention(*inputs.to(torch.float64), attn_mask=exact_bias, backend="reference")
    expected = torch.autograd.grad(exact.sum(), exact_bias)[0]
    x = [to_jax(y) for y in inputs]
    loss = lambda b: diff_attention(*x, attn_mask=b).sum()  # noqa: E731
    assert_within_budget(to_torch(jax.jit(jax.grad(loss))(to_jax(bias))), expected)


def test_lam_is_not_rounded_to_bf16():
    """Two equal maps cancel to 2^-12 of softmax attention; a lam rounded to bf16 would be 1 and leave nothing."""
    x = [to_jax(y) for y in make_inputs(T=31, dtype=torch.bfloat16)]
    cancel = (x[0], x[0], x[2], x[2], x[4])
    out = diff_attention(*cancel, jnp.asarray(1 - 2**-12)).astype(jnp.float32)
    softmax_attention = diff_attention(*cancel, 0.0).astype(jnp.float32)
    np.testing.assert_allclose(out * 2**12, softmax_attention, rtol=0.02, atol=2**-7)  # maps are rounded to bf16


def test_jit_with_static_names_and_vmap():
    x = [to_jax(y) for y in make_inputs(B=3, T=31, G=2)]
    plain = diff_attention(*x, is_causal=True, window=9)
    jitted = jax.jit(diff_attention, static_argnames=("is_causal", "window"))(*x, is_causal=True, window=9)
    np.testing.assert_allclose(jitted, plain, atol=1e-6)
    one = lambda *x: diff_attention(*(y[None] for y in x), is_causal=True, window=9)[0]  # noqa: E731
    np.testing.assert_allclose(jax.vmap(one)(*x), plain, atol=1e-5)


@pytest.mark.parametrize("empty", [{"B": 0}, {"T": 0}, {"S": 0}], ids=str)
def test_nothing_to_attend_from_or_to_gives_zeros(empty):
    sizes = {"B": 2, "T": 6, "S": 8} | empty
    B, T, S = sizes["B"], sizes["T"], sizes["S"]
    x = [jnp.ones((B, heads, n, width)) for heads, n, width in ((4, T, 3), (2, T, 3), (1, S, 3), (1, S, 3), (1, S, 5))]
    lam, mask = jnp.ones((B, 4, T, 1)), jnp.ones((T, S), bool)
    loss = lambda *x: diff_attention(*x, attn_mask=mask, is_causal=True).sum()  # noqa: E731
    out = diff_attention(*x, lam, attn_mask=mask, is_causal=True)
    assert out.shape == (B, 4, T, 5)
    assert not out.any()
    for y, gradient in zip((*x, lam), jax.grad(loss, argnums=tuple(range(6)))(*x, lam), strict=True):
        assert gradient.shape == y.shape
        assert not gradient.any()


X: dict[str, Any] = {name: to_jax(x) for name, x in make_inputs(B=2, H=4, G=2, T=6, S=8, D=3, Dv=5)._asdict().items()}
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank": ({"q2": X["q2"][0]}, ValueError, r"\(4, 6, 3\), float32; .*: give q1 \[B, H, T, D\]"),
    "integers": ({"q1": X["q1"].astype(int)}, UserError, r"v are \(2, 4, 6, 3\), int32; .*; all one of float32"),
    "mixed dtypes": (
        {"v": X["v"].astype(jnp.bfloat16)},
        UserError,
        "bfloat16: give q1 .*; all one of float32",
    ),
    "lam per wrong head": ({"lam": jnp.ones(3)}, ValueError, r"lam has shape \[3\]; give a number, a scalar, \[4\]"),
    "integer mask": ({"attn_mask": jnp.ones((6, 8), int)}, UserError, "attn_mask has dtype int32"),
    "mask shape": ({"attn_mask": jnp.ones((8, 6), bool)}, ValueError, r"which does not broadcast to \[2, 4, 6, 8\]"),
    "window 0": ({"window": 0, "is_causal": True}, ValueError, "window is 0; give at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    values, error, message = BAD[name]
    with pytest.raises(error, match=message):
        diff_attention(**(X | values))


def test_the_examples_of_the_documentation_run():
    text = (Path(__file__).resolve().parents[2] / "docs" / "jax.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert names["out"].shape == (2, 4, 128, 64)
    assert jnp.abs(names["slope"]).min() > 0
    x = [names[name] for name in ("q1", "q2", "k1", "k2", "v")]
    vectors = 0.1 * jax.random.normal(jax.random.key(5), (4, 32))
    heads = names["head_outputs"](*x, vectors, jnp.ones(64), layer=0)
    rms = jnp.sqrt((heads**2).mean(-1))
    np.testing.assert_allclose(rms, jnp.full_like(rms, 1 - 0.2), rtol=1e-2)


def test_the_package_does_not_import_jax():
    code = "import sys; import diff_transformer; diff_transformer.diff_attention; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
