"""The Triton kernels through the operator's contract against the fp64 reference; interpreted where there is no GPU.

Tiles are of 32 by 32 under the interpreter, so that lengths around 70 have tiles of every kind: whole, cut by the
causal limit, by the window and by the end. Widths up to 64 take the forward that computes both maps at once and the
backward of one launch a kernel; wider ones the other forms.
"""

import logging
import math
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

from diff_transformer.errors import UserError
from diff_transformer.ops import diff_attention
from diff_transformer.ops.call import OPERANDS, Call
from diff_transformer.testing import assert_within_budget, make_inputs

triton = pytest.importorskip("triton", reason="the kernels are written in Triton")

from diff_transformer.ops.triton import interpreted, operator  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="neither a GPU nor TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # NumPy on rows that see nothing
]


# name: (arguments of make_inputs beside B = 1, H = 1, T = 70, D = 16; arguments of diff_attention)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"B": 2, "H": 2, "T": 40}, {}),
    "causal": ({"H": 2}, {"is_causal": True}),
    "cross, 33 on 70": ({"T": 33, "S": 70}, {}),
    "causal, 33 on 100": ({"T": 33, "S": 100}, {"is_causal": True}),
    "causal, 100 on 33": ({"T": 100, "S": 33}, {"is_causal": True}),
    "one query": ({"T": 1, "S": 70}, {"is_causal": True}),
    "one query and key": ({"T": 1}, {"is_causal": True}),
    "whole tiles": ({"T": 64}, {"is_causal": True}),
    "window 1": ({}, {"is_causal": True, "window": 1}),
    "window 20": ({"T": 100}, {"is_causal": True, "window": 20}),
    "window 70": ({"T": 130}, {"is_causal": True, "window": 70}),
    "window 20, 33 on 100": ({"T": 33, "S": 100}, {"is_causal": True, "window": 20}),
    "window 20, 100 on 33": ({"T": 100, "S": 33}, {"is_causal": True, "window": 20}),
    "grouped keys": ({"H": 4, "G": 2, "T": 40}, {"is_causal": True}),
    "shared noise, grouped keys": ({"H": 6, "Hn": 2, "G": 1, "T": 40}, {"is_causal": True}),
    "width 96": ({"D": 96}, {"is_causal": True}),
    "width 96, shared noise": ({"H": 4, "Hn": 2, "G": 1, "T": 40, "D": 96, "Dv": 33}, {"is_causal": True}),
    "width 128": ({"T": 40, "D": 128}, {"is_causal": True}),
    "odd widths": ({"D": 24, "Dv": 41}, {"is_causal": True}),
    "narrow": ({"D": 5, "Dv": 3}, {"is_causal": True}),
    "wide keys, narrow values": ({"T": 40, "D": 80, "Dv": 16}, {"is_causal": True}),
    "negative scale": ({}, {"scale": -0.3, "is_causal": True}),
    "scale 0": ({"T": 40}, {"scale": 0.0}),
    "sharp maps": ({}, {"scale": 3.0, "is_causal": True}),
    "padding": ({"B": 2, "T": 33, "S": 70}, {"attn_mask": random_mask(2, 1, 1, 70)}),
    "padding, width 96": ({"B": 2, "T": 40, "D": 96}, {"attn_mask": random_mask(2, 1, 1, 40), "is_causal": True}),
    "mask [T, S]": ({"T": 33}, {"attn_mask": random_mask(33, 33)}),
    "mask per head, shared noise": ({"H": 4, "Hn": 2, "G": 1, "T": 33}, {"attn_mask": random_mask(1, 4, 33, 33)}),
    "mask and window": ({}, {"attn_mask": random_mask(1, 1, 70, 70), "is_causal": True, "window": 30}),
    "blind rows": ({"B": 2, "T": 40}, {"attn_mask": blind_rows(2, 40, 40)}),
    "hidden queries": ({"T": 33}, {"attn_mask": (torch.arange(33) % 3 > 0).view(33, 1), "is_causal": True}),
    "hidden queries, by entry and head": (
        {"B": 2, "H": 2, "T": 33},
        {"attn_mask": (torch.arange(2 * 2 * 33) % 5 > 0).view(2, 2, 33, 1).expand(2, 2, 33, 33)},
    ),
    "bias": ({"H": 2, "T": 40}, {"attn_mask": torch.linspace(-3, 1, 2 * 40).view(1, 2, 1, 40), "is_causal": True}),
    "additive mask": (
        {"B": 2, "T": 40},
        {"attn_mask": as_bias(blind_rows(2, 40, 40))},
    ),
    "strided": ({"H": 2, "T": 40, "strided": True, "G": 1}, {"is_causal": True}),
    "lam scalar": ({"T": 40, "lam_shape": ()}, {}),
    "lam per head": ({"H": 2, "T": 40, "lam_shape": (2,)}, {}),
    "lam per query": ({"T": 40, "lam_shape": (1, 1, 40, 1)}, {}),
}  # fmt: skip
SOME = ("causal", "window 20", "shared noise, grouped keys", "width 96", "padding", "blind rows")


