"""Every bad argument is refused with a message that says what was given and what is accepted."""

import numpy as np
import pytest
import torch

from diff_transformer.errors import UserError
from diff_transformer.ops import diff_attention, diff_attention_decode, diff_attention_varlen
from diff_transformer.testing import make_inputs

X = make_inputs(B=2, H=4, G=2, T=6, S=8, D=3, Dv=5, Hn=4, requires_grad=False)


BAD = {
    "not a tensor": ({"k1": [1.0]}, "k1 is a list; .*: give q1 .* and on one device"),
    "of numpy": ({"q1": X.q1.numpy()}, "q1 is a ndarray; q2 is"),
    "rank 3": ({"q2": X.q2[0]}, r"q2 is \[4, 6, 3\], torch.float32, cpu; k1 is"),
    "no keys for some": ({"k1": X.k1[:, :, :0]}, r"k1 is \[2, 2, 0, 3\]"),
    "no heads": ({"q2": X.q2[:, :0]}, r"q2 is \[2, 0, 6, 3\].* B, T and S alone may be 0"),
    "no width": ({"k2": X.k2[..., :0]}, r"k2 is \[2, 2, 8, 0\]"),
    "no values": ({"v": X.v[..., :0]}, r"v is \[2, 2, 8, 0\]"),
    "integers": (
        {name: getattr(X, name).long() for name in X._fields[:5]},
        "q1 is .* torch.int64, cpu; .*; all float32, bf",
    ),
    "mixed dtypes": ({"v": X.v.bfloat16()}, r"v is \[2, 2, 8, 5\], torch.bfloat16, cpu: give"),
    "mixed devices": ({"k2": X.k2.to("meta")}, "k2 is .* meta; v is .* cpu.* and on one device"),
    "batches": ({"k1": X.k1[:1]}, r"k1 is \[1, 2, 8, 3\]"),
    "query widths": ({"q2": X.q2[..., :2]}, r"q2 is \[2, 4, 6, 2\]"),
    "query lengths": ({"q2": X.q2[:, :, :5]}, r"q2 is \[2, 4, 5, 3\]"),
    "value length": ({"v": X.v[:, :, :7]}, r"v is \[2, 2, 7, 5\]"),
    "key heads": ({"k2": X.k2[:, :1]}, r"k2 is \[2, 1, 8, 3\]"),
    "noise heads": ({"q2": X.q2[:, :3]}, r"q2 is \[2, 3, 6, 3\].*, Hn divides H,"),
    "noise in groups": ({"q2": X.q2[:, :1]}, r"q2 is \[2, 1, 6, 3\].* where G divides Hn,"),
    "lam per wrong head": ({"lam": torch.rand(3)}, r"lam is \[3\], torch.float32, cpu; give a float, a scalar, \[4\]"),
    "lam [B, H]": ({"lam": torch.rand(2, 4)}, r"lam is \[2, 4\], .*broadcast to \[2, 4, 6, 1\]"),
    "lam of five dimensions": ({"lam": torch.rand(1, 2, 4, 6, 1)}, r"lam is \[1, 2, 4, 6, 1\]"),
    "lam elsewhere": ({"lam": torch.rand(4, device="meta")}, "lam is .* meta; .* on cpu"),
    "first": ({"first": torch.ones(3)}, r"first is \[3\], .*; give a float, a scalar, \[4\]"),
    "mask of no tensor": ({"attn_mask": [[True]]}, "attn_mask is a list"),
    "integer mask": (
        {"attn_mask": torch.ones(6, 8, dtype=torch.long)},
        r"attn_mask is \[6, 8\], torch.int64, cpu; give None, or bool",
    ),
    "mask shape": ({"attn_mask": torch.ones(8, 6) > 0}, r"attn_mask is \[8, 6\], .* broadcasts to \[2, 4, 6, 8\]"),
    "mask elsewhere": ({"attn_mask": torch.ones(6, 8, device="meta")}, "attn_mask is .* meta; .* on cpu"),
    "window 0": ({"window": 0, "is_causal": True}, "window is 0; give at least 1"),
    "window not causal": ({"window": 4}, "window=4 without is_causal=True"),
    "scale nan": ({"scale": float("nan")}, "scale is nan; give a finite number"),
    "unknown backend": ({"backend": "magic"}, "backend is 'magic'; give 'auto' or one of reference, blockwise"),
    "several backends": ({"backend": ["triton"]}, r"backend is \['triton'\]; give 'auto' or one of reference"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name):
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message):
        diff_attention(**X._asdict() | changes)


def test_causal_flags_of_numpy_and_of_a_compiler():
    tensors = make_inputs(T=6, D=3, requires_grad=False)
    causal, full = (diff_attention(*tensors, is_causal=flag) for flag in (True, False))
    assert torch.equal(diff_attention(*tensors, is_causal=np.True_), causal)
    assert torch.equal(diff_attention(*tensors, is_causal=np.False_), full)

    def attend(*x):
        return diff_attention(*x, is_causal=x[0].shape[2] > 4)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), causal)
    short = make_inputs(T=3, D=3, requires_grad=False)
    assert torch.equal(compiled(*short), diff_attention(*short))


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64], ids=str)
def test_numbers_of_numpy(number):
    x = make_inputs(T=6, D=3, requires_grad=False)
    options = {"is_causal": True, "window": np.int32(3), "scale": number(2)}
    expected = diff_attention(*x[:5], 1.0, is_causal=True, window=3, scale=2.0)
    assert torch.equal(diff_attention(*x[:5], number(1), **options), expected)


@pytest.mark.parametrize("shape", [(8,), (6, 8), (6, 1), (4, 6, 8), (1, 1, 1, 1), (2, 1, 6, 8), (2, 4, 1, 8)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_accepted_mask_shapes(shape, backend):
    mask = torch.rand(shape) > 0.3
    full = mask.expand(2, 4, 6, 8)
    expected = diff_attention(*X, attn_mask=full, backend="reference")
    torch.testing.assert_close(diff_attention(*X, attn_mask=mask, backend=backend), expected)


@pytest.mark.parametrize("backend", ["blockwise", "sdpa", "reference", "triton"], indirect=True)
def test_a_window_longer_than_any_row_and_a_scale_below_fp32(backend):
    """Positions plus a window just below 2**31 do not fit 32 bits."""
    x, ends = make_inputs(1, 1, 34, 8), torch.tensor([0, 11, 34], dtype=torch.int32)
    rows, lengths = [y[0].transpose(0, 1) for y in x], torch.tensor([3])
    newest = [y[:, :, :8].detach() for y in x[:2]]

    def results(**window):
        out = diff_attention(*x, is_causal=True, backend=backend, **window)
        packed = diff_attention_varlen(*rows, ends, ends, is_causal=True, backend=backend, **window)
        cached = diff_attention_decode(*newest, *x[2:5], 0.3, lengths=lengths, backend=backend, **window)
        return out, packed, cached, *torch.autograd.grad(out.sum() + packed.sum(), x)

    whole = results()
    for window in (34, 2**31 - 1, 2**31, 2**63 - 1, 10**30):
        for value, expected in zip(results(window=window), whole, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    for scale in (1e-50, -1e-45):
        out, flat = (diff_attention(*x, scale=s, backend=backend) for s in (scale, 0.0))
        assert torch.equal(out, flat)
        assert out.isfinite().all()
