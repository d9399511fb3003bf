"""Looking inside attention: any family, every output unchanged, and each quantity computed by another route."""

import pytest
import torch
from numbers_of import measured
from tiny_models import GLM, bos_tokenizer, tiny_lm, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)

from diff_transformer.data.evaluation_text import documents_of
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.attention_tap import changed_logits, output_of, tapped_attention
from diff_transformer.evals.lm import CausalLM, extend
from diff_transformer.lab.evaluate import run_eval, settings_of
from diff_transformer.model.matching import VARIANTS
from diff_transformer.model.parts import layers_of

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "diffllama", *VARIANTS)
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
# whose logits, computed again, agree to 1e-5; those of other variants, of larger outputs, to 2e-5
CLOSE = ("llama", "qwen2", "qwen3", "gpt2", "diffllama", "diff", "softmax")
ONE_MAP = ("llama", "qwen2", "qwen3", "gpt2", "softmax", "softmax_norm", "gated")


def make(family, how="sdpa"):
    """A model whose attention is far from uniform."""
    fields = {"num_key_value_heads": 2} if family in ("diff", "softmax") else {}
    fields |= {} if family in VARIANTS else {"attn_implementation": how}
    return tiny_model(family, positions=256, std=0.3, **fields, **(WINDOW if family == "qwen2" else {}))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def lm(family):
    return CausalLM(make(family), byte_tokenizer(), family, batch_size=4)


@pytest.fixture
def ids():
    return torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(1))


def padded(ids):
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_tap_sees_every_layer_once_and_changes_no_bit(family, how, ids):
    model, seen = make(family, how), []
    for inputs in ({"input_ids": ids}, padded(ids)):
        before = model(**inputs).logits
        seen.clear()
        with tapped_attention(model, lambda call: seen.append((call.layer, call.q1.shape[2], call.lam is not None))):
            during = model(**inputs).logits
        assert torch.equal(during, before)
        assert torch.equal(model(**inputs).logits, before)
        assert seen == [(layer, 21, family not in ONE_MAP) for layer in (0, 1)]


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_attention_recomputed_from_unchanged_logits_is_the_attention(family, how, ids, monkeypatch):
    """In one block; in small blocks of queries, in one pass and, but for DINT, in two over a cache."""
    model = make(family, how)
    for inputs in ({"input_ids": ids}, padded(ids)):
        before = model(**inputs).logits
        with changed_logits(model, lambda call: lambda logits, allowed: logits):
            again = model(**inputs).logits
        real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
        torch.testing.assert_close(again[real], before[real], atol=1e-5 if family in CLOSE else 2e-5, rtol=1e-5)
    monkeypatch.setattr(AttentionCall.blocks, "__defaults__", (300,))
    whole = model(ids).logits
    with changed_logits(model, lambda call: lambda logits, allowed: logits):
        torch.testing.assert_close(model(ids).logits, whole, atol=2e-5, rtol=1e-5)
        if family != "dint":
            first, cache = extend(model, None, ids[:, :13])
            second, _ = extend(model, cache, ids[:, 13:])
            torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), whole, atol=2e-5, rtol=1e-5)


def test_changed_logits_reach_the_output_and_everything_is_restored_after_an_exception(family, ids):
    model = make(family)
    before = model(ids).logits
    with changed_logits(model, lambda call: lambda logits, allowed: tuple(2 * x for x in logits)):
        assert (model(ids).logits - before).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="halfway"), changed_logits(model, _fails):
        model(ids)
    assert torch.equal(model(ids).logits, before)


def _fails(call):
    raise RuntimeError("halfway")


