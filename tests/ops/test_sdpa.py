"""Calls of scaled_dot_product_attention: how values are cut for a kernel, what is passed on, and that it is right."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diff_transformer.ops import reference, sdpa, table
from diff_transformer.ops.call import Call, check
from diff_transformer.testing import assert_within_budget, make_inputs


@pytest.fixture
def passed_on(monkeypatch):
    """(query heads, key heads, widths of queries and values, enable_gqa) of each call of SDPA."""
    seen = []

    def attention(q, k, v, *mask, enable_gqa=False, **options):
        assert k.shape[1] == v.shape[1]
        assert k.shape[-1] == q.shape[-1]
        assert options["scale"] > 0  # flash kernels take the maximum of a row before they scale
        seen.append((q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], enable_gqa))
        return q.new_empty(*q.shape[:3], v.shape[-1])

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attention)
    return seen


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({}, {}, [(4, 2, 64, 64, True)] * 4),
        ({"D": 104}, {}, [(4, 2, 104, 104, True)] * 4),
        ({"D": 260}, {}, [(4, 4, 260, 260, False)] * 4),
        ({"Dv": 64}, {"shared": True}, [(8, 2, 64, 64, True)]),
        ({"Dv": 65}, {}, [(4, 2, 64, 64, True)] * 4),
        ({}, {"masked": True}, [(4, 4, 64, 64, False)] * 4),
        ({"Dv": 64}, {"shared": True, "masked": True}, [(8, 8, 64, 64, False)]),
        ({}, {"window": 3}, [(4, 4, 64, 64, False)] * 4),
        ({}, {"is_causal": True, "scale": -0.125}, [(4, 2, 64, 64, True)] * 4),
        ({}, {"is_causal": True, "scale": 0.0}, [(4, 2, 64, 64, True)] * 4),
        ({"S": 12}, {"is_causal": True}, [(4, 4, 64, 64, False)] * 4),
        ({"S": 12}, {}, [(4, 2, 64, 64, True)] * 4),
        ({"T": 1, "S": 12}, {"is_causal": True}, [(4, 2, 64, 64, True)] * 4),
        ({"dtype": torch.float32}, {}, [(4, 4, 64, 64, False)] * 4),
        ({"dtype": torch.float64}, {}, [(4, 4, 64, 64, False)] * 4),
    ],
)  # fmt: skip
def test_what_a_gpu_gets(monkeypatch, passed_on, sizes, options, expected):
    """The maps are never materialised: keys are shared only where the kernel reads shared keys in place."""
    true = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    monkeypatch.setattr(sdpa, "fully_masked_rows", lambda *mask: None)  # PyTorch without CUDA cannot index there
    monkeypatch.setattr(sdpa, "position_mask", lambda T, S, causal, *mask: true if causal and T > 1 else None)
    with FakeTensorMode():
        T, S = sizes.get("T", 9), sizes.get("S", 9)
        D, Dv, dtype = sizes.get("D", 64), sizes.get("Dv"), sizes.get("dtype", torch.bfloat16)
        q1, q2, k1, k2 = (
            torch.empty(1, *size, D, dtype=dtype, device="cuda") for size in ((4, T), (4, T), (2, S), (2, S))
        )
        v = torch.empty(1, 2, S, Dv or 2 * D, dtype=dtype, device="cuda")
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool, device="cuda") if options.get("masked") else None
        lam = torch.empty(1, 4, T, 1, device="cuda")
        causal, window = options.get("is_causal", "window" in options), options.get("window")
        k2, scale = None if options.get("shared") else k2, options.get("scale", 0.125)
        out = sdpa.attend(Call(q1, q2, k1, k2, v, lam, None, mask, None, None, causal, window, scale))
    assert out.shape == (1, 4, T, v.shape[-1])
    assert passed_on == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_mask_that_is_cast_keeps_finite_values_finite(dtype):
    """finfo.min of a wider dtype is -inf in the queries'; a row of it would be hidden, and known to nobody."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    mask = torch.zeros(1, 1, 4, 4, dtype=wide)
    mask[..., 0, :], mask[..., 1, :2] = torch.finfo(wide).min, float("-inf")
    q = torch.zeros(1, 1, 4, 8, dtype=dtype)
    cast, _ = sdpa.mask_and_flag(4, 4, False, None, mask, None, q)
    assert cast.dtype == dtype
    assert torch.equal(cast == float("-inf"), mask == float("-inf"))


def test_softmax_attention_compiles_with_symbolic_heads():
    """As a model has them that is compiled for a second batch size: their number is computed from it."""
    q, k = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 5, 8)
    expected = sdpa.softmax_attention(q, k, k, None, True)
    compiled = torch.compile(sdpa.softmax_attention, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, k, None, True), expected)


@pytest.mark.parametrize(
    "sizes",
    [
        ({"T": 5}, {"T": 7}, {"T": 70}),
        ({"T": 5, "S": 9}, {"T": 7, "S": 30}),
        ({"H": 2}, {"H": 4}),
        ({"D": 8}, {"D": 16}),
    ],
    ids=["length", "both lengths", "heads", "width"],
)
def test_sizes_that_vary_compile_to_one_graph(sizes):
    """The second call makes the size symbolic; what is chosen by it must be a constant still."""

    def attend(*x):
        call = check(*x, is_causal=True, window=60)
        return sdpa.attend(call), table.prefers_triton(call)

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for size in sizes:
        x = make_inputs(**{"B": 1, "H": 1, "D": 16} | size)
        assert_within_budget(compiled(*x)[0], reference.attend(check(*x, is_causal=True, window=60)))
