"""Forward-mode AD, torch.func and second derivatives: right by "auto" or "reference", refused by other backends."""

import pytest
import torch
from torch.autograd import forward_ad

from diff_transformer import diff_attention, diff_attention_varlen
from diff_transformer.errors import UserError
from diff_transformer.testing import assert_within_budget, make_inputs

SIZES = {"H": 4, "Hn": 2, "G": 1, "T": 7, "S": 9, "D": 3, "Dv": 5}


def attend(*x, backend="auto"):
    return diff_attention(*x, is_causal=True, backend=backend)


def tangent(function, primals, tangents):
    """The tangent of ``function`` at ``primals`` by forward-mode AD; None where it lost track."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        return forward_ad.unpack_dual(function(*duals)).tangent


def slope(function, primals, tangents, step=1e-6):
    """The same by central differences."""
    ahead, behind = ([x + s * t for x, t in zip(primals, tangents, strict=True)] for s in (step, -step))
    return (function(*ahead) - function(*behind)) / (2 * step)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_mode(compiled):
    x = make_inputs(**SIZES, requires_grad=False).to(torch.float64)
    tangents = [torch.randn_like(y) for y in x]
    function = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    assert_within_budget(function(*x), attend(*x, backend="reference"))
    assert_within_budget(tangent(function, x, tangents), slope(attend, x, tangents), what="tangent")


def test_jvp():
    x = make_inputs(**SIZES, requires_grad=False).to(torch.float64)
    tangents = tuple(torch.randn_like(y) for y in x)

    def derivative(*x):
        return torch.func.jvp(attend, x, tangents)[1]

    for function in (derivative, torch.compile(derivative, backend="aot_eager", fullgraph=True)):
        assert_within_budget(function(*x), slope(attend, x, tangents))


def test_forward_mode_through_packed_documents():
    x = make_inputs(B=1, T=7, requires_grad=False).to(torch.float64)
    rows = [y[0].transpose(0, 1) for y in x]
    tangents, ends = [torch.randn_like(y) for y in rows], torch.tensor([0, 3, 7], dtype=torch.int32)

    def packed(*rows):
        return diff_attention_varlen(*rows, ends, ends)

    assert_within_budget(tangent(packed, rows, tangents), slope(packed, rows, tangents))


def of_queries_and_lam(attend, x):
    shared = [y[0] for y in x[1:5]]
    return (torch.func.vmap(lambda q1, lam: attend(q1, *shared, lam))(x[0], x[5]),)


def gradients_of_each(attend, x):
    return torch.func.vmap(torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=(0, 3, 4, 5)))(*x)


def second_derivatives(attend, x):
    fixed = [y[0] for y in x[:5]]
    return (torch.func.hessian(lambda lam: attend(*fixed, lam).square().sum())(x[5][0, 0, :, 0, 0]),)


def without_a_gradient(attend, x):
    others = [y[0] for y in x[1:]]
    return (torch.func.grad(lambda q1: (q1 * torch.no_grad()(attend)(q1, *others).sum()).sum())(x[0][0]),)


TRANSFORMS = [of_queries_and_lam, gradients_of_each, second_derivatives, without_a_gradient]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func(transform):
    x = [torch.stack([y, y.flip(0)]) for y in make_inputs(**SIZES, requires_grad=False)]
    expected = transform(lambda *x: attend(*x, backend="reference"), x)
    for value, exact in zip(transform(attend, x), expected, strict=True):
        assert_within_budget(value, exact)


def test_vmap_is_each_by_itself():
    x = [torch.stack([y, y.flip(0)]) for y in make_inputs(**SIZES, requires_grad=False)]
    each = torch.stack([attend(*(y[i] for y in x)) for i in range(2)])
    assert_within_budget(torch.func.vmap(attend)(*x), each)
    assert_within_budget(torch.func.vmap(lambda *x: attend(*x, backend="sdpa"))(*x), each)
    compiled = torch.compile(torch.func.vmap(attend), backend="aot_eager", fullgraph=True)
    assert_within_budget(compiled(*x), each)


def test_named_backends_refuse():
    x = make_inputs(**SIZES, requires_grad=False)
    advice = "; give backend='reference' or 'auto'"
    with pytest.raises(UserError, match=f"backend='blockwise' does not follow forward-mode AD{advice}"):
        tangent(lambda q1: attend(q1, *x[1:], backend="blockwise"), x[:1], x[:1])
    with pytest.raises(UserError, match=f"'blockwise' does not follow a transform of torch.func{advice}"):
        torch.func.vmap(lambda q1: attend(q1, *x[1:], backend="blockwise"))(x.q1[None])


def test_second_derivatives_of_the_reference():
    x = make_inputs(B=1, H=2, T=3, D=2).to(torch.float64)
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x, backend="reference"), tuple(x))


@pytest.mark.parametrize("backend", ["blockwise", "triton"], indirect=True)
def test_second_derivatives_of_kernels_are_refused(backend):
    x = make_inputs(B=1, H=1, T=3, D=2)
    (gradient,) = torch.autograd.grad(attend(*x, backend=backend).sum(), x.q1, create_graph=True)
    with pytest.raises(UserError, match=r"second derivatives pass through .* give backend='reference'"):
        gradient.sum().backward()