def test_maps_are_those_that_eager_attention_returns(family, ids):
    model = make(family, "eager")
    expected = model(ids, output_attentions=True).attentions
    found = []

    def keep(call):
        maps = call.maps()
        found.append(torch.cat(maps, dim=1) if family == "diffllama" else call.attention())

    with tapped_attention(model, keep):
        model(ids)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_the_lambda_of_diff_llama_makes_its_output(ids):
    model, outputs = make("diffllama"), {}
    attention = model.model.layers[1].self_attn
    handles = [
        attention.v_proj.register_forward_hook(lambda m, a, out: outputs.update(v=out)),
        attention.o_proj.register_forward_pre_hook(lambda m, a: outputs.update(out=a[0])),
    ]
    with tapped_attention(model, lambda call: outputs.update(call=call)):
        model(ids)
    for handle in handles:
        handle.remove()
    v1, v2 = outputs["v"].view(2, 21, 2, 8).transpose(1, 2).chunk(2, dim=1)  # each [B, 1, S, d]: one head of two here
    heads = outputs["call"].attention() @ torch.cat([v1, v2], dim=-1)  # [B, 2, T, 2d]
    gain = 1 - attention.lambda_init
    expected = (gain * attention.groupnorm(heads.transpose(1, 2))).flatten(2)
    torch.testing.assert_close(outputs["out"], expected, atol=1e-5, rtol=1e-4)


def test_blocks_of_rows_are_the_rows_of_the_whole(family, ids):
    def look(call):
        whole = call.attention()
        blocks = list(call.blocks(elements=2 * 4 * 21 * 4))
        assert len(blocks) > 3
        torch.testing.assert_close(torch.cat([call.attention(rows) for rows in blocks], dim=2), whole)

    model = make(family)
    with tapped_attention(model, look):
        model(**padded(ids))


def test_a_model_beside_the_tapped_one_is_left_alone(family, ids):
    model, other, seen = make(family), make(family), []
    with tapped_attention(model, seen.append):
        other(ids)
        assert not seen
        model(ids)
    assert len(seen) == 2


