"""The public operator for decoding where there is no GPU: lengths as a mask, and what it refuses."""

from typing import Any

import pytest
import torch

from diff_transformer import diff_attention, diff_attention_decode
from diff_transformer.errors import UserError
from diff_transformer.testing import assert_within_budget, make_inputs


def inputs(**sizes: Any):
    defaults: dict[str, Any] = {"B": 3, "H": 2, "T": 2, "S": 9, "requires_grad": False}
    return make_inputs(**(defaults | sizes))


def one_by_one(x, used, mask=None, **options):
    """Each batch entry with its first ``used`` keys alone, through the reference in fp64."""
    outs = []
    for b, n in enumerate(used):
        entry = [y[b : b + 1, :, :n] if i in (2, 3, 4) else y[b : b + 1] for i, y in enumerate(x)]
        visible = None if mask is None else mask[b : b + 1, ..., :n]
        exact = [y.double() for y in entry]
        outs.append(diff_attention(*exact, attn_mask=visible, is_causal=True, backend="reference", **options))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("window", [None, 3])
def test_lengths_are_the_keys_in_use(window, dtype):
    x, used = inputs(), [1, 5, 9]
    out = diff_attention_decode(*x, lengths=torch.tensor(used, dtype=dtype), window=window)
    assert_within_budget(out, one_by_one(x, used, window=window))


def test_lengths_and_masks():
    x, used = inputs(H=4, G=2), [2, 5, 9]
    mask = torch.rand(3, 1, 2, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    exact = one_by_one(x, used, mask)
    assert_within_budget(diff_attention_decode(*x, lengths=torch.tensor(used), attn_mask=mask), exact)
    additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    assert_within_budget(diff_attention_decode(*x, lengths=torch.tensor(used), attn_mask=additive), exact)


WAYS = ["auto", "reference", "sdpa"]


@pytest.mark.parametrize("used", [[1, 5, 7], [5, 5, 5], [0, 9, 4]], ids=str)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", [*WAYS, "compiled"])
def test_what_is_not_in_use_changes_nothing(way, garbage, used):
    x, lengths = inputs(H=4, G=2), torch.tensor(used)
    exact = one_by_one(x, used) if min(used) else None
    masks = torch.ones(3, 1, 1, 9, dtype=torch.bool), torch.zeros(3, 1, 1, 9)
    clean = diff_attention_decode(*x, lengths=lengths, attn_mask=masks[0], backend="reference")
    for b, n in enumerate(used):
        for cache in (x.k1, x.k2, x.v):
            cache[b, :, n:] = garbage
    call = diff_attention_decode
    if way == "compiled":
        call = torch.compile(diff_attention_decode, backend="aot_eager", fullgraph=True)
    backend = way if way in WAYS else "auto"
    with torch.no_grad():
        for mask in masks:
            assert_within_budget(call(*x, lengths=lengths, attn_mask=mask, backend=backend), clean)
        if exact is not None:
            assert_within_budget(call(*x, lengths=lengths, backend=backend), exact)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
def test_gradients_do_not_see_what_is_not_in_use(backend):
    x, used = inputs(H=4, G=2, requires_grad=True), [2, 5, 9]
    exact_x = x.to(torch.float64)
    exact = torch.autograd.grad(one_by_one(exact_x, used).sum(), exact_x)
    for b, n in enumerate(used):
        for cache in (x.k1, x.k2, x.v):
            cache.data[b, :, n:] = float("nan")
    out = diff_attention_decode(*x, lengths=torch.tensor(used), backend=backend)
    for name, value, gradient in zip(x._fields, torch.autograd.grad(out.sum(), x), exact, strict=True):
        assert_within_budget(value, gradient, what=name)


def test_no_keys_give_zero_and_too_many_are_all():
    x = inputs()
    out = diff_attention_decode(*x, lengths=torch.tensor([0, -3, 100]))
    assert not out[:2].any()
    assert torch.equal(out[2], diff_attention(*x, is_causal=True)[2])


def test_without_lengths_it_is_causal_attention():
    x = inputs()
    assert torch.equal(diff_attention_decode(*x, window=4), diff_attention(*x, is_causal=True, window=4))
    scaled = diff_attention(*x, is_causal=True, scale=0.3, backend="reference")
    assert torch.equal(diff_attention_decode(*x, scale=0.3, backend="reference"), scaled)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([1, 2, 3], UserError, r"lengths is a list; give None, or int32 or int64 \[3\], on cpu"),
    "float": (torch.ones(3), UserError, "lengths is .* torch.float32, cpu; give"),
    "bool": (torch.ones(3, dtype=torch.bool), UserError, "lengths is .* torch.bool"),
    "scalar": (torch.tensor(3), ValueError, r"lengths is \[\], torch.int64"),
    "wrong batch": (torch.ones(4, dtype=torch.int32), ValueError, r"lengths is \[4\]"),
    "device": (torch.ones(3, dtype=torch.int32, device="meta"), ValueError, "lengths is .* meta; .* on cpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lengths(case):
    lengths, error, message = BAD[case]
    with pytest.raises(error, match=message):
        diff_attention_decode(*inputs(), lengths=lengths)
