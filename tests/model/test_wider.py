"""The wider Transformer: the logits of its source, and as many parameters as what the source converts to."""

import pytest
import torch
from architectures import tiny

from diff_transformer import differentiate
from diff_transformer.model.wider import wider, wider_heads

IDS = torch.randint(3, 101, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["SmolLM2", "Llama with biases", "Qwen3", "Mixtral", "Starcoder2", "GLM-4"])
def test_the_logits_stay_and_the_new_heads_learn(name):
    source = tiny(name)
    made = wider(source)
    output = made(IDS, labels=IDS)
    torch.testing.assert_close(output.logits, source(IDS).logits, atol=2e-6, rtol=1e-5)
    output.loss.backward()
    for key, parameter in made.named_parameters():
        assert parameter.grad is not None
        if key.endswith("o_proj.weight"):  # also at the columns of the new heads
            assert parameter.grad.count_nonzero() > 0.9 * parameter.numel()
    assert made.num_parameters() == pytest.approx(differentiate(source, "diff").num_parameters(), rel=0.005)


@pytest.mark.parametrize(
    ("heads", "new"),
    [((8, 8), (12, 12)), ((3, 3), (6, 3)), ((9, 3), (15, 3)), ((32, 8), (48, 12)), ((8, 1), (13, 1)), ((1, 1), (2, 1))],
)
def test_projections_grow_by_as_much_as_those_of_two_maps(heads, new):
    assert wider_heads(*heads) == new
    grown = 2 * (new[0] - heads[0] + new[1] - heads[1])
    assert abs(grown - sum(heads)) <= 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OLMo 2", "q_norm.weight spans several of them"),
        ("Phi-3, Phi-4", "qkv_proj.weight spans several of them"),
        ("GPT-NeoX, Pythia", "its configuration does not say how wide they are"),
        ("GPT-2", "`embed_dim` must be divisible by num_heads"),
    ],
)
def test_a_model_whose_heads_cannot_be_added_to_is_refused(name, message):
    with pytest.raises(ValueError, match=f"cannot get more heads: .*{message}"):
        wider(tiny(name))
