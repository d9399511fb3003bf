"""Masks, and calls of the operator with all gradients, for its tests against the fp64 reference."""

import torch

from diff_transformer.ops import diff_attention
from diff_transformer.testing import assert_within_budget, eager_diff_attention


def random_mask(*shape):
    """About two thirds of the keys visible, the first always."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.35
    mask[..., 0] = True
    return mask


def blind_rows(B, T, S):
    """Queries 0 and 7 of batch 0, and every query of batch 1, may attend to nothing: [B, 1, T, S]."""
    mask = random_mask(B, 1, T, S)
    mask[0, :, [0, 7]] = False
    mask[1] = False
    return mask


def as_bias(mask):
    """A boolean mask as an additive one."""
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


def by(backend):
    """The operator by one backend."""
    return lambda *x, **options: diff_attention(*x, backend=backend, **options)


def eager(q1, q2, k1, k2, v, lam, **options):
    lam = lam[None, :, None, None] if lam.dim() == 1 else lam
    return eager_diff_attention(q1, q2, k1, k2, v, lam, **options)


def run(function, x, options):
    """The output and the gradients of every input, by name, for a fixed gradient of the output."""
    out = function(*x, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    gradients = torch.autograd.grad(out, x, dout)
    return dict(zip(("out", "dq1", "dq2", "dk1", "dk2", "dv", "dlam"), (out, *gradients), strict=True))


def in_fp64(x, options):
    """The same by the reference in fp64; an additive mask is cast."""
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options = options | {"attn_mask": mask.double()}
    return run(by("reference"), x.to(torch.float64), options)


def assert_good(backend, x, options):
    """Output and gradients are within the budget: fp32 to 1e-5, half precision within twice the eager error."""
    dtype, exact = x.v.dtype, in_fp64(x, options)
    by_eager = {} if dtype == torch.float32 else run(eager, x, options)
    for name, value in run(by(backend), x, options).items():
        assert value.dtype == (torch.float32 if name == "dlam" else dtype)
        assert_within_budget(value, exact[name], by_eager.get(name), what=name)


def assert_zero_where_nothing_is_visible(results):
    """Of a call with ``blind_rows``: exactly 0 in these rows, and for all inputs of batch 1."""
    assert results["out"][0, :, 1].abs().min() > 0
    for name in ("out", "dq1", "dq2", "dlam"):
        assert not results[name][0, :, [0, 7]].any(), name
        assert not results[name][1].any(), name
    for name in ("dk1", "dk2", "dv"):
        assert results[name][0].any(), name
        assert not results[name][1].any(), name
