"""The model with its attention in the Triton kernels: generation and packed training are those of the reference."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.matching import variant
from diff_transformer.model.presets import preset
from diff_transformer.ops import triton
from diff_transformer.ops.triton import decode, interpreted, operator
from diff_transformer.train.training_data import model_inputs, without_first_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VARIANTS = ["diff", "diff_v2", "grouped_diff"]
END, PROMPT, NEW = 0, 20, 4

pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="neither a GPU nor TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # NumPy on rows that see nothing
]


def make(attention):
    config = preset("debug", num_key_value_heads=2, num_hidden_layers=1, embedding_initializer_range=1.0)
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(variant(config, attention)).to(DEVICE)


def generated(model, padded, cache):
    """(new tokens, logits of each)"""
    ids = torch.randint(1, 512, (2, PROMPT), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :7] = 0
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": END}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    found = model.eval().generate(ids, attention_mask=mask, **options)
    return found.sequences[:, PROMPT:], torch.stack(found.logits)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left padding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", VARIANTS)
def test_generates_what_the_reference_does(monkeypatch, attention, cache, padded):
    """Every token after the first through the decoding kernel."""
    monkeypatch.setattr(triton, "MIN_DECODE_KEYS", PROMPT)  # so that a short cache is long enough
    decoded = []
    compute = decode.attend_decode
    monkeypatch.setattr(decode, "attend_decode", lambda *a, **b: decoded.append(a[0].shape[2]) or compute(*a, **b))
    model = make(attention)
    model.set_attn_implementation("diff_reference")
    tokens, logits = generated(model, padded, cache)
    assert decoded == []
    model.set_attn_implementation("diff_triton")
    tokens_here, logits_here = generated(model, padded, cache)
    assert torch.equal(tokens_here, tokens)
    torch.testing.assert_close(logits_here, logits, rtol=1e-4, atol=1e-4)
    assert decoded == [1] * (NEW - 1)


@pytest.mark.parametrize("attention", VARIANTS)
def test_packed_training_is_one_launch_a_layer(monkeypatch, attention):
    ids = torch.randint(1, 512, (2, 20), generator=torch.Generator().manual_seed(1))
    ids[0, [6, 7]] = END  # documents of 7, 1 and 12 tokens, and one of 20
    labels = torch.from_numpy(without_first_tokens(ids.numpy(), ids.numpy(), END)).to(DEVICE)
    inputs = model_inputs(ids.to(DEVICE), "separate", END)
    launches = []
    compute = operator.plan_forward
    monkeypatch.setattr(operator, "plan_forward", lambda *a: launches.append(a[0].cu_seqlens_q.tolist()) or compute(*a))
    model, found = make(attention).train(), []
    for implementation in ("diff_reference", "diff_triton"):
        model.set_attn_implementation(implementation)
        loss = model(**inputs, labels=labels, use_cache=False).loss
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for expected, value in zip(*found, strict=True):
        assert (value - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert launches == [[0, 7, 8, 20, 40]]
