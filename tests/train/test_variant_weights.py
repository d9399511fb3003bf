"""Every side of a comparison starts from the same values wherever it has the same parameters."""

import pytest
import torch

from diff_transformer.lab.compare import side_model
from diff_transformer.lab.recipes import recipe
from diff_transformer.model.matching import VARIANTS
from diff_transformer.train.config import override
from diff_transformer.train.initial_model import build_model
from diff_transformer.train.training_data import load_training_data


@pytest.fixture(scope="module")
def training_data(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "words.txt"
    text.write_text(" ".join(f"line {i} of words that repeat." for i in range(2000)))
    settings = [f"data.corpus={text}", "model.vocab_size=300", 'data.mixture={"text": 1.0}']
    config = override(recipe("debug"), settings)
    return config, load_training_data(config).tokenizer


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "softmax"])
def test_weights_of_equal_shape_are_shared_with_the_pair(training_data, name):
    config, tokenizer = training_data
    softmax = build_model(override(config, ["model.attention=softmax"]), tokenizer).state_dict()
    config.model, before = side_model(config, name), config.model
    model = build_model(config, tokenizer).state_dict()
    config.model = before
    shared = {n for n in softmax if softmax[n].shape == model[n].shape}
    assert all(torch.equal(model[n], softmax[n]) for n in shared)
    part = {n.split(".", 3)[-1] for n in softmax.keys() - shared}
    feed_forward = {f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    own = {
        "diff_v2": {"self_attn.q_proj.weight", *feed_forward},
        "grouped_diff": {f"self_attn.{p}_proj.weight" for p in "kvo"} | feed_forward,
    }
    assert part == own.get(name, set())
