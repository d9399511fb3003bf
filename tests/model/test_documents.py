"""Packed documents: the model on a row of several is the model on each alone."""

import inspect

import pytest
import torch

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.inputs import split_documents
from diff_transformer.model.matching import variant
from diff_transformer.model.presets import preset
from diff_transformer.ops.sdpa import packed_attention

END = 0


def make(attention):
    config = preset("debug", num_key_value_heads=2, embedding_initializer_range=1.0)
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(variant(config, attention)).eval()


@pytest.fixture(params=["diff", "softmax"])
def model(request):
    return make(request.param)


@pytest.fixture(params=["diff", "diff_v2", "grouped_diff", "softmax"])
def any_model(request):
    return make(request.param)


def rows():
    ids = torch.randint(1, 512, (2, 20), generator=torch.Generator().manual_seed(1))
    ids[0, [6, 7]] = END  # documents of 7, 1 and 12 tokens
    ids[1, 19] = END  # one of 20
    return ids


def packed(ids):
    documents = split_documents(ids, END)
    return {"input_ids": ids, "cu_seq_lens_q": documents.cu_seqlens, "max_length_q": documents.longest}


def test_documents_end_with_their_token_and_with_the_row():
    documents = split_documents(rows(), END)
    assert documents.cu_seqlens.tolist() == [0, 7, 8, 20, 40]
    assert documents.longest == 20
    positions = documents.positions((2, 20))
    assert positions[0].tolist() == [*range(7), 0, *range(12)]
    assert positions[1].tolist() == list(range(20))


@pytest.mark.parametrize("use_cache", [None, True, False])
def test_positions_that_begin_anew_separate_documents(any_model, use_cache):
    """With the cache that a model in eval mode makes by default as well as without."""
    ids = rows()
    positions = split_documents(ids, END).positions(ids.shape)
    together = any_model(input_ids=ids, position_ids=positions, use_cache=use_cache).logits
    torch.testing.assert_close(together, any_model(**packed(ids)).logits, rtol=1e-5, atol=2e-5)
    assert (any_model(input_ids=ids).logits[0, 8:] - together[0, 8:]).abs().max() > 1e-3


def test_positions_that_count_on_need_no_mask(any_model):
    ids, masks = rows(), []
    layer = any_model.model.layers[0]
    layer.register_forward_pre_hook(lambda *call: masks.append(call[2]["visible"].mask), with_kwargs=True)
    logits = any_model(input_ids=ids, position_ids=torch.arange(20)[None]).logits
    torch.testing.assert_close(logits, any_model(input_ids=ids).logits)
    assert masks == [None, None]


def test_gradients_are_those_of_each_document_alone(model):
    ids = rows()
    weights = torch.randn(2, 20, 512, generator=torch.Generator().manual_seed(2))
    parameters = list(model.parameters())
    together = torch.autograd.grad((model(**packed(ids)).logits * weights).sum(), parameters)
    alone = sum(
        (model(input_ids=ids[row : row + 1, a:b], use_cache=False).logits * weights[row, a:b]).sum()
        for row, a, b in ((0, 0, 7), (0, 7, 8), (0, 8, 20), (1, 0, 20))
    )
    for got, expected in zip(together, torch.autograd.grad(alone, parameters), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_what_documents_exclude_is_refused(model):
    ids = rows()
    with pytest.raises(ValueError, match="exclude attention_mask and use_cache"):
        model(**packed(ids), attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="exclude attention_mask and use_cache"):
        model(**packed(ids), use_cache=True)
    with pytest.raises(ValueError, match="not computed for packed documents"):
        model(**packed(ids), output_attentions=True)


def test_packed_attention_gives_only_what_pytorch_takes(monkeypatch):
    """With the function of the PyTorch that is installed, but for its kernel, which needs a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    given = []
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", lambda q, *rest: given.append(rest) or (q, None, None))
    q, k, ends = torch.randn(20, 4, 8), torch.randn(20, 2, 8), torch.tensor([0, 20], dtype=torch.int32)
    packed_attention(q, k, k, ends, ends, 20, 20, True, None)
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    assert given[0][0].shape[1] == (2 if grouped else 4)
