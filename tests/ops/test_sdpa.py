"""The plans over scaled_dot_product_attention: which one a call takes, what it passes on, and that each is right."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diff_transformer.ops import reference, softmax_calls
from diff_transformer.ops.call import check, of_list
from diff_transformer.ops.softmax_calls import Sdpa, SdpaPlan
from diff_transformer.testing import assert_within_budget, make_inputs

CUDA = {
    "Ampere": ("flash", "efficient", "cudnn"),
    "Hopper": ("cudnn", "flash", "efficient"),
    "Turing": ("efficient",),
}


@pytest.fixture
def passed_on(monkeypatch):
    """(query heads, key heads, widths of queries and values, enable_gqa) of each call of SDPA."""
    seen = []

    def attention(q, k, v, *, enable_gqa=False, **options):
        assert k.shape[1] == v.shape[1]
        assert k.shape[-1] == q.shape[-1]
        seen.append((q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], enable_gqa))
        return q.new_empty(*q.shape[:3], v.shape[-1])

    monkeypatch.setattr(softmax_calls, "scaled_dot_product_attention", attention)
    return seen


@pytest.mark.parametrize(
    ("gpu", "sizes", "options", "expected"),
    [
        ("Ampere", {}, {}, [(8, 2, 128, 128, True)]),
        ("Ampere", {"D": 128}, {}, [(8, 2, 256, 256, True)]),
        ("Ampere", {"D": 96}, {}, [(8, 2, 192, 192, True)]),
        ("Ampere", {"D": 104}, {}, [(4, 2, 104, 104, True)] * 4),
        ("Ampere", {"D": 192}, {}, [(4, 2, 192, 192, True)] * 4),
        ("Ampere", {"Dv": 64}, {}, [(4, 2, 64, 64, True)] * 2),
        ("Ampere", {"Dv": 64}, {"shared": True}, [(8, 2, 64, 64, True)]),
        ("Ampere", {"D": 128, "Dv": 128}, {"shared": True}, [(8, 2, 128, 128, True)]),
        ("Ampere", {}, {"masked": True}, [(4, 4, 64, 128, False)] * 2),
        ("Ampere", {"Dv": 64}, {"shared": True, "masked": True}, [(8, 8, 64, 64, False)]),
        ("Ampere", {}, {"window": 3}, [(4, 4, 64, 128, False)] * 2),
        ("Ampere", {"S": 12}, {"is_causal": True}, [(4, 4, 64, 128, False)] * 2),
        ("Ampere", {"S": 12}, {}, [(8, 2, 128, 128, True)]),
        ("Ampere", {"T": 1, "S": 12}, {"is_causal": True}, [(8, 2, 128, 128, True)]),
        ("Ampere", {"T": 1, "S": 12}, {"window": 3}, [(4, 4, 64, 128, False)] * 2),
        ("Ampere", {"dtype": torch.float32}, {}, [(4, 4, 64, 128, False)] * 2),
        ("Ampere", {"dtype": torch.float64}, {}, [(4, 4, 64, 128, False)] * 2),
        ("Hopper", {}, {}, [(4, 2, 64, 128, True)] * 2),
        ("Hopper", {"D": 128}, {}, [(4, 2, 128, 128, True)] * 4),
        ("Hopper", {"D": 144}, {}, [(4, 2, 144, 144, True)] * 4),
        ("Turing", {}, {}, [(4, 4, 64, 128, False)] * 2),
    ],
)  # fmt: skip
def test_what_a_gpu_gets(monkeypatch, passed_on, gpu, sizes, options, expected):
    """The maps are never materialised: keys are shared only where the kernel reads shared keys in place."""
    monkeypatch.setattr(softmax_calls, "kernels_of", lambda *device: CUDA[gpu])
    for name in ("fully_masked_rows", "position_mask"):  # PyTorch without CUDA cannot index there
        monkeypatch.setattr(softmax_calls, name, lambda *mask: None)
    with FakeTensorMode():
        T, S = sizes.get("T", 9), sizes.get("S", 9)
        D, Dv, dtype = sizes.get("D", 64), sizes.get("Dv"), sizes.get("dtype", torch.bfloat16)
        q1, q2, k1, k2 = (
            torch.empty(1, *size, D, dtype=dtype, device="cuda") for size in ((4, T), (4, T), (2, S), (2, S))
        )
        v = torch.empty(1, 2, S, Dv or 2 * D, dtype=dtype, device="cuda")
        tensors = (q1, q2, k1, k1 if options.get("shared") else k2, v)
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool, device="cuda") if options.get("masked") else None
        lam = torch.empty(1, 4, T, 1, device="cuda")
        causal, window = options.get("is_causal", "window" in options), options.get("window")
        out = Sdpa.attend(of_list(*tensors, lam, mask, causal, window, 0.125))
    assert out.shape == (1, 4, T, v.shape[-1])
    assert passed_on == expected


@pytest.mark.parametrize(
    ("capability", "cudnn", "expected"),
    [
        ((9, 0), 91900, ("cudnn", "flash", "efficient")),
        ((9, 0), 91000, ("flash", "efficient", "cudnn")),
        ((8, 6), 91900, ("flash", "efficient", "cudnn")),
        ((12, 0), None, ("flash", "efficient")),
        ((7, 5), 91900, ("efficient",)),
    ],
)
def test_the_kernels_of_a_gpu(monkeypatch, capability, cudnn, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    assert softmax_calls.kernels_of("cuda", 0) == expected


CALLS = {
    "causal, shared noise": ({"H": 6, "Hn": 2, "G": 1}, {"is_causal": True}),
    "lower right corner": ({"T": 40, "S": 63, "G": 2}, {"is_causal": True}),
    "masked rows": ({"T": 63, "S": 40}, {"is_causal": True}),
    "window": ({"Hn": 2}, {"is_causal": True, "window": 9}),
    "padding": ({"G": 2}, {"attn_mask": torch.arange(63) > torch.tensor([[[[4]]], [[[20]]]])}),
    "bias": ({"G": 2}, {"attn_mask": torch.linspace(-3, 0, 63)[None], "is_causal": True}),
    "wide values": ({"Dv": 41}, {}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("keys", ["two keys", "shared keys"])
@pytest.mark.parametrize(
    "plan", [(True, 1, 48), (True, 3, 16), (False, 1, 41), (False, 3, 16)], ids=["joined", "joined, parts", "1", "3"]
)
def test_every_plan_is_right(plan, keys, call):
    """Output and every gradient in fp32; the kernel's name alone is the CPU's, so that grouped heads are copied."""
    sizes, options = CALLS[call]
    x = make_inputs(**{"Dv": 32, **sizes})
    shared = keys == "shared keys"
    x = x._replace(k2=x.k1) if shared else x
    joined, parts, width = plan
    parts, width = (parts, x.v.shape[-1]) if parts == 1 else (parts, width)
    leaves = [x.q1, x.q2, x.k1, x.v, x.lam] if shared else list(x)
    results = []
    for attend, variant in ((reference.attend, None), (Sdpa.attend, SdpaPlan("cpu", joined, parts, width))):
        out = attend(check(*x, **options)._replace(variant=variant))
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for exact, actual in zip(*results, strict=True):
        assert_within_budget(actual, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_mask_that_is_cast_keeps_finite_values_finite(dtype):
    """finfo.min of a wider dtype is -inf in the queries'; a row of it would be hidden, and known to nobody."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    mask = torch.zeros(1, 1, 4, 4, dtype=wide)
    mask[..., 0, :], mask[..., 1, :2] = torch.finfo(wide).min, float("-inf")
    q = torch.zeros(1, 1, 4, 8, dtype=dtype)
    cast, _ = softmax_calls.mask_and_flag(4, 4, False, None, mask, None, q, True)
    assert cast.dtype == dtype
    assert torch.equal(cast == float("-inf"), mask == float("-inf"))


def test_softmax_attention_compiles_with_symbolic_heads():
    """As a model has them that is compiled for a second batch size: their number is computed from it."""
    q, k = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 5, 8)
    expected = softmax_calls.softmax_attention(q, k, k, None, True)
    compiled = torch.compile(softmax_calls.softmax_attention, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, k, None, True), expected)
