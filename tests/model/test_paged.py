"""Continuous batching, transformers' paged cache, carries differential attention."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.caches import update_paged_cache
from diff_transformer.model.implementations import DEFAULT
from diff_transformer.model.presets import preset

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 20]
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 511, "pad_token_id": 0}
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4, "signal_heads_per_noise_head": 3}


def make(attention, **fields):
    torch.manual_seed(0)
    return DiffTransformerForCausalLM(preset("debug", attention=attention, initializer_range=0.2, **fields)).eval()


@pytest.mark.parametrize(
    ("attention", "fields", "name"),
    [
        ("diff", {"num_key_value_heads": 2}, "sdpa"),
        pytest.param("diff", {"num_key_value_heads": 2}, "eager", marks=pytest.mark.slow),
        ("diff", {"sliding_window": 4}, "sdpa"),
        pytest.param("softmax", {"num_key_value_heads": 2}, "sdpa", marks=pytest.mark.slow),
        ("diff_v2", {"num_key_value_heads": 2}, "sdpa"),
        ("grouped_diff", GROUPED, "sdpa"),
    ],
)
def test_requests_answered_together_are_as_if_alone(attention, fields, name):
    model = make(attention, **fields)
    alone = [model.generate(torch.tensor([p]), **OPTIONS)[0, len(p) :].tolist() for p in PROMPTS]
    assert len({tuple(answer) for answer in alone}) == len(PROMPTS)
    model.set_attn_implementation(name)
    answers = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(**OPTIONS),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=16),
        progress_bar=False,
    )
    assert [answer.error for answer in answers.values()] == [None] * len(PROMPTS)
    assert [answers[key].generated_tokens for key in sorted(answers)] == alone


class FakeCache:
    """Gives back what it was given, twice as long."""

    def update(self, k, v, layer_idx, options):
        assert (layer_idx, options) == (3, {"read_index": 1})
        assert k.shape == v.shape == (1, 4, 5, 8)
        return torch.cat((k, k), 2), torch.cat((v, v), 2)


def test_wide_values_are_kept_as_narrow_heads_and_come_back_wide():
    k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 16)
    keys, values = update_paged_cache(FakeCache(), k, v, 3, torch.ones(1, 1, 5, 10), {"read_index": 1})
    assert torch.equal(keys, torch.cat((k, k), 2))
    assert torch.equal(values, torch.cat((v, v), 2))


def test_what_cannot_be_kept_is_refused():
    k, mask = torch.randn(1, 4, 5, 8), torch.ones(1, 1, 5, 10)
    with pytest.raises(ValueError, match="needs attn_implementation='sdpa' or 'eager'"):
        update_paged_cache(FakeCache(), k, torch.randn(1, 2, 5, 16), 3, None, {})
    with pytest.raises(ValueError, match="4 key heads of width 8 and 4 value heads of width 16"):
        update_paged_cache(FakeCache(), k, torch.randn(1, 4, 5, 16), 3, mask, {})


def test_the_default_implementation_gives_way_to_sdpa():
    model = make("diff", num_key_value_heads=2)
    alone = [model.generate(torch.tensor([p]), **OPTIONS)[0, len(p) :].tolist() for p in PROMPTS]
    answers = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(**OPTIONS),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=16),
        progress_bar=False,
    )
    assert [answers[key].generated_tokens for key in sorted(answers)] == alone
    assert model.config._attn_implementation == DEFAULT
    assert {layer.self_attn.core.backend for layer in model.model.layers} == {"auto"}


def test_other_implementations_are_refused_before_anything_runs():
    model = make("diff")
    model.set_attn_implementation("diff_blockwise")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        model.generate_batch(PROMPTS, generation_config=GenerationConfig(**OPTIONS), progress_bar=False)
