"""The decoding kernel through its contract against the fp64 reference; under the interpreter where there is no GPU."""

from typing import Any

import pytest
import torch

from diff_transformer import diff_attention, diff_attention_decode
from diff_transformer.ops.call import OPERANDS, check
from diff_transformer.testing import assert_within_budget, eager_diff_attention, make_inputs

decode = pytest.importorskip("diff_transformer.ops.triton.decode", reason="the kernel is written in Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")


@pytest.fixture(autouse=True)
def many_multiprocessors(monkeypatch):
    """As many splits as the keys allow, so that small caches are cut."""
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 1000)


def inputs(**sizes: Any):
    defaults: dict[str, Any] = {"B": 1, "H": 2, "T": 1, "S": 150, "requires_grad": False, "device": DEVICE}
    return make_inputs(**(defaults | sizes))


def kernel(q1, q2, k1, k2, v, lam, attn_mask=None, is_causal=False, window=None, scale=None, lengths=None):
    call = check(q1, q2, k1, k2, v, lam, attn_mask, is_causal, window, scale)
    assert decode.takes(call)
    return decode.attend_decode(*call[:OPERANDS], lengths)


def reference(x, **options):
    return diff_attention(*x.to(torch.float64), backend="reference", **options)


def random_mask(*shape):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4).to(DEVICE)


def padded(B, S, first, last):
    """Only keys first to last - 1 are there: [B, 1, 1, S], as generation over a padded static cache has it."""
    mask = torch.zeros(B, 1, 1, S, dtype=torch.bool, device=DEVICE)
    mask[..., first:last] = True
    return mask


def blind(*shape):
    """Query 0 of head 0 may attend to nothing."""
    mask = random_mask(*shape)
    mask[:, 0, 0] = False
    return mask


