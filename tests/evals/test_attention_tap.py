"""Experiments that look into attention, on a small model of every variant."""

import base64

import numpy as np
import pytest
import torch
from numbers_of import mean

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.data.tasks.types import MultipleChoiceItem
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals import gradient_flow, quantization
from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.attention_tap import changed_logits, tapped_attention
from diff_transformer.evals.explorer import attention_entry
from diff_transformer.evals.gradient_flow import attention_weights, evaluate_gradient_flow
from diff_transformer.evals.likelihood import continuation_logprobs
from diff_transformer.evals.lm import CausalLM
from diff_transformer.evals.outliers import evaluate_outliers
from diff_transformer.evals.quantization import evaluate_quantization
from diff_transformer.model.matching import VARIANTS, variant
from diff_transformer.model.presets import preset

KINDS = pytest.mark.parametrize("kind", VARIANTS)


def make(kind):
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(variant(preset("debug", embedding_initializer_range=1.0), kind)).eval()


def tokens(rows=2, length=20):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


@KINDS
def test_the_map_that_a_tap_sees_is_the_models_own(kind):
    model, ids, seen = make(kind), tokens(), []

    def tap(call):
        whole = call.attention()
        parts = torch.cat([call.attention(rows) for rows in call.blocks(300)], dim=2)
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
        seen.append(whole)

    with torch.no_grad(), tapped_attention(model, tap):
        out = model(ids, output_attentions=True)
    for ours, theirs in zip(seen, out.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@KINDS
def test_unchanged_logits_change_nothing(kind, monkeypatch):
    """In small query blocks, in one pass and in two pieces."""
    model, ids = make(kind), tokens()
    monkeypatch.setattr(AttentionCall.blocks, "__defaults__", (300,))
    expected = model(ids).logits
    with torch.no_grad(), changed_logits(model, lambda call: lambda logits, allowed: logits):
        torch.testing.assert_close(model(ids).logits, expected, atol=2e-5, rtol=1e-5)
        if kind != "dint":
            first = model(ids[:, :13], use_cache=True)
            second = model(ids[:, 13:], past_key_values=first.past_key_values, use_cache=True)
            torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), expected, atol=2e-5, rtol=1e-5)
    with torch.no_grad(), changed_logits(model, lambda call: lambda logits, allowed: tuple(5 * x for x in logits)):
        assert (model(ids).logits - expected).abs().max() > 1e-3


@KINDS
def test_the_last_row_of_attention(kind, monkeypatch):
    monkeypatch.setattr("diff_transformer.evals.lm.CHUNK", 7)
    model, ids = make(kind), tokens(1)
    rows = CausalLM(model, byte_tokenizer(), kind).last_row_attention(ids)
    maps = model(ids, output_attentions=True).attentions
    for row, whole in zip(rows, maps, strict=True):
        torch.testing.assert_close(row, whole[0, :, -1], atol=1e-6, rtol=1e-5)


@KINDS
def test_outliers_and_gradients(kind):
    model, ids = make(kind), tokens()
    lm = CausalLM(model, byte_tokenizer(), kind)
    top = {"experiment": "outliers_top", "kind": "logits", "layer": -1}
    largest = evaluate_outliers(lm, ids)
    assert mean(largest, "value", k=1, **top) >= mean(largest, "value", k=2, **top) > 0
    flow = evaluate_gradient_flow(lm, ids, gradient_flow.Settings())
    assert mean(flow, "rms", state="model", part="q") > 0
    assert mean(flow, "rms", state="init_diff", part="v") > 0
    parts = {row["part"] for row in flow.rows if row["state"] == "model"}
    one_map = ("softmax", "softmax_norm", "gated")
    assert ("lambda" in parts) == (kind not in ("softmax", "softmax_norm", "fixed_lambda"))
    assert ("k2" in parts) == (kind not in (*one_map, "diff_v2", "diff_v3"))


def test_which_heads_make_which_map():
    weights = attention_weights(make("grouped_diff"))[0]
    assert {kind: part[0].heads for kind, part in weights.items() if kind[1:] in ("1", "2")} == {
        "q1": (0, 1, 2), "q2": (3,), "k1": (0,), "k2": (1,)}  # fmt: skip
    weights = attention_weights(make("diff_v2"))[0]
    assert weights["q2"][0].heads == (1, 3, 5, 7)


@KINDS
def test_quantised_logits_and_likelihoods(kind):
    """Contexts are read once; their cache is copied for the endings."""
    lm = CausalLM(make(kind), byte_tokenizer(), kind)
    tasks = [MultipleChoiceItem("The cat sat on", (" the mat.", " a dog", " blue"), 0)] * 2
    result = evaluate_quantization(lm, tasks, tokens(2, 40) % 256, quantization.Settings(bits=(16, 4)))
    plain = lm.token_losses(tokens(2, 40) % 256).mean().item()
    assert mean(result, "loss", bits=16) == pytest.approx(plain, abs=2e-3)
    prompt, endings = [1, 2, 3, 4, 5, 6, 7], [[8, 9], [10, 11, 12]]
    found = continuation_logprobs(lm, [prompt], [endings])[0]
    for ending, value in zip(endings, found, strict=True):
        whole = lm.model(torch.tensor([prompt + ending])).logits.log_softmax(-1)[0]
        expected = sum(whole[len(prompt) - 1 + i, token] for i, token in enumerate(ending))
        assert float(value) == pytest.approx(expected.item(), abs=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if kind != "dint"])
def test_the_explorer_shows_maps_that_subtract_to_the_models_own(kind):
    """To the rounding of 8 bits; DINT has a third map."""
    model, ids = make(kind), tokens(1, 12) % 256
    entry = attention_entry(
        CausalLM(model, byte_tokenizer(), kind), ids[0].numpy(), title="", answer="x", answer_span=(2, 3)
    )

    def decoded(name):
        coded = np.frombuffer(base64.b64decode(entry[name]), np.uint8).astype(float)
        maps = np.zeros((entry["layers"], entry["heads"], 12, 12))
        maps[..., *np.tril_indices(12)] = ((coded / 255) ** 2).reshape(*maps.shape[:2], -1)
        return torch.from_numpy(maps)

    shown = decoded("first")
    if "second" in entry:
        shown = shown - torch.tensor(entry["lambda"])[:, None, None, None] * decoded("second")
    exact = torch.cat(model(ids, output_attentions=True).attentions)
    torch.testing.assert_close(shown.float(), exact, atol=0.02, rtol=0)
