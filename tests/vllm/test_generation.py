"""The engine writes what our own ``generate`` writes: every variant and option, in one batch of different lengths."""

import math

import pytest
import torch
from engine_models import answers, ask, expected, prompts

from diff_transformer.testing import assert_within_budget

PAGE = 32
LENGTHS = (1, 3, PAGE - 1, PAGE, PAGE + 1, 150)  # the answers go past a page, and past a window

CASES = {
    "diff": {"attention": "diff"},
    "softmax": {"attention": "softmax"},
    "diff_v2": {"attention": "diff_v2"},
    "grouped_diff": {"attention": "grouped_diff", "num_attention_heads": 8},
    "grouped, r = 2": {
        "attention": "grouped_diff", "num_attention_heads": 6, "head_dim": 16, "signal_heads_per_noise_head": 2
    },
    "each head its own keys": {"attention": "diff", "num_key_value_heads": 4},
    "fixed lambda": {"attention": "diff", "lambda_learned": False},
    "lambda_init a constant": {"attention": "diff", "lambda_init": 0.3},
    "lambda counted one less": {"attention": "diff", "lambda_depth_offset": -1},
    "no weight in the head norm": {"attention": "diff", "head_norm": "no_weight"},
    "no head norm": {"attention": "diff", "head_norm": False},
    "head norm's own epsilon": {"attention": "diff", "head_norm_eps": 0.1},
    "softmax with a head norm": {"attention": "softmax", "softmax_head_norm": True},
    "poly norm": {"attention": "diff", "hidden_act": "poly_norm"},
    "tied embeddings": {"attention": "diff", "tie_word_embeddings": True},
    "scaled positions": {
        "attention": "diff",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128
        },
    },
    **{
        f"window, {attention}": {"attention": attention, "sliding_window": 20}
        for attention in ("diff", "softmax", "diff_v2")
    },
    "padded heads": {"attention": "diff", "head_dim": 12},
    "padded heads, diff_v2": {"attention": "diff_v2", "head_dim": 12},
    "padded heads, softmax": {"attention": "softmax", "head_dim": 12},
    "narrow values": {"attention": "diff", "value_head_dim": 20},
    "wide values": {"attention": "diff", "value_head_dim": 64},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_tokens_as_generate(case, save_model, start_engine):
    model, folder = save_model(**CASES[case])
    rows = prompts(*LENGTHS)
    got, wanted = answers(start_engine(folder, block_size=PAGE), rows), expected(model, rows)
    assert got == wanted
    assert len(set().union(*wanted)) > 20, "the answers repeat few tokens: they would say little"


@pytest.mark.parametrize("attention", ["diff", "softmax", "diff_v2", "grouped_diff"])
def test_log_probabilities_within_the_budget(attention, save_model, start_engine):
    """Of a prompt and of what follows, against fp64, beside our own model's error."""
    model, folder = save_model(**CASES[attention])
    row = prompts(70)[0]
    output = ask(start_engine(folder), [row], tokens=8, logprobs=5)[0]
    whole = torch.tensor([row + list(output.token_ids)])
    eager = model(whole).logits.log_softmax(-1)[0]
    exact = model.double()(whole).logits.log_softmax(-1)[0]
    model.float()
    for step, found in enumerate(output.logprobs):
        place = len(row) - 1 + step
        tokens = torch.tensor(list(found))
        got = torch.tensor([found[int(token)].logprob for token in tokens])
        assert_within_budget(got, exact[place, tokens], eager[place, tokens], what=f"logprobs of step {step}")
        assert max(found, key=lambda token: found[token].logprob) == int(exact[place].argmax())
        assert not any(math.isnan(entry.logprob) for entry in found.values())