def inputs(case, dtype=torch.float32, **changes):
    sizes, options = CASES[case]
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    sizes = {"B": 1, "H": 1, "T": 70, "device": DEVICE} | sizes | changes
    return make_inputs(**sizes, dtype=dtype), options


@pytest.mark.parametrize("case", CASES)
def test_fp32(case):
    assert_good("triton", *inputs(case))


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(case, dtype):
    if dtype == torch.bfloat16 and case != "causal" and DEVICE == "cpu":
        pytest.skip("the interpreter computes bf16 in fp32, which test_fp32 covers")
    assert_good("triton", *inputs(case, dtype))


def test_rows_that_see_nothing_are_exactly_zero():
    assert_zero_where_nothing_is_visible(run(by("triton"), *inputs("blind rows")))


def test_scores_far_below_zero():
    """Log-sum-exps are near -165, so that a key that does not exist (score 0) would count as exp2(165), infinity."""
    x = make_inputs(B=1, H=1, T=40, device=DEVICE)
    x = x._replace(**{n: (y.abs() / 4 + 4.5).detach().requires_grad_() for n, y in x._asdict().items() if n[0] == "q"})
    x = x._replace(**{n: (y.abs() / 4 - 4.5).detach().requires_grad_() for n, y in x._asdict().items() if n[0] == "k"})
    exact = in_fp64(x, {})
    assert exact["out"].abs().max() > 0
    by_eager, found = run(through_log_sum_exps, x, {}), run(by("triton"), x, {})
    for name in list(found)[1:]:
        assert_within_budget(found[name], exact[name], by_eager[name], what=name)


def through_log_sum_exps(q1, q2, k1, k2, v, lam, **_):
    """Eager attention whose weights are made as in every fused backward, from a log-sum-exp in the inputs' dtype: at
    -165 it is rounded to 8e-6, and by as much the weights of a row are off together. Softmax's own are not."""
    maps = []
    for q, k in ((q1, k1), (q2, k2)):
        scores = q @ k.transpose(-1, -2) / math.log(2) / q.shape[-1] ** 0.5
        sums = torch.logsumexp(scores * math.log(2), -1, keepdim=True) / math.log(2)
        maps.append(torch.exp2(scores - sums))
    return (maps[0] - lam * maps[1]) @ v


