"""DINT: rows sum to 1, running means, padding, documents, and the state beside the cache."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache, StaticCache

from diff_transformer import DiffAttention, DiffTransformerForCausalLM
from diff_transformer.model.inputs import Packing
from diff_transformer.model.presets import preset


def make_layer(causal=True, **options):
    torch.manual_seed(0)
    return DiffAttention(32, 4, attention="dint", is_causal=causal, **{"layer_index": 2, **options}).double()


def make_model(**fields):
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(
        preset("debug", attention="dint", embedding_initializer_range=1.0, **fields)
    ).eval()


def inputs(rows=2, length=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, length, 32, generator=generator, dtype=torch.float64)


def tokens(rows=2, length=20):
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("causal", [True, False])
def test_rows_sum_to_one(causal):
    layer = make_layer(causal)
    first, second, whole = layer(inputs(), output_attention_parts=True)[1]
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 2, 9, dtype=torch.float64), atol=1e-12, rtol=0)
    difference = first - layer.core.lam() * second
    assert (difference.sum(-1) - 1).abs().min() > 0.01
    torch.testing.assert_close(layer(inputs(), output_attentions=True)[1], whole)


def test_two_tokens_by_hand():
    """One row of A1 is (1, 0); of the other, (p, 1 - p), the causal mean is ((1 + p) / 2, (1 - p) / 2)."""
    layer = make_layer()
    first, second, whole = (x[0, 0].detach() for x in layer(inputs(1, 2), output_attention_parts=True)[1])
    lam, p, r = layer.core.lam().item(), float(first[1, 0]), float(second[1, 0])
    expected = [[1 - lam + lam, 0.0], [p - lam * r + lam * (1 + p) / 2, (1 - p) - lam * (1 - r) + lam * (1 - p) / 2]]
    torch.testing.assert_close(whole, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)


def test_the_output_is_the_map_times_the_values():
    layer = make_layer(head_norm=False)
    layer.core.lam.initial, gain = 0.3, 0.7
    x = inputs()
    whole = layer(x, output_attentions=True)[1]
    v = layer.v_proj(x).view(2, 9, 2, 16).transpose(1, 2)
    expected = layer.o_proj((gain * whole @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected, atol=1e-12, rtol=1e-10)


def test_no_query_knows_of_later_ones():
    layer, x = make_layer(), inputs()
    changed = x.clone()
    changed[:, 6:] = 7.0
    assert torch.equal(layer(changed)[0][:, :6], layer(x)[0][:, :6])
    everywhere = make_layer(causal=False)
    assert not torch.allclose(everywhere(changed)[0][:, :6], everywhere(x)[0][:, :6])


@pytest.mark.parametrize("causal", [True, False])
def test_padding_does_not_count(causal):
    """On both sides of a row; the rows alone give the same."""
    layer, x = make_layer(causal), inputs()
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :3] = keep[1, 5:] = False
    out, whole = layer(x, key_padding_mask=keep, output_attentions=True)
    for row, part in ((0, slice(3, 9)), (1, slice(0, 5))):
        alone, map_alone = layer(x[row : row + 1, part], output_attentions=True)
        torch.testing.assert_close(out[row, part], alone[0])
        torch.testing.assert_close(whole[row, :, part, part], map_alone[0])
    if causal:
        assert (out[0, :3] == 0).all()  # before the first token nothing may be seen


def test_additive_masks_hide_as_boolean_ones_do():
    layer, x = make_layer(), inputs(1)
    seen = torch.ones(9, 9).tril().bool()
    seen[:, :3] = False
    for hidden in (float("-inf"), torch.finfo(torch.float64).min, -1e9, -1e4):
        mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~seen, hidden)
        out = layer(x, attention_mask=mask, is_causal=False)[0]
        torch.testing.assert_close(out[:, 3:], layer(x, attention_mask=seen, is_causal=False)[0][:, 3:])
        torch.testing.assert_close(out[:, 3:], layer(x[:, 3:])[0])


@pytest.mark.parametrize("causal", [True, False])
def test_the_mean_begins_anew_in_each_document(causal):
    layer, x = make_layer(causal), inputs(2, 9)
    bounds = torch.tensor([0, 1, 7, 9, 18], dtype=torch.int32)
    out = layer(x, documents=Packing(bounds, 9))[0].flatten(0, 1)
    rows = x.flatten(0, 1)
    parts = [layer(rows[None, a:b])[0][0] for a, b in pairwise(bounds)]
    torch.testing.assert_close(out, torch.cat(parts), atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("training", [False, True])
def test_positions_that_begin_anew_begin_the_mean_anew(training):
    model, ids = make_model().train(training), tokens()
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    together = model(ids, position_ids=positions).logits
    for part in (slice(0, 8), slice(8, 20)):
        torch.testing.assert_close(together[:, part], model(ids[:, part]).logits, atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="positions that begin anew"):
        model(ids, position_ids=positions, use_cache=True)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_under_which_sight_is_lost_is_refused(additive):
    """As a mask of packed documents or a window is; the mean would go on over what it hides."""

    def mask(seen):
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf")) if additive else seen

    model, ids = make_model(), tokens()
    causal = torch.ones(1, 1, 20, 20).tril().bool()
    documents = causal.clone()
    documents[..., 8:, :8] = False
    with pytest.raises(ValueError, match="a later query see less than an earlier one"):
        model(ids, attention_mask=mask(documents))
    padded = causal.clone()
    padded[..., :3] = padded[..., 17:, :] = False  # on the left, and on the right with rows that see nothing
    got = model(ids, attention_mask=mask(padded), position_ids=torch.arange(20)[None] - 3).logits
    torch.testing.assert_close(got[:, 3:17], model(ids[:, 3:17]).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("cuts", [[20], [5, 4, 11], [1] * 20, [19, 1]])
def test_the_cached_state_continues_the_mean(cache, cuts):
    model, ids = make_model(), tokens()
    made = (
        DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=32)
    )
    for _ in range(2):  # and after a reset
        logits = [model(part, past_key_values=made, use_cache=True).logits for part in ids.split(cuts, 1)]
        torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, atol=2e-5, rtol=1e-5)
        made.reset()


def test_padding_of_a_static_cache_has_a_column_for_each_slot():
    model, ids, mask = make_model(), tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    slots = torch.zeros(2, 16, dtype=torch.long)
    slots[:, :7] = mask
    cache = StaticCache(config=model.config, max_cache_len=16)
    got = [model(ids[:, :5], attention_mask=slots, past_key_values=cache).logits]
    got += [model(ids[:, 5:], attention_mask=slots, past_key_values=cache).logits]
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.cat(got, 1)[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=1e-5)


def test_a_causal_layer_is_not_called_without_its_limit():
    layer, x = make_layer(), inputs()
    for padding in (None, torch.ones(2, 9, dtype=torch.bool)):
        with pytest.raises(ValueError, match="takes running means; build it with is_causal=False"):
            layer(x, is_causal=False, key_padding_mask=padding)


@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_padded_prompts_generate_as_alone(chunk, cache):
    """Left padding of unequal length, also where a chunk of the prompt is padding alone."""
    model, ids = make_model(), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :2] = mask[1, :9] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    together = model.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **cache, **options)
    for row, start in ((0, 2), (1, 9)):
        alone = model.generate(ids[row : row + 1, start:], use_cache=False, **options)
        assert torch.equal(together[row, start:], alone[0])


def test_beams_take_their_state_along():
    model, ids = make_model(), tokens()
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 4, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def test_right_padding_leaves_the_state_alone():
    """A batch of unequal prompts, padded behind: what comes after must not see the padding's queries."""
    model, ids = make_model(), tokens(1, 12)
    padded = torch.cat((ids[:, :8], torch.zeros(1, 4, dtype=torch.long)), 1)
    mask = torch.tensor([[1] * 8 + [0] * 4 + [1]])
    cache = DynamicCache(config=model.config)
    model(padded, attention_mask=mask[:, :12], past_key_values=cache)
    positions = torch.tensor([[8]])
    last = model(ids[:, 8:9], attention_mask=mask, past_key_values=cache, position_ids=positions).logits
    torch.testing.assert_close(last, model(ids[:, :9]).logits[:, -1:], atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("again", [lambda cache: cache, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("rows", [[1, 0, 2], [2, 0], [1, 1, 0, 2]])
def test_the_running_mean_follows_the_batch_of_the_cache(again, rows):
    model, ids = make_model(), tokens(3, 12)
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache)
    cache = again(cache)
    cache.batch_select_indices(torch.tensor(rows))
    cache.batch_repeat_interleave(2)
    step = ids[rows].repeat_interleave(2, dim=0)
    last = model(step[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(last, model(step, use_cache=False).logits[:, 8:], atol=2e-5, rtol=1e-5)


def test_what_cannot_go_back_says_so():
    model, ids = make_model(), tokens(1)
    with pytest.raises(ValueError, match=r"has no place; make the cache with DynamicCache\(config=model.config\)"):
        model(ids, past_key_values=DynamicCache())
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="give the whole sequence in one call"):
        model(ids, past_key_values=cache, output_attentions=True)
    with pytest.raises(ValueError, match="without causal limit needs all queries at once"):
        make_layer(False, layer_index=0)(inputs(), past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="a window of 8 keys is asked for"):
        preset("debug", attention="dint", sliding_window=8)


def test_a_step_of_decoding_compiles():
    model, ids = make_model(), tokens(1, 6)
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids, past_key_values=cache)
    step = torch.compile(model, fullgraph=True, backend="eager")
    seen = ids
    for token in (3, 5, 7):
        seen = torch.cat((seen, torch.tensor([[token]])), 1)
        with torch.no_grad():
            logits = step(seen[:, -1:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(seen).logits[:, -1:], atol=2e-5, rtol=1e-5)