def test_models_that_cannot_be_looked_into_are_refused_clearly(ids):
    with (
        pytest.raises(ValueError, match="Linear has neither this package's attention nor transformers'"),
        tapped_attention(torch.nn.Linear(2, 2), lambda call: None),
    ):
        pass
    upcast = GPT2Config(
        vocab_size=260, n_positions=64, n_embd=32, n_layer=1, n_head=4, reorder_and_upcast_attn=True,
        attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(upcast)
    with (
        pytest.raises(ValueError, match=r"GPT2LMHeadModel computes attention without .* 'eager'\); load it with"),
        tapped_attention(model, lambda call: None),
    ):
        model(ids)
    flex = make("llama", "flex_attention")
    with (
        torch.compiler.set_stance("force_eager"),  # transformers compiles FlexAttention, half a minute here
        pytest.raises(ValueError, match="the attention of LlamaAttention, as the implementation it is set to calls"),
        tapped_attention(flex, lambda call: None),
    ):
        flex(ids)


def test_layers_give_the_residual_stream(family, ids):
    model, found = make(family), []
    handles = [
        layer.register_forward_hook(lambda m, a, out: found.append(output_of(out))) for layer in layers_of(model)
    ]
    states = model(ids, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    assert len(found) == 2
    assert torch.equal(found[0], states[1])
    with pytest.raises(ValueError, match="Linear has no list of layers"):
        layers_of(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("chunk", [4, 2048])
def test_the_last_row_is_the_last_row_of_the_map_however_it_is_read(lm, family, ids, chunk, monkeypatch):
    monkeypatch.setattr("diff_transformer.evals.lm.CHUNK", chunk)
    whole = []
    with tapped_attention(lm.model, lambda call: whole.append(call.attention()[0, :, -1])):
        lm.model(ids[:1])
    rows = lm.last_row_attention(ids[:1])
    for row, expected in zip(rows, whole, strict=True):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-4)
    sums = torch.stack(rows).sum(-1)
    if family in ("diff", "diffllama"):
        assert (sums < 0.95).all()
    elif family in ONE_MAP and family != "gated":
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_token_losses_are_the_model_s_loss(lm, ids):
    losses = lm.token_losses(ids.repeat(3, 1))
    assert losses.shape == (6, 20)
    assert losses[:2].mean().item() == pytest.approx(lm.model(ids, labels=ids).loss.item(), abs=1e-5)


@pytest.mark.parametrize("chunk", [7, 2048])
def test_generation_in_batches_and_chunks_is_generation_alone(lm, chunk, monkeypatch):
    prompts = ["one", "a longer prompt that is read in chunks", "x", "something in between", "the fifth"]
    alone = [lm.generate([prompt], 6)[0] for prompt in prompts]
    monkeypatch.setattr("diff_transformer.evals.lm.CHUNK", chunk)
    assert lm.generate(prompts, 6) == alone


PREFERENCES = {
    "sampling": {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0, "top_k": 50},
    "suppressed": {"suppress_tokens": list(range(200))},
    "several": {"num_return_sequences": 2, "do_sample": True},
    "beams": {"num_beams": 3},
    "dictionary": {"return_dict_in_generate": True, "output_scores": True},
    "stop": {"stop_strings": ["e", "a"]},
}


@pytest.mark.parametrize("preference", PREFERENCES)
def test_generation_is_greedy_whatever_the_checkpoint_prefers(preference):
    """A checkpoint's generation_config.json does not decide what an experiment generates (sgl-project/sgl-eval 24)."""
    lm = CausalLM(make("llama"), byte_tokenizer(), "llama", batch_size=4)
    prompts = ["a prompt", "and one more"]
    expected = lm.generate(prompts, 8)
    for name, value in PREFERENCES[preference].items():
        setattr(lm.model.generation_config, name, value)
    assert lm.generate(prompts, 8) == expected


def test_text_beyond_the_model_s_positions_is_refused(lm):
    for call in (
        lambda: lm.generate(["x" * 250], 7),
        lambda: lm.token_losses(torch.zeros(1, 257, dtype=torch.long)),
        lambda: lm.last_row_attention(torch.zeros(1, 257, dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match=rf"has 257 tokens, more than the 256 positions of {lm.name}"):
            call()


def test_the_tokenizer_s_own_beginning_is_part_of_a_prompt():
    plain = CausalLM(make("llama"), byte_tokenizer(), "llama")
    assert plain.prefix == []
    without = plain.generate(["a text"], 5)
    tokenizer = bos_tokenizer()
    lm = CausalLM(make("llama"), tokenizer, "llama")
    assert lm.prefix == [256]
    ids = torch.tensor([[256, *b"a text"]])
    step = lm.model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=257)
    assert lm.generate(["a text"], 5) == tokenizer.batch_decode(step[:, 7:], skip_special_tokens=True) != without


def test_a_tokenizer_without_padding_will_do():
    tokenizer = byte_tokenizer()
    lm = CausalLM(make("gpt2"), tokenizer, "gpt2")
    expected = lm.generate(["one", "another one"], 4)
    tokenizer.pad_token = None
    assert lm.generate(["one", "another one"], 4) == expected


def test_a_padding_token_beyond_the_embedding_will_do():
    """As of a ``[PAD]`` that was added to the tokenizer alone (huggingface/transformers issue 23401)."""
    tokenizer, lm = byte_tokenizer(), CausalLM(make("gpt2"), byte_tokenizer(), "gpt2")
    expected = lm.generate(["one", "another one"], 4)
    tokenizer.add_tokens([f"<{number}>" for number in range(lm.model.config.vocab_size - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == lm.model.config.vocab_size
    assert CausalLM(lm.model, tokenizer, "gpt2").generate(["one", "another one"], 4) == expected


@pytest.mark.parametrize("template", ["<|endoftext|> $A", GLM])
def test_every_experiment_measures_text_after_the_tokens_that_its_tokenizer_puts_in_front(template, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Word {i} stands in a row of words. " for i in range(400)))
    lm = tiny_lm("llama", tokenizer=bos_tokenizer(template), std=0.5, positions=460)
    before = lm.prefix
    read = []
    whole = lm.model.model.forward

    def forward(input_ids=None, past_key_values=None, cache=None, **more):
        cache = past_key_values if cache is None else cache
        if cache is None or cache.get_seq_length() == 0:
            read.append(input_ids)
        return whole(input_ids, past_key_values=cache, **more)

    lm.model.model.forward = forward
    wanted = {"corpus": str(text), "length": 60, "samples": 3}
    for name, more in (
        ("outliers", []), ("associative_recall", []), ("quantization", ["rows=3", "bits=[16]"]), ("long_nll", []),
        ("needle", ["length=150", "cells=[[1,1]]", "depths=[0]"]), ("allocation", ["length=130", "depths=[0]"]),
        ("many_shot", ["lengths=[280]", "order_seeds=1"]),
        ("hallucination", ["length=450", "answer_tokens=2", "summary_tokens=2"]),
    ):  # fmt: skip
        read.clear()
        settings = settings_of(name, wanted, more, quick=True, lenient=True)
        result = measured(name, lm, settings, tmp_path / f"{name}.jsonl.gz")
        assert result.rows
        starts = [ids for ids in read if ids.shape[1] > len(before) + 8]
        assert starts
        for ids in starts:
            for row in ids.tolist():
                place = next(i for i, token in enumerate(row) if token != 257 or row[i : i + len(before)] == before)
                assert row[place : place + len(before)] == before, name
        if name in ("outliers", "associative_recall", "quantization", "long_nll"):
            assert result.about["leading_tokens"] == before


@pytest.mark.parametrize("family", ["diff", "gpt2"])
@pytest.mark.parametrize(
    ("name", "settings", "rows"),
    [
        ("needle", {"length": 250, "cells": [[1, 1]]}, 5),
        ("allocation", {"length": 240}, 5 + 5 * 2 * 4),
        ("outliers", {"length": 100}, 1 + 2 * 6 + 2 * 2 * 2),
        ("associative_recall", {"length": 100}, 1),
        ("quantization", {"length": 50, "rows": 1, "bits": [8, 4]}, 2 * (1 + 1)),
    ],
)
def test_experiments_run_on_a_text_of_one_s_own_and_within_the_positions(name, settings, rows, family, tmp_path):
    (tmp_path / "text.txt").write_text("A line of plain words about the weather in the hills.\n" * 200)
    given = {"corpus": str(tmp_path / "text.txt"), "samples": 1, **settings}
    lm = CausalLM(make(family), byte_tokenizer(), family)
    result = measured(name, lm, settings_of(name, given), tmp_path / "out.jsonl.gz")
    assert len(result.rows) == (5 + 5 * 2 * 2 if (name, family) == ("allocation", "diff") else rows)
    assert result.about["corpus"] == given["corpus"]
    assert result.about.get("part", "validation") == "validation"
    with pytest.raises(ValueError, match="has 257 tokens, more than the 256 positions"):
        run_eval(name, lm, settings_of(name, {**given, "length": 257}), tmp_path / "no.jsonl.gz")


def test_tokens_in_front_have_no_loss(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Word {i} stands in a row of words. " for i in range(400)))
    lm = tiny_lm("llama", tokenizer=bos_tokenizer(GLM), std=0.5, positions=200)
    settings = settings_of("associative_recall", {"corpus": str(text), "length": 60, "samples": 2}, [], lenient=True)
    result = measured("associative_recall", lm, settings, tmp_path / "recall.jsonl.gz")
    assert [row["ar_hit_count"] + row["others_count"] for row in result.rows] == [58, 58]
    settings = settings_of("long_nll", {"corpus": str(text), "length": 64, "split": "all", "samples": 1}, [])
    result = measured("long_nll", lm, settings, tmp_path / "nll.jsonl.gz")
    (_, (document, *_)) = next(documents_of(str(text), "all"))
    ids = torch.tensor([[*lm.prefix, *document.text.encode()[:64]]])
    losses = lm.token_losses(ids)[0, 1:]
    assert sum(row["sum"] for row in result.rows) / 64 == pytest.approx(losses.mean().item(), rel=1e-5)
    assert result.rows[0]["sum"] == pytest.approx(losses[0].item(), rel=1e-5)


def test_losses_are_computed_in_pieces_and_are_the_same(monkeypatch):
    lm, ids = tiny_lm("llama", std=0.5), torch.randint(0, 250, (3, 20))
    expected = lm.token_losses(ids)
    largest, original = [], torch.nn.functional.cross_entropy
    monkeypatch.setattr("diff_transformer.evals.lm._LOSSES", 260 * 4)
    monkeypatch.setattr(
        "torch.nn.functional.cross_entropy",
        lambda logits, *rest, **more: largest.append(len(logits)) or original(logits, *rest, **more),
    )
    torch.testing.assert_close(lm.token_losses(ids), expected)
    assert max(largest) == 4
