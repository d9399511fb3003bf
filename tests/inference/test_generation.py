"""Generation in every form gives the tokens of the plain one: chunks, batches, caches, assistants, streams."""

import re
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diff_transformer import DiffTransformerForCausalLM, diff_attention_decode
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.errors import UserError
from diff_transformer.inference.generation import GenerationSettings, generate, left_padded
from diff_transformer.model import cores
from diff_transformer.model.heads import ATTENTIONS
from diff_transformer.model.presets import preset

KINDS = pytest.mark.parametrize("attention", ATTENTIONS)
WINDOWS = pytest.mark.parametrize(  # the running mean of "dint" excludes a window
    ("attention", "window"),
    [(kind, window) for kind in ATTENTIONS for window in (None, 6) if (kind, window) != ("dint", 6)],
)
CACHED = pytest.mark.parametrize(
    ("attention", "window"), [(kind, window) for kind in ATTENTIONS for window in (None, 6) if kind != "dint"]
)
PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PROMPTS = ["a", "some longer text", "of three", "the longest of all of these prompts"]


def make(attention="diff", seed=0, **fields):
    torch.manual_seed(seed)
    fields = {
        "embedding_initializer_range": 1.0,
        "tie_word_embeddings": False,
        "vocab_size": 258,
        **fields,
    }
    return DiffTransformerForCausalLM(preset("debug", attention=attention, **fields)).eval()


def tokens(rows=2, length=20):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(1))


def ragged():
    ids = [list(prompt.encode()) for prompt in PROMPTS]
    return (*left_padded(ids, 257, "cpu"), ids)


def logits_of(out):
    return torch.stack(out.logits, 1)


PREFILLS = [
    ("dynamic", 1, False),
    ("dynamic", 7, True),
    ("static", 7, False),
    ("static", 64, True),
]


@WINDOWS
@pytest.mark.parametrize(("cache", "chunk", "padded"), PREFILLS)
def test_prefill_in_chunks_is_prefill(attention, window, padded, cache, chunk):
    model = make(attention, sliding_window=window, num_key_value_heads=2)
    inputs, mask, _ = ragged()
    if not padded:
        mask = torch.ones_like(mask)
    options = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True, **PLAIN}
    whole = model.generate(inputs, attention_mask=mask, **options)
    parts = model.generate(
        inputs, attention_mask=mask, prefill_chunk_size=chunk, cache_implementation=cache, disable_compile=True,
        **options,
    )  # fmt: skip
    assert torch.equal(parts.sequences, whole.sequences)
    torch.testing.assert_close(logits_of(parts), logits_of(whole), atol=1e-4, rtol=1e-4)


