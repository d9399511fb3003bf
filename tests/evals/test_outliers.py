"""Largest activations against whole tensors, computed by another route, for every family."""

import pytest
import torch
from numbers_of import mean, measured
from tiny_models import tiny_lm

from diff_transformer.data.evaluation_text import load_rows
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.evals.attention_call import AttentionCall
from diff_transformer.evals.outliers import Magnitudes, evaluate_outliers, ranked
from diff_transformer.lab.evaluate import run_eval


def make(kind):
    return tiny_lm(kind, **({"num_key_value_heads": 2} if kind in ("diff", "softmax") else {}))


@pytest.fixture
def ids():
    return torch.randint(0, 256, (5, 40), generator=torch.Generator().manual_seed(3))


def projected(model, attention, ids):
    """The outputs of W_Q and W_K after the rotary embedding, [B, heads, T, d]."""
    kept = {}
    for name in ("q_proj", "k_proj"):
        module = getattr(attention, name)
        handle = module.register_forward_hook(lambda m, a, out, name=name: kept.update({name: out}))
        model(ids)
        handle.remove()
    d = attention.head_dim
    cos, sin = model.model.rotary_emb(kept["q_proj"], torch.arange(ids.shape[1])[None])
    heads = [kept[name].unflatten(-1, (-1, d)).transpose(1, 2) for name in ("q_proj", "k_proj")]
    return [x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin for x in heads]


def exact_logits(lm, ids):
    """All logits under the causal mask, by layer, from the projections' outputs: [layers] of [B, heads, pairs]."""
    found = []
    for layer in lm.model.model.layers:
        q, k = projected(lm.model, layer.self_attn, ids)
        met = [0, 1, 0, 1] if lm.name == "diff" else [0, 0, 1, 1]  # which key head each of 4 query heads meets
        k = k[:, met]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        found.append(scores[..., torch.ones(ids.shape[1], ids.shape[1]).tril().bool()])
    return found


def top(result, kind, layer, k):
    return mean(result, "value", experiment="outliers_top", kind=kind, layer=layer, k=k)


@pytest.mark.parametrize("kind", ["diff", "softmax", "llama"])
def test_against_the_whole_tensors(kind, ids, monkeypatch):
    monkeypatch.setattr(AttentionCall.blocks, "__defaults__", (4 * 40 * 7,))
    lm = make(kind)
    result = evaluate_outliers(lm, ids)
    by_layer = [x.abs() for x in exact_logits(lm, ids)]
    states = lm.model(ids, output_hidden_states=True).hidden_states
    exact = {("logits", -1): torch.cat([x.flatten() for x in by_layer])}
    exact["hidden", 0] = states[1].abs().flatten()
    exact["logits", 0], exact["logits", 1] = (x.flatten() for x in by_layer)
    for name, values in exact.items():
        ranked = values.sort(descending=True).values
        for rank in (1,) if name[1] >= 0 else (1, 2, 3, 10, 100):
            assert top(result, *name, rank) == pytest.approx(ranked[rank - 1].item(), rel=1e-4)
        assert top(result, *name, 0) == pytest.approx(values.median().item(), rel=0.01)
    assert result.about["tokens"] == 200


def test_layer_outputs_are_taken_before_the_final_norm(ids):
    lm, seen = make("llama"), []
    handle = lm.model.model.norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].abs().max().item()))
    result = evaluate_outliers(lm, ids)
    handle.remove()
    assert top(result, "hidden", 1, 1) == pytest.approx(max(seen))


@pytest.mark.parametrize("kind", ["diff", "softmax", "llama", "gpt2"])
def test_the_model_is_unchanged_and_rows_have_their_own(kind, ids):
    lm = make(kind)
    hooks = lambda: [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in lm.model.modules()]  # noqa: E731
    before, installed = lm.model(ids).logits, hooks()
    result = evaluate_outliers(lm, ids)
    assert torch.equal(lm.model(ids).logits, before)
    assert hooks() == installed
    for kind in ("logits", "hidden"):
        assert max(row.get(f"{kind}_top1", 0) for row in result.rows) == top(result, kind, -1, 1)
    alone = evaluate_outliers(lm, ids[2:3])
    assert top(alone, "logits", -1, 1) == result.rows[2]["logits_top1"]


def test_magnitudes_stream_and_merge():
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 100
    stream, halves = Magnitudes(), [Magnitudes(), Magnitudes()]
    for i, part in enumerate(values.split(777)):
        stream.add(part)
        halves[i % 2].add(part)
    ranked = values.abs().sort(descending=True).values
    assert torch.equal(stream.top, ranked[:100])
    assert stream.median() == pytest.approx(values.abs().median().item(), rel=0.01)
    halves[0].take(halves[1].top, halves[1].histogram)
    assert halves[0].rows("x") == stream.rows("x")
    assert halves[0].histogram.sum() == 10_000


