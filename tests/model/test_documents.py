"""Packed documents: the model on a row of several is the model on each alone."""

import inspect

import pytest
import torch
import torch.nn.attention.varlen

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.inputs import Documents, split_documents, take_documents
from diff_transformer.model.matching import variant
from diff_transformer.model.presets import preset
from diff_transformer.model.softmax import SoftmaxCore, _packed_flash_attention

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


def test_each_document_is_as_if_alone(model):
    ids = rows()
    together = model(**packed(ids)).logits
    for row, start, stop in ((0, 0, 7), (0, 7, 8), (0, 8, 20), (1, 0, 20)):
        alone = model(input_ids=ids[row : row + 1, start:stop], use_cache=False).logits[0]
        torch.testing.assert_close(together[row, start:stop], alone, rtol=1e-5, atol=1e-5)
    joined = model(input_ids=ids, use_cache=False).logits
    assert (joined[0, 8:] - together[0, 8:]).abs().max() > 1e-3


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
    layer.register_forward_pre_hook(lambda *call: masks.append(call[2]["attention_mask"]), with_kwargs=True)
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
    with pytest.raises(ValueError, match="packed documents came with attention maps"):
        model(**packed(ids), output_attentions=True)
    with pytest.raises(ValueError, match="without max_length_q"):
        model(input_ids=ids, cu_seq_lens_q=torch.tensor([0, 40], dtype=torch.int32))


def test_keys_packed_differently_are_refused():
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    assert take_documents({"input_ids": None}) is None
    assert take_documents({"cu_seq_lens_q": bounds, "max_length_q": 4}) == Documents(bounds, 4)
    with pytest.raises(ValueError, match="packed differently"):
        take_documents({"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds + 1, "max_length_q": 4})


def varlen_of_pytorch(calls, *, grouped, windows):
    """PyTorch's ``varlen_attn`` with the arguments of one of its versions, recorded, one document after another."""

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        calls.append((key.shape[1], options))
        before, after = options.get("window_size", (-1, 0 if options.get("is_causal") else -1))
        core = SoftmaxCore()
        core.window = None if before < 0 else before + 1
        return core.attend_documents(
            *(x.transpose(0, 1)[None] for x in (query, key, value)), None, Documents(cu_seq_q, max_q), after == 0
        )

    named = {"window_size": windows, "is_causal": not windows, "enable_gqa": grouped}
    given = ["query", "key", "value", *(name for name, there in named.items() if there)]
    kind = inspect.Parameter.KEYWORD_ONLY
    varlen_attn.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in given])
    return varlen_attn


@pytest.mark.parametrize("version", ["window and groups", "window", "causal flag"])
@pytest.mark.parametrize("heads", [2, 4])
def test_packed_flash_attention_is_given_grouped_heads_as_they_are(monkeypatch, heads, version):
    """Only a PyTorch whose function takes no grouped heads gets repeated ones."""
    calls = []
    stand_in = varlen_of_pytorch(calls, grouped="groups" in version, windows="window" in version)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", stand_in)
    q, k, v = (torch.randn(1, n, 20, 8) for n in (4, heads, heads))
    documents, core = Documents(torch.tensor([0, 7, 20], dtype=torch.int32), 13), SoftmaxCore()
    core.window = 5 if "window" in version else None
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    out = _packed_flash_attention(*packed, documents, documents, True, core.window)
    torch.testing.assert_close(out, core.attend_documents(q, k, v, None, documents, True))
    form = {"window_size": (-1 if core.window is None else 4, 0)} if "window" in version else {"is_causal": True}
    expected = {
        "window and groups": (heads, form | {"enable_gqa": heads == 2}),
        "window": (4, form),
        "causal flag": (4, form),
    }
    assert calls == [expected[version]]


def test_packed_flash_attention_gives_only_what_pytorch_takes(monkeypatch):
    """With the function of the PyTorch that is installed, but for its kernel, which needs a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    given = []
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", lambda q, *rest: given.append(rest) or (q, None, None))
    q, k = torch.randn(20, 4, 8), torch.randn(20, 2, 8)
    documents = Documents(torch.tensor([0, 20], dtype=torch.int32), 20)
    _packed_flash_attention(q, k, k, documents, documents, True, None)
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    assert given[0][0].shape[1] == (2 if grouped else 4)