# name: (arguments of make_inputs, arguments of diff_attention)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one query": ({"B": 2}, {"is_causal": True}),
    "one key": ({"S": 1}, {"is_causal": True}),
    "not causal": ({"T": 3}, {}),
    "causal": ({"T": 3}, {"is_causal": True}),
    "eight queries, two tiles of rows": ({"T": 8, "H": 6, "G": 2, "S": 70}, {"is_causal": True}),
    "more queries than keys": ({"T": 5, "S": 3}, {"is_causal": True}),
    "grouped keys": ({"B": 2, "H": 4, "G": 2}, {}),
    "shared noise": ({"H": 4, "Hn": 2, "T": 2}, {"is_causal": True}),
    "shared noise, grouped keys": ({"H": 6, "Hn": 2, "G": 1, "T": 2}, {"is_causal": True}),
    "window": ({"T": 1}, {"is_causal": True, "window": 20}),
    "window, three queries": ({"T": 3}, {"is_causal": True, "window": 70}),
    "window beyond the keys": ({"T": 2}, {"is_causal": True, "window": 1000}),
    "width 96": ({"D": 96, "S": 70}, {}),
    "width 128": ({"D": 128, "S": 70}, {}),
    "odd widths": ({"D": 24, "Dv": 41}, {}),
    "narrow": ({"D": 5, "Dv": 3}, {}),
    "values as wide as queries": ({"D": 32, "Dv": 32}, {}),
    "scale": ({}, {"scale": 1.5}),
    "negative scale": ({}, {"scale": -0.5}),
    "left padding": ({"B": 2}, {"attn_mask": padded(2, 150, 70, 150)}),
    "unused cache": ({"B": 2}, {"attn_mask": padded(2, 150, 0, 9)}),
    "one key visible": ({}, {"attn_mask": padded(1, 150, 77, 78)}),
    "nothing visible": ({}, {"attn_mask": padded(1, 150, 0, 0)}),
    "mask of queries": ({"B": 2, "T": 3}, {"attn_mask": random_mask(2, 1, 3, 150), "is_causal": True}),
    "mask of heads, shared noise": ({"H": 4, "Hn": 2, "T": 2}, {"attn_mask": random_mask(1, 4, 2, 150)}),
    "mask of all keys at once": ({"B": 2}, {"attn_mask": torch.tensor([True, False], device=DEVICE).view(2, 1, 1, 1)}),
    "mask and window": ({"T": 3}, {"attn_mask": random_mask(3, 150), "is_causal": True, "window": 30}),
    "a blind row": ({"T": 3}, {"attn_mask": blind(1, 2, 3, 150)}),
    "strided": ({"B": 2, "H": 4, "G": 2, "T": 2, "strided": True}, {"is_causal": True}),
    "lam scalar": ({"lam_shape": ()}, {}),
    "lam per head": ({"H": 4, "G": 2, "lam_shape": (4,)}, {}),
    "lam per query": ({"T": 3, "lam_shape": (1, 1, 3, 1)}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_fp32(case):
    sizes, options = CASES[case]
    x = inputs(**sizes)
    assert_within_budget(kernel(*x, **options), reference(x, **options))


@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
def test_any_number_of_slices(monkeypatch, multiprocessors):
    """One slice is written at once, without a second kernel; here one, two and three."""
    monkeypatch.setattr(decode, "multiprocessors", lambda device: multiprocessors)
    x = inputs(H=4, G=2, T=2, S=200)
    assert_within_budget(kernel(*x, is_causal=True), reference(x, is_causal=True))


@pytest.mark.parametrize(
    ("keys", "programs", "splits"),
    [
        (4096, 12, 22),  # 264 programs: two on each of 132 multiprocessors
        (4096, 768, 1),  # 0.97 of the places of three waves
        (4096, 192, 4),  # one, two and three splits take 0.73 of the places, four 0.97
        (4096, 300, 4),  # 0.57, 0.76, 0.85, 0.91
        (128, 192, 1),  # not fewer than 64 keys a split: of one and two, which take equally many, the fewer
        (512, 12, 8),
        (5, 1, 1),
        (65536, 1, 128),  # as many as the second kernel can hold
    ],
)
def test_number_of_slices_on_132_multiprocessors(keys, programs, splits):
    assert decode.split_count(keys, programs, 132) == splits


@pytest.mark.parametrize("case", ["causal", "shared noise, grouped keys", "left padding", "width 96"])
def test_fp16(case):
    sizes, options = CASES[case]
    x = inputs(**sizes, dtype=torch.float16)
    eager = eager_diff_attention(*x, **options)
    out = kernel(*x, **options)
    assert out.dtype == torch.float16
    assert_within_budget(out, reference(x, **options), eager)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("T", [1, 3])
def test_lengths(T, window):
    """Keys beyond a length are not read; each batch entry is what it would be with its keys alone."""
    used = [0, 1, 64, 100, 150, 1000, -5]
    x = inputs(B=len(used), H=2, G=1, T=T)
    lengths = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    poisoned = [y.clone() for y in x[2:5]]
    for y in poisoned:
        for b, n in enumerate(used):
            y[b, :, max(0, n) :] = NAN
    out = kernel(*x[:2], *poisoned, x.lam, is_causal=True, window=window, lengths=lengths)
    for b, n in enumerate(used):
        n = min(max(n, 0), 150)
        alone = type(x)(*(y[b : b + 1, :, :n] if i in (2, 3, 4) else y[b : b + 1] for i, y in enumerate(x)))
        exact = reference(alone, is_causal=True, window=window) if n else torch.zeros(1, 2, T, 32, device=DEVICE)
        assert_within_budget(out[b : b + 1], exact, what=f"length {n}")


def test_lengths_without_causality_and_with_a_mask():
    x, mask = inputs(B=2, T=2), random_mask(2, 1, 2, 150)
    lengths = torch.tensor([[40, 0], [150, 0]], device=DEVICE)[:, 0]  # int64 and strided
    below = torch.arange(150, device=DEVICE) < lengths.view(2, 1, 1, 1)
    out = kernel(*x, attn_mask=mask, lengths=lengths)
    assert_within_budget(out, reference(x, attn_mask=mask & below))


def test_views_of_a_static_cache():
    """Both maps' keys side by side in one tensor, heads apart by the size of the cache, the end unused."""
    x = inputs(B=2, H=4, G=2, T=2, S=100)
    keys, values = torch.full((2, 2, 170, 32), NAN, device=DEVICE), torch.full((2, 2, 170, 32), NAN, device=DEVICE)
    keys[:, :, :100], values[:, :, :100] = torch.cat([x.k1, x.k2], -1), x.v
    lengths = torch.full((2,), 100, device=DEVICE)
    out = kernel(x.q1, x.q2, keys[..., :16], keys[..., 16:], values, x.lam, is_causal=True, lengths=lengths)
    assert_within_budget(out, reference(x, is_causal=True))


def test_a_slice_beyond_the_last_key_reads_nothing():
    """Of six splits of whole tiles, 80 keys each, five hold 390; NaN and a mask of True lie behind the keys."""
    x = inputs(S=390)
    assert decode.split_count(390, 2, 1000) == 6
    assert decode.tile(16, 32, 4, False).keys == 16
    keys = [torch.cat([y, torch.full_like(y, NAN)], 2)[:, :, :390] for y in x[2:5]]
    mask = torch.ones(1, 1, 1, 780, dtype=torch.bool, device=DEVICE)[..., :390]
    assert_within_budget(kernel(*x[:2], *keys, x.lam, attn_mask=mask), reference(x))


def test_one_key_for_both_maps():
    x = inputs(H=4, G=2, T=2)
    x = x._replace(k2=x.k1)
    assert_within_budget(kernel(*x, is_causal=True), reference(x, is_causal=True))
    other_start = type(x)(x.q1, x.q2, x.k1[:, :, 1:], x.k1[:, :, :-1], x.v[:, :, 1:], x.lam)
    assert_within_budget(kernel(*other_start, is_causal=True), reference(other_start, is_causal=True))


def arguments_of(x, **options):
    return check(*x, **options)[:OPERANDS]


@pytest.mark.parametrize("case", ["causal", pytest.param("left padding", marks=pytest.mark.slow)])
def test_opcheck(case):
    sizes, options = CASES[case]
    x = inputs(**sizes)
    torch.library.opcheck(decode.attend_decode, (*arguments_of(x, **options), None))
    lengths = torch.ones(x.q1.shape[0], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(decode.attend_decode, (*arguments_of(x, **options), lengths))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nine queries": ({"T": 9}, {}),
    "additive mask": ({}, {"attn_mask": torch.zeros(1, 1, 1, 150)}),
    "gradients": ({"requires_grad": True}, {}),
}


def test_what_it_takes_and_what_not():
    assert decode.takes(check(*inputs(T=8), None, True))
    for sizes, options in REFUSED.values():
        assert not decode.takes(check(*inputs(**sizes), options.get("attn_mask"), True))
    x = inputs()
    assert not decode.takes(check(*x._replace(v=torch.cat([x.v, x.v], -1)[..., ::2]), None, True))


def test_the_public_function_takes_the_kernel_and_lengths(monkeypatch):
    x, lengths = inputs(B=2, S=300), torch.tensor([150, 40], device=DEVICE)
    taken, compute = [], decode.attend_decode

    def attend(*arguments):
        taken.append(arguments[-1])
        return compute(*arguments)

    monkeypatch.setattr(decode, "attend_decode", attend)
    diff_attention_decode(*x, lengths=lengths, backend="triton")
    diff_attention_decode(*x, backend="triton")
    assert taken[0] is lengths
    assert taken[1:] == [None]
    short = inputs(B=2, S=40, requires_grad=True)
    diff_attention_decode(*short, lengths=lengths.clamp(max=40), backend="triton").sum().backward()
    assert len(taken) == 2, "a gradient is needed, which decoding does not give"


def test_where_the_kernel_does_not_fit_the_backend_computes():
    """Nine queries, with gradients: the ordinary kernels, and lengths as a mask."""
    x, lengths = inputs(B=2, T=9, S=40, requires_grad=True), torch.tensor([40, 20], device=DEVICE)
    out = diff_attention_decode(*x, lengths=lengths, backend="triton")
    alone = type(x)(*(y[1:, :, :20] if i in (2, 3, 4) else y[1:] for i, y in enumerate(x)))
    assert_within_budget(out[1:], reference(alone, is_causal=True))
    out.sum().backward()
    assert x.k1.grad is not None
    assert not x.k1.grad[1, :, 20:].any()
