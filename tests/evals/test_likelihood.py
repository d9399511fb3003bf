"""Scoring over a shared context against scoring every sequence by itself, on models whose caches differ."""

import pytest
import torch
import transformers
from tiny_models import tiny_lm

from diff_transformer.data.tokenizer import byte_tokenizer, train_tokenizer
from diff_transformer.evals import likelihood
from diff_transformer.evals.likelihood import common_prefix, continuation_logprobs, position_losses, read_prefix
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.prompts import choice_tokens
from diff_transformer.model.matching import VARIANTS

SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
MODELS = {
    **{name: {} for name in VARIANTS if name != "dint"}, "softmax": {"num_key_value_heads": 2}, "llama": {},
    "qwen2 with a sliding window": SLIDING, "qwen3": {}, "gpt2": {}, "diffllama": {},
}  # fmt: skip


def make_lm(name: str) -> CausalLM:
    lm = tiny_lm(name.split()[0], vocab_size=258, positions=64, batch_size=3, **MODELS[name])
    lm.name = name
    return lm


@pytest.fixture(params=MODELS)
def lm(request):
    return make_lm(request.param)


def draw(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def alone(lm: CausalLM, context: list[int], tokens: list[int]) -> float:
    """The same number from one forward pass over the whole sequence, without a cache."""
    with torch.inference_mode():
        logprobs = lm.model(torch.tensor([context + tokens]), use_cache=False).logits[0].double().log_softmax(-1)
    start = len(context) - 1
    return sum(logprobs[start + i, token].item() for i, token in enumerate(tokens))


def test_equals_every_sequence_by_itself(lm):
    shared, *rests = draw(1, 9, 4, 4, 4, 4, 7)
    contexts = [*(shared + rest for rest in rests), shared]
    continuations = [draw(10 + i, 1, 3, 2, 5, 3)[: 2 + i % 4] for i in range(len(contexts))]
    continuations[1] = [[], continuations[1][0]]
    found = continuation_logprobs(lm, contexts, continuations)
    for context, choices, values in zip(contexts, continuations, found, strict=True):
        assert values == pytest.approx([alone(lm, context, tokens) for tokens in choices], abs=2e-4)


def test_contexts_that_share_nothing(lm):
    contexts, tokens = draw(2, 5, 8, 5, 1), draw(3, 2, 4)
    assert common_prefix(contexts) == 0
    found = continuation_logprobs(lm, contexts, [tokens] * 4)
    for context, values in zip(contexts, found, strict=True):
        assert values == pytest.approx([alone(lm, context, each) for each in tokens], abs=2e-4)


def test_a_prefix_serves_again_and_is_never_changed(lm, monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", 7)
    shared, first, second, *tokens = draw(4, 20, 3, 6, 4, 1, 3)
    prefix = read_prefix(lm, shared)
    contexts = [shared + first, shared + second, shared]
    expected = [[alone(lm, context, each) for each in tokens] for context in contexts]
    for _ in range(2):
        for context, values in zip(contexts, expected, strict=True):
            assert continuation_logprobs(lm, [context], [tokens], prefix=prefix)[0] == pytest.approx(values, abs=2e-4)
    assert prefix.cache.get_seq_length() == 20


def test_a_prefix_of_other_texts_is_not_used():
    lm = make_lm("diff")
    other, context, *tokens = draw(5, 6, 8, 2, 3)
    found = continuation_logprobs(lm, [context], [tokens], prefix=read_prefix(lm, other))
    assert found[0] == pytest.approx([alone(lm, context, each) for each in tokens], abs=2e-4)


def test_the_shared_context_is_read_once_and_batches_are_bounded():
    lm = make_lm("diff")
    shared, *rests = draw(6, 30, 2, 2, 2, 2)
    seen = []
    lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    continuation_logprobs(lm, [shared + rest for rest in rests], [draw(7, 4, 3, 2, 1)] * 4, batch_size=2)
    assert sum(rows * length for rows, length in seen if length == 30) == 30
    assert max(rows for rows, _ in seen) == 2
    assert sum(length for _, length in seen) < 30 + 2 * 2 + 2 * 4 * 4  # no context is read twice


def test_long_texts_in_chunks_are_one_forward(lm, monkeypatch):
    ids = draw(8, 60)[0]
    with torch.inference_mode():
        logits = lm.model(torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    for chunk in (7, 59, 1000):
        monkeypatch.setattr(likelihood, "CHUNK", chunk)
        torch.testing.assert_close(position_losses(lm, ids).double(), expected, atol=2e-5, rtol=1e-4)


def test_errors():
    lm = make_lm("diff")
    with pytest.raises(ValueError, match="needs at least one token"):
        continuation_logprobs(lm, [[1], []], [[[2]], [[3]]])
    assert continuation_logprobs(lm, [], []) == []


HYBRIDS = {
    "Mamba": {},
    "Jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "num_experts": 2, "mamba_d_state": 4
    },
    "MiniMax": {"num_local_experts": 2, "head_dim": 16},
    "RecurrentGemma": {"attention_window_size": 24, "lru_width": 64, "head_dim": 16, "num_hidden_layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
def test_models_with_a_recurrent_state_read_texts_whole(name, monkeypatch):
    """Several tokens over their state are not what one pass gives (huggingface/transformers pull request 46741)."""
    fields: dict = {
        "vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 257, "bos_token_id": 256, "eos_token_id": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**fields, **HYBRIDS[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    lm = CausalLM(model, byte_tokenizer(), name, batch_size=3)
    assert not lm.in_parts
    shared, *rests = draw(1, 40, 5, 9, 5)
    contexts, continuations = [shared + rest for rest in rests], [draw(2, 1, 4), draw(3, 3), draw(4, 6, 2)]
    assert read_prefix(lm, shared) is None
    found = continuation_logprobs(lm, contexts, continuations)
    for context, choices, values in zip(contexts, continuations, found, strict=True):
        assert values == pytest.approx([alone(lm, context, tokens) for tokens in choices], abs=2e-4)
    losses = [-alone(lm, shared[:place], [shared[place]]) for place in range(1, 40)]
    monkeypatch.setattr(likelihood, "CHUNK", 16)
    assert position_losses(lm, shared).tolist() == pytest.approx(losses, abs=2e-4)


@pytest.fixture(scope="module")
def joining():
    """A tokenizer that knows " human", " humane" and joins runs of line ends."""
    return train_tokenizer(["a human, a humane human\n\n\nType: number\n human"] * 50, 330)


def test_choices_are_tokenised_with_their_context(joining):
    for context in ("Type:", "Type: ", "Type: hum", ""):
        choices = [" human\n", "an\n", "ane\n", "\n"]
        prompt, tails = choice_tokens(joining, context, choices)
        for choice, tail in zip(choices, tails, strict=True):
            whole = joining(context + choice, add_special_tokens=False)["input_ids"]
            begun = [joining.bos_token_id] if not context else []
            assert prompt + tail == begun + whole
        assert len(prompt) >= 1


def test_a_token_across_the_border_belongs_to_the_choice(joining):
    alone, _ = choice_tokens(joining, "a", [" human"])
    crossed, tails = choice_tokens(joining, "a hum", ["an", "x"])
    assert crossed == alone  # " human" is one token, so that the context ends before " hum" for both
    assert joining.decode(tails[0]) == " human"
    assert joining.decode(tails[1]) == " humx"
    assert joining.decode(crossed) == "a"


@pytest.mark.parametrize("kind", ["bytes", "joining"])
def test_long_contexts_give_the_same_tokens(joining, kind, monkeypatch):
    tokenizer = byte_tokenizer() if kind == "bytes" else joining
    context = "Type: human\nOne more humane line\n" * 300 + "Type: hum"
    choices = ["an\n", "ane human\n", "\n"]
    whole = [tokenizer(context + choice, add_special_tokens=False)["input_ids"] for choice in choices]
    prompt, tails = choice_tokens(tokenizer, context, choices)
    assert [prompt + tail for tail in tails] == whole
    assert max(map(len, tails)) < 20


def test_a_tokenizer_that_looks_back_far_gets_the_whole_text():
    """A tail alone has other tokens if a run is paired from its start and the start of a text is marked."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(c): i for i, c in enumerate(range(32, 127))} | {"▁": 95, "\n": 96, "<s>": 97}
    backend = Tokenizer(models.BPE(vocab={**letters, "▁a": 98, "bb": 99}, merges=[("▁", "a"), ("b", "b")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    for text in ("b" * 4501 + " a" * 700 + " b", "b" * 5000, "b" * 5001):
        prompt, tails = choice_tokens(tokenizer, text, ["b", "a"])
        for choice, tail in zip(("b", "a"), tails, strict=True):
            assert prompt + tail == tokenizer(text + choice, add_special_tokens=False)["input_ids"]


def test_a_text_begins_as_the_tokenizer_says():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert choice_tokens(tokenizer, "ab", ["c", "d"]) == ([256, 97, 98], [[99], [100]])
    assert choice_tokens(byte_tokenizer(), "ab", ["c", "d"]) == ([97, 98], [[99], [100]])


def test_choices_that_are_none():
    with pytest.raises(ValueError, match="none of them empty"):
        choice_tokens(byte_tokenizer(), "a", ["b", ""])
    with pytest.raises(ValueError, match="give at least one"):
        choice_tokens(byte_tokenizer(), "a", [])