@pytest.mark.parametrize("sizes", [{"D": 16, "H": 2, "G": 1}, {"D": 96}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_shared_keys(sizes, dtype):
    """k2 may be k1, read once: its gradient is the sum of both."""
    x = make_inputs(**({"B": 1, "H": 1, "T": 40, "device": DEVICE} | sizes), dtype=dtype)
    x = x._replace(k2=x.k1.detach().clone().requires_grad_())
    exact, by_eager = in_fp64(x, {"is_causal": True}), run(eager, x, {"is_causal": True})
    out = diff_attention(x.q1, x.q2, x.k1, x.k1, x.v, x.lam, is_causal=True, backend="triton")
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    together = ("q1", "q2", "k1", "v", "lam")
    values = dict(zip(together, torch.autograd.grad(out, [getattr(x, n) for n in together], dout), strict=True))
    assert_within_budget(out, exact["out"], by_eager["out"])
    sums = [given | {"dk1": given["dk1"] + given["dk2"]} for given in (exact, by_eager)]
    for name, value in values.items():
        assert_within_budget(value, *(given[f"d{name}"] for given in sums), what=f"d{name}")


def test_shared_keys_stay_shared_under_autocast(monkeypatch):
    given = []
    compute = operator.plan_forward
    monkeypatch.setattr(operator, "plan_forward", lambda *a: given.append(a[0].k2) or compute(*a))
    x = make_inputs(B=1, H=1, T=5, D=4, requires_grad=False, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        diff_attention(x.q1, x.q2, x.k1, x.k1, x.v, x.lam, backend="triton")
        diff_attention(*x, backend="triton")
    assert given[0] is None
    assert given[1].dtype == torch.float16


def test_values_of_keys_beyond_the_end_are_not_read():
    """The cache behind a view holds NaN: 0 * NaN would show."""
    x = make_inputs(B=1, H=1, T=40, S=64, requires_grad=False, device=DEVICE)
    whole = [y.clone() for y in (x.k1, x.k2, x.v)]
    for y in whole:
        y[:, :, 45:] = float("nan")
    k1, k2, v = (y[:, :, :45] for y in whole)
    leaves = [y.detach().requires_grad_() for y in (x.q1, x.q2, k1, k2, v, x.lam)]
    for value in run(by("triton"), leaves, {"is_causal": True}).values():
        assert value.isfinite().all()


def test_rows_apart_in_memory():
    """Tensors whose last stride is not 1 are copied."""
    x = make_inputs(B=1, H=2, T=40, D=16, Dv=16, device=DEVICE, requires_grad=False)
    turned = [y.mT.contiguous().mT for y in x[:5]]
    assert {y.stride(-1) for y in turned} == {40}
    out = diff_attention(*turned, x.lam, is_causal=True, backend="triton")
    assert_within_budget(out, diff_attention(*x, is_causal=True, backend="reference"))


def test_what_a_backward_needs_is_saved_only_for_one():
    x, options = inputs("causal")
    outputs = []
    with torch.no_grad():
        outputs.append(operator.forward(*x, None, None, None, None, True, None, 0.25, True, False))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = diff_attention(*x, backend="triton", **options)
    assert [y.numel() for y in outputs[0][1:]] == [0, 0, 0, 0]
    assert sum(y.numel() for y in saved) <= sum(y.numel() for y in x) + 2 * out.numel() + 2 * out.numel() // 32


@pytest.mark.parametrize(
    "form",
    ["plain", *(pytest.param(f, marks=pytest.mark.slow) for f in ("documents", "shared keys", "mask"))],
)
def test_opcheck(form):
    x = make_inputs(B=1, H=2, G=1, T=7, S=9, D=3, Dv=5, device=DEVICE)
    k2 = None if form == "shared keys" else x.k2
    mask = random_mask(1, 1, 7, 9).to(DEVICE) if form == "mask" else None
    ends = (None, None)
    if form == "documents":
        ends = tuple(torch.tensor(e, dtype=torch.int32, device=DEVICE) for e in ([0, 3, 3, 7], [0, 4, 5, 9]))
    call, by_hopper = Call(*x[:3], k2, x.v, x.lam, None, mask, *ends, True, 4, 0.5), True
    torch.library.opcheck(operator.forward, (*call[:OPERANDS], by_hopper, True))
    operands = [y.detach() if isinstance(y, torch.Tensor) else y for y in call[:OPERANDS]]
    out, *saved = operator.forward(*operands, by_hopper, True)
    arguments = (torch.randn_like(out).transpose(1, 2), *operands, by_hopper, *saved)
    torch.library.opcheck(operator.backward, arguments)


@pytest.mark.parametrize("shape", [(33, 1), (1, 2, 1, 1), (1, 1, 33, 33)])
def test_masks_of_whole_queries_do_not_reach_the_kernels(monkeypatch, shape):
    seen = []
    kernels = operator.forward

    def records(*arguments):
        seen.append(arguments[7])
        return kernels(*arguments)

    monkeypatch.setattr(operator, "forward", records)
    x = make_inputs(B=1, H=2, T=33, device=DEVICE)
    mask = torch.ones(shape, dtype=torch.bool, device=DEVICE)
    diff_attention(*x, attn_mask=mask, backend="triton")
    assert [x is None for x in seen] == [shape[-1] == 1]


def test_autocast():
    x = make_inputs(B=1, H=1, T=20, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = diff_attention(*x, is_causal=True, backend="triton")
    assert out.dtype == torch.float16
    assert torch.equal(out, diff_attention(*x.to(torch.float16), is_causal=True, backend="triton"))
    gradients = torch.autograd.grad(out.float().square().sum(), x)
    assert {g.dtype for g in gradients} == {torch.float32}
    assert all(g.any() for g in gradients)


def test_few_queries_over_many_keys_are_decoded(monkeypatch):
    from diff_transformer.ops.triton import decode

    taken = []
    compute = decode.attend_decode
    monkeypatch.setattr(decode, "attend_decode", lambda *a: taken.append(a[0].shape[2]) or compute(*a))
    x = make_inputs(B=1, H=1, T=9, S=256, D=8, device=DEVICE)
    for T, S in ((1, 256), (8, 256), (9, 256), (1, 255)):
        y = make_inputs(B=1, H=1, T=T, S=S, D=8, device=DEVICE)
        with torch.no_grad():
            out = diff_attention(*y, is_causal=True, backend="triton")
        assert_within_budget(out, diff_attention(*y, is_causal=True, backend="reference"))
    assert taken == [1, 8]
    diff_attention(*x._replace(q1=x.q1[:, :, :1], q2=x.q2[:, :, :1], lam=x.lam[:, :, :1]), backend="triton")
    assert taken == [1, 8], "a gradient is needed, which decoding does not give"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"D": 136}, "q1 has width 136 and v width 16; the Triton kernels take at most 128 and 256"),
        ({"Dv": 264}, "q1 has width 16 and v width 264; the Triton kernels take at most 128 and 256"),
        ({"dtype": torch.float64}, "the Triton kernels take float32, bfloat16 and float16; give backend='reference'"),
    ],
)
def test_refused_before_launch(sizes, message):
    x = make_inputs(**({"B": 1, "H": 1, "T": 3, "D": 16, "Dv": 16, "device": DEVICE} | sizes))
    with pytest.raises(UserError, match=f"backend='triton' is not available: {message}"):
        diff_attention(*x, backend="triton")


def test_says_which_kernels_ran(caplog):
    operator._announce.cache_clear()
    x = make_inputs(B=1, H=1, T=3, D=4, device=DEVICE)
    with caplog.at_level(logging.INFO, logger="diff_transformer"):
        diff_attention(*x, backend="triton").sum().backward()
    said = [r.message.partition(f"on {x.q1.device}, ")[2].partition(":") for r in caplog.records]
    assert [kernels.split(":")[0] for _, _, kernels in said] == [" plain Triton"] * 2
