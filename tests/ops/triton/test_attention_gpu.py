"""On a GPU: the Triton kernels in every dtype, at lengths of real models and through the whole contract."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from operator_cases import by, eager

from diff_transformer.ops import diff_attention, diff_attention_varlen
from diff_transformer.ops.triton import operator
from diff_transformer.testing import Inputs, assert_within_budget, make_inputs, peak_memory

pytestmark = pytest.mark.gpu

DEVICE, LENGTH = "cuda", 1000
CAUSAL = {"is_causal": True}
HALF = [torch.bfloat16, torch.float16]
WIDTHS = [(16, 32), (32, 64), (40, 80), (64, 64), (64, 128), (80, 160), (96, 192), (112, 224), (128, 128), (128, 256)]


def padding(B, S):
    mask = torch.ones(B, 1, 1, S, dtype=torch.bool, device=DEVICE)
    mask[-1, ..., : S // 3] = False
    return mask


def random_mask(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.35


# name: (arguments of make_inputs beside B = 2, H = 4, T = LENGTH, D = 64; what makes those of diff_attention)
FEATURES: dict[str, tuple[dict[str, Any], Any]] = {
    "full": ({}, dict),
    "causal": ({}, lambda: CAUSAL),
    "63 on 1000": ({"T": 63, "S": LENGTH}, lambda: CAUSAL),
    "1000 on 63": ({"T": LENGTH, "S": 63}, lambda: CAUSAL),
    "window": ({}, lambda: CAUSAL | {"window": 200}),
    "grouped, shared noise": ({"H": 8, "Hn": 4, "G": 2}, lambda: CAUSAL),
    "one key head": ({"H": 8, "G": 1, "strided": True}, lambda: CAUSAL),
    "strided": ({"strided": True}, lambda: CAUSAL),
    "padding": ({}, lambda: CAUSAL | {"attn_mask": padding(2, LENGTH)}),
    "mask": ({"T": 500}, lambda: {"attn_mask": random_mask(2, 4, 500, 500)}),
    "bias": ({"T": 500}, lambda: {"attn_mask": torch.linspace(-3, 0, 500, device=DEVICE).view(1, 1, 1, 500)}),
    "scale": ({}, lambda: CAUSAL | {"scale": -0.3}),
    "lam per head": ({"lam_shape": (4,)}, lambda: CAUSAL),
    "lam scalar": ({"lam_shape": ()}, lambda: CAUSAL),
    "shared keys": ({"H": 8, "Hn": 4, "G": 2, "shared": True}, lambda: CAUSAL),
}
PLAIN = ("causal", "grouped, shared noise", "lam scalar", "shared keys")  # of what Hopper kernels take


@pytest.fixture
def plain(monkeypatch):
    """Plain Triton, also where there are Hopper kernels; the test fails if neither kernel of it was launched."""
    taken = []
    monkeypatch.setenv("DIFF_TRANSFORMER_HOPPER", "0")
    for name in ("plan_forward", "plan_backward"):
        compute = getattr(operator, name)
        monkeypatch.setattr(operator, name, lambda *a, _name=name, _to=compute: taken.append(_name) or _to(*a))
    yield
    assert taken == ["plan_forward", "plan_backward"]


def inputs(dtype, shared=False, **sizes):
    """Two maps of the same keys if ``shared``: the gradient of either is then that of both."""
    x = make_inputs(**({"B": 2, "H": 4, "T": LENGTH, "device": DEVICE} | sizes), dtype=dtype)
    return x._replace(k2=x.k1) if shared else x


def in_fp64(x):
    wide = x.to(torch.float64)
    return wide._replace(k2=wide.k1) if x.k2 is x.k1 else wide


def run(function, x, options):
    out = function(*x, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return out, *torch.autograd.grad(out, x, dout)


def compare(x, options):
    mask = options.get("attn_mask")
    wide = options if mask is None or mask.dtype == torch.bool else options | {"attn_mask": mask.double()}
    exact = run(by("reference"), in_fp64(x), wide)
    by_eager = (None,) * len(exact) if x.q1.dtype == torch.float32 else run(eager, x, options)
    if x.lam.dim() == 0:
        by_eager = (*by_eager[:-1], exact[-1] + 2 * spread_of_dlam(x, options))
    for name, *values in zip(("out", *x._fields), run(by("triton"), x, options), exact, by_eager, strict=True):
        assert_within_budget(*values, what=name)


def spread_of_dlam(x, options):
    """How far off a gradient that is one number may be, whose own value or error is near 0 by chance: the root of the
    sum of the squares of the errors of each row's own gradient in eager PyTorch; in fp32, of the rows' gradients, such
    that 1e-5 of it are allowed (in fp32 eager's sum is off by more than 1e-5 of its value too)."""
    rows = x._replace(lam=x.lam.detach().expand(*x.q1.shape[:3], 1).clone().requires_grad_())
    exact = run(by("reference"), in_fp64(rows), options)[-1]
    if x.q1.dtype == torch.float32:
        return 1e-5 * exact.norm() / 4  # compare and the budget double it
    return (run(eager, rows, options)[-1].double() - exact).norm()


@pytest.mark.parametrize("case", FEATURES)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_contract(dtype, D, case):
    sizes, options = FEATURES[case]
    compare(inputs(dtype, **({"D": D} | sizes)), options())


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_plain_triton(dtype, D, case):
    sizes, options = FEATURES[case]
    compare(inputs(dtype, **({"D": D} | sizes)), options())


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_widths(dtype, widths):
    D, Dv = widths
    compare(inputs(dtype, B=1, H=2, T=333, D=D, Dv=Dv), CAUSAL)


@pytest.mark.parametrize("T", [4096, 16384, 65536])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_long(dtype, D, T):
    """Of 64 queries alone is the gradient not 0, so that the fp64 reference needs no T x T maps. All see many keys: to
    a query with one key, eager attention gives the exact gradient, 0, and its error would be no yardstick."""
    x = inputs(dtype, B=1, H=1, T=T, D=D)
    rows = torch.linspace(T // 2, T - 1, 64, device=DEVICE).long()
    some = x._replace(**{name: getattr(x, name).detach()[:, :, rows].requires_grad_() for name in ("q1", "q2", "lam")})
    seen = {"attn_mask": torch.arange(T, device=DEVICE) <= rows[:, None]}
    dout = torch.randn(1, 1, 64, 2 * D, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)

    def of_rows(function, y):
        out = function(*y, **seen)
        return out, *torch.autograd.grad(out, y, dout.to(out.dtype))

    out = by("triton")(*x, **CAUSAL)
    grads = torch.autograd.grad(out, x, torch.zeros_like(out).index_copy(2, rows, dout))
    found = dict(zip(("out", *x._fields), (out, *grads), strict=True))
    for name in ("out", "q1", "q2", "lam"):
        whole, found[name] = found[name], found[name][:, :, rows]
        assert name == "out" or torch.count_nonzero(whole) == torch.count_nonzero(found[name])
    exact, by_eager = of_rows(by("reference"), some.to(torch.float64)), of_rows(eager, some)
    for name, *values in zip(found, found.values(), exact, by_eager, strict=True):
        assert_within_budget(*values, what=name)


def test_two_passes_repeat_bit_for_bit():
    x = make_inputs(B=2, H=4, T=2048, D=64, dtype=torch.bfloat16, device="cuda")
    first, second = (run(by("triton"), x, CAUSAL) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


ENDS = [0, 7 * LENGTH // 10, 7 * LENGTH // 10, LENGTH, LENGTH + 63]  # the second document is empty


def packed(dtype, D, shared):
    x = make_inputs(B=1, H=4, G=2, T=ENDS[-1], D=D, dtype=dtype, device=DEVICE)
    x = Inputs(*(y[0].transpose(0, 1).detach().clone().requires_grad_() for y in x))
    return x._replace(k2=x.k1) if shared else x


def compare_documents(name, x, options):
    """All documents at once, with the error of a call of SDPA for each document as the yardstick."""

    def at_once(*x, **options):
        ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
        return diff_attention_varlen(*x, ends, ends, backend=name, **options)

    def one_by_one(backend):
        lengths = [b - a for a, b in pairwise(ENDS)]

        def attend(*x, **options):
            documents = zip(*(y.transpose(0, 1)[None].split(lengths, dim=2) for y in x), strict=True)
            outs = [by(backend)(*document, **options) for document in documents]
            return torch.cat(outs, dim=2)[0].transpose(0, 1)

        return attend

    exact, by_sdpa = run(one_by_one("reference"), in_fp64(x), options), run(one_by_one("sdpa"), x, options)
    for what, *three in zip(("out", *x._fields), run(at_once, x, options), exact, by_sdpa, strict=True):
        assert_within_budget(*three, what=what)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("shared", [False, True], ids=["two keys", "one key"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_documents(dtype, D, shared):
    compare_documents("triton", packed(dtype, D, shared), CAUSAL)


def test_memory_grows_with_the_length_not_its_square():
    def peak(T):
        x = make_inputs(B=1, H=4, T=T, D=64, dtype=torch.bfloat16, device="cuda")
        return peak_memory(lambda: diff_attention(*x, is_causal=True, backend="triton").sum().backward(), "cuda")

    assert peak(16384) < 2.2 * peak(8192)


def test_more_elements_than_32_bits_count():
    """The last head begins beyond element 2^31 of its tensor, in which the heads before are never written."""
    H, T, D = 2, 64, 64
    far = 2**31 // D + 1
    storage = torch.zeros(far * D + T * D, dtype=torch.bfloat16, device="cuda")
    apart = storage.as_strided((1, H, T, D), (0, far * D, D, 1))
    x = make_inputs(B=1, H=H, T=T, D=D, dtype=torch.bfloat16, device="cuda", requires_grad=False)
    apart.copy_(x.k1)
    out = diff_attention(x.q1, x.q2, apart, x.k2, x.v, x.lam, is_causal=True, backend="triton")
    assert torch.equal(out, diff_attention(*x, is_causal=True, backend="triton"))


def test_compiles_with_inductor():
    x = make_inputs(B=2, H=4, T=512, D=64, dtype=torch.bfloat16, device="cuda")

    def attend(*x):
        return diff_attention(*x, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True)
    for value, expected in zip(run(compiled, x, {}), run(attend, x, {}), strict=True):
        assert torch.equal(value, expected)
