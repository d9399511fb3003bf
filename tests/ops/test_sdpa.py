"""Which tensors the form over scaled_dot_product_attention passes on."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diff_transformer.ops import sdpa


@pytest.mark.parametrize(
    ("width", "dtype", "masked", "shared"),
    [
        (64, torch.bfloat16, False, True),
        (128, torch.bfloat16, False, False),
        (64, torch.bfloat16, True, False),
        (64, torch.float32, False, False),
    ],
    ids=["one width", "wider values", "mask", "fp32"],
)
def test_shared_keys_on_a_gpu_never_materialise_the_maps(monkeypatch, width, dtype, masked, shared):
    """Only FlashAttention takes query heads that share keys; elsewhere each gets its own copy."""
    seen = []

    def attention(q, k, v, *, enable_gqa, **options):
        seen.append((k.shape[1], v.shape[1], enable_gqa))
        return q.new_empty(*q.shape[:3], v.shape[-1])

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        q = torch.empty(1, 4, 9, 64, dtype=dtype, device="cuda")
        k, v = (torch.empty(1, 2, 9, size, dtype=dtype, device="cuda") for size in (64, width))
        mask = torch.ones(9, 9, dtype=torch.bool, device="cuda") if masked else None
        out = sdpa.softmax_attention_of(q, k, v, mask, False, 0.125)
    assert out.shape == (1, 4, 9, width)
    assert seen == [(2, 2, True) if shared else (4, 4, False)]