@KINDS
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("decoding_operator", [False, True])
def test_a_ragged_batch_is_its_prompts_one_by_one(attention, cache, decoding_operator, monkeypatch):
    if decoding_operator:
        used = []

        def decode(*tensors, is_causal, **options):
            used.append(tensors[0].shape[2])
            if is_causal:
                return diff_attention_decode(*tensors, **options)
            return whole(*tensors, is_causal=False, **options)

        whole = cores.diff_attention
        monkeypatch.setattr(cores, "diff_attention", decode)
    model = make(attention, num_key_value_heads=2)
    inputs, mask, ids = ragged()
    options = {"max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    together = model.generate(inputs, attention_mask=mask, cache_implementation=cache, **options, **PLAIN)
    for row, prompt in enumerate(ids):
        alone = model.generate(torch.tensor([prompt]), **options, **PLAIN)
        assert torch.equal(together.sequences[row, inputs.shape[1] :], alone.sequences[0, len(prompt) :])
        torch.testing.assert_close(logits_of(together)[row], logits_of(alone)[0], atol=1e-4, rtol=1e-4)
    if decoding_operator and attention in ("diff", "grouped_diff", "diff_v2"):
        assert 1 in used


@CACHED
def test_an_assistant_changes_no_token(attention, window):
    """The assistant, and prompt lookup, agree on some tokens only, so the cache must be cropped."""
    model = make(attention, sliding_window=window)
    ids = tokens(1, 12)
    plain = model.generate(ids, max_new_tokens=24, **PLAIN)
    for kind in ("diff", "softmax"):
        assistant = make(kind, seed=1, num_hidden_layers=1)
        shared = {k: v for k, v in model.state_dict().items() if k in assistant.state_dict() and "layers" not in k}
        assistant.load_state_dict(shared, strict=False)
        assert torch.equal(model.generate(ids, max_new_tokens=24, assistant_model=assistant, **PLAIN), plain)
    repetitive = ids[:, :4].repeat(1, 5)
    expected = model.generate(repetitive, max_new_tokens=16, **PLAIN)
    guessed = model.generate(repetitive, max_new_tokens=16, prompt_lookup_num_tokens=3, **PLAIN)
    assert torch.equal(guessed, expected)


@pytest.mark.parametrize("attention", ["diff", "softmax"])
def test_streaming_gives_the_text_piece_by_piece(attention):
    model, tokenizer, pieces = make(attention), byte_tokenizer(), []
    model.generation_config.eos_token_id = None
    (text,) = generate(model, tokenizer, ["wörld 😀"], GenerationSettings(40), on_text=pieces.append)
    assert "".join(pieces) == text
    assert generate(model, tokenizer, ["wörld 😀"], GenerationSettings(40)) == [text]


def test_the_space_before_the_first_word_stays():
    """Llama 2's decoder drops the first space of what it is given, and a line is streamed by itself."""
    words = Tokenizer(models.WordLevel({f"▁w{i}" + "\n" * (i % 2): i for i in range(258)}, unk_token="▁w0"))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer, pieces = PreTrainedTokenizerFast(tokenizer_object=words), []
    model = make()
    model.generation_config.eos_token_id = None
    settings = GenerationSettings(30, temperature=9.0, seed=0)
    (text,) = generate(model, tokenizer, ["w2 w4"], settings, on_text=pieces.append)
    assert re.fullmatch(r"( w\d+\n?){30}", text)
    assert "\n" in text
    assert "".join(pieces) == text


def test_generate_takes_batches_and_seeds():
    model, tokenizer = make(), byte_tokenizer()
    run = partial(generate, model, tokenizer)
    alone = [run([prompt], GenerationSettings(8))[0] for prompt in PROMPTS]
    assert run(PROMPTS, GenerationSettings(8)) == alone
    drawn = run(PROMPTS[:1], GenerationSettings(30, temperature=2.0, top_p=0.9, seed=1))
    state = torch.get_rng_state()
    assert run(PROMPTS[:1], GenerationSettings(30, temperature=2.0, top_p=0.9, seed=1)) == drawn
    assert torch.equal(torch.get_rng_state(), state)
    assert run(PROMPTS[:1], GenerationSettings(30, temperature=2.0, seed=2)) != drawn
    assert run(PROMPTS[:1], GenerationSettings(30, temperature=1e-40, seed=2)) == run(
        PROMPTS[:1], GenerationSettings(30)
    )
    assert len(run([""], GenerationSettings(4))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; input should be greater than 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; input should be a valid integer"),
        ({"temperature": -1.0}, "temperature is -1.0; input should be greater than or equal to 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0; input should be greater than 0"),
        ({"seed": -5, "temperature": 1.0}, "seed is -5; input should be greater than or equal to 0"),
        ({"seed": 3}, "temperature is 0; give a temperature above 0"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GenerationSettings(**options)


def test_requests_that_cannot_be_met_are_refused():
    model, tokenizer = make(), byte_tokenizer()
    for prompts in ([], "one text"):
        with pytest.raises(UserError, match=f"prompts is {re.escape(repr(prompts))}; give a list of at least one"):
            generate(model, tokenizer, prompts)
    with pytest.raises(ValueError, match="up to 135 tokens, more than the 128 positions"):
        generate(model, tokenizer, ["x" * 100], GenerationSettings(35))
    with pytest.raises(ValueError, match="2 prompts cannot stream"):
        generate(model, tokenizer, ["a", "b"], on_text=print)


def test_of_the_models_own_defaults_only_the_special_tokens_count():
    model, tokenizer = make(), byte_tokenizer()
    plain, drawn = GenerationSettings(8), GenerationSettings(8, temperature=2.0, seed=1)
    expected = [generate(model, tokenizer, PROMPTS, settings) for settings in (plain, drawn)]
    own = model.generation_config
    own.do_sample, own.min_p, own.typical_p, own.top_k, own.temperature = True, 1.0, 0.2, 1, 0.1
    own.num_return_sequences, own.num_beams, own.repetition_penalty, own.max_length = 2, 3, 2.0, 5
    assert [generate(model, tokenizer, PROMPTS, settings) for settings in (plain, drawn)] == expected
    assert model.generation_config is own
    assert own.num_return_sequences == 2
    first = model(torch.tensor([list(PROMPTS[0].encode())])).logits[0, -1].argmax()
    own.eos_token_id = int(first)
    assert len(generate(model, tokenizer, PROMPTS[:1], plain)[0]) == 1


def test_what_pads_a_batch_is_a_token_of_the_model_and_not_in_the_text():
    model, tokenizer = make(), byte_tokenizer()
    expected = generate(model, tokenizer, PROMPTS, GenerationSettings(8))
    tokenizer.pad_token = "<added later>"
    tokenizer.add_special_tokens({"pad_token": "<added later>"})
    assert tokenizer.pad_token_id >= model.config.vocab_size
    assert generate(model, tokenizer, PROMPTS, GenerationSettings(8)) == expected
    tokenizer.pad_token = tokenizer.eos_token = None
    model.generation_config.eos_token_id = [ord(text[3]) for text in expected[:1]]  # ends this row early
    alone = [generate(model, tokenizer, [prompt], GenerationSettings(8))[0] for prompt in PROMPTS]
    assert generate(model, tokenizer, PROMPTS, GenerationSettings(8)) == alone


@KINDS
@pytest.mark.parametrize("use_cache", [True, False])
def test_attention_maps_of_each_step(attention, use_cache):
    model, ids = make(attention), tokens(1, 5)
    options = {**PLAIN, "max_new_tokens": 3, "output_attentions": True, "return_dict_in_generate": True}
    out = model.generate(ids, use_cache=use_cache, **options)
    expected = model(out.sequences[:, :-1], output_attentions=True).attentions
    for layer, whole in enumerate(expected):
        for step, maps in enumerate(out.attentions):
            torch.testing.assert_close(maps[layer][:, :, -1], whole[:, :, 4 + step, : 5 + step], atol=1e-5, rtol=1e-4)