def test_metrics_by_hand():
    table = {}
    for key, values in {("logits", 0): [1, -9, 4], ("logits", 1): [2, 3], ("hidden", 1): [-7.5]}.items():
        table[key] = Magnitudes()
        table[key].add(torch.tensor(values, dtype=torch.float32))
    rows = ranked({**table, ("hidden", 0): table["logits", 0]})
    found = {(row["kind"], row["layer"], row["k"]): row["value"] for row in rows}
    assert [found["logits", -1, k] for k in (1, 2, 3)] == [9, 4, 3]
    assert ("logits", -1, 10) not in found
    assert found["logits", -1, 0] == pytest.approx(3, rel=0.005)
    assert (found["logits", 0, 1], found["logits", 1, 1], found["hidden", 1, 1]) == (9, 3, 7.5)


def test_rows_do_not_overlap_and_follow_the_seed(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i) for i in range(4000)))
    rows, side = load_rows(str(text), byte_tokenizer(), 50, 20)
    assert (rows.shape, side) == ((20, 50), "validation")
    assert len({tuple(row.tolist()) for row in rows}) == 20
    assert torch.equal(rows, load_rows(str(text), byte_tokenizer(), 50, 20)[0])
    assert not torch.equal(rows, load_rows(str(text), byte_tokenizer(), 50, 20, seed=1)[0])
    assert load_rows(str(text), byte_tokenizer(), 50, 100, split="any")[1] == "all"
    assert load_rows(str(text), byte_tokenizer(), 50, 20, split="all")[1] == "all"
    with pytest.raises(ValueError, match=r"the corpus .* 1000 rows of 50 need 50000; give more text"):
        load_rows(str(text), byte_tokenizer(), 50, 1000, split="any")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("outliers", {"length": 50, "samples": 20}, "20 rows of 50"),
        ("quantization", {"length": 50, "samples": 1, "rows": 20, "bits": [16]}, "20 rows of 50"),
        ("needle", {"length": 400, "samples": 1, "cells": [[1, 1]], "depths": [0.5]}, "prompts need 400"),
    ],
)
def test_a_model_of_this_package_is_not_measured_on_training_text_unless_told(name, options, message, tmp_path):
    (tmp_path / "text.txt").write_text("Some words in a row. " * 100)
    options["corpus"] = str(tmp_path / "text.txt")
    ours, other = (tiny_lm(family, positions=400) for family in ("diff", "gpt2"))
    with pytest.raises(ValueError, match=rf"the held-out text of .* {message}.*--split all reads"):
        run_eval(name, ours, options, tmp_path / "no.jsonl.gz")
    result = measured(name, ours, {**options, "split": "all"}, tmp_path / "all.jsonl.gz")
    assert result.about["part"] == "all"
    assert "note" not in result.about
    result = measured(name, other, options, tmp_path / "other.jsonl.gz")
    assert result.about["part"] == "all"
    assert "is too small, so training text of the corpus is measured too" in result.about["note"]
    with pytest.raises(ValueError, match="split 'most'"):
        run_eval(name, ours, {**options, "split": "most"}, tmp_path / "no.jsonl.gz")


def test_masked_values_count_for_nothing_and_blocks_change_nothing():
    torch.manual_seed(0)
    values, allowed = torch.randn(3, 4, 40, 50), torch.rand(40, 50) > 0.6
    whole, parts = Magnitudes(), Magnitudes()
    whole.add(values[allowed.expand_as(values)])
    for rows in range(0, 40, 7):
        parts.add(values[:, :, rows : rows + 7], allowed[rows : rows + 7])
    assert torch.equal(parts.top, whole.top)
    assert torch.equal(parts.histogram, whole.histogram)
    kept = values[allowed.expand_as(values)].abs()
    assert torch.equal(whole.top, kept.topk(100).values)
    assert whole.histogram.sum() == kept.numel()
    assert whole.median() == pytest.approx(kept.median().item(), rel=0.004)
    nothing = Magnitudes()
    nothing.add(values, torch.zeros(40, 50, dtype=torch.bool))
    assert (nothing.histogram.sum(), len(nothing.top)) == (0, 0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("queries", [1, 9, 20])
def test_a_block_reaches_every_key_that_it_may_attend_to_and_few_others(window, queries):
    q, k = torch.zeros(1, 1, queries, 4), torch.zeros(1, 1, 20, 4)
    call = AttentionCall(0, q, k, 1.0, None, True, window=window)
    for rows in call.blocks(60):
        allowed, keys = call.allowed(rows), call.reach(rows)
        assert allowed[:, keys].sum() == allowed.sum()
        assert allowed[:, keys].any(0).all()
    assert AttentionCall(0, q, k, 1.0, None, False).reach() == slice(0, 20)
