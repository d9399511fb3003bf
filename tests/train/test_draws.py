"""The model of a run starts like its matched Transformer without both being in memory."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from diff_transformer.lab.compare import side_model
from diff_transformer.lab.recipes import recipe
from diff_transformer.model.config import DiffTransformerConfig, matched_baseline
from diff_transformer.model.matching import VARIANTS
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.train.config import override
from diff_transformer.train.initial_model import InitialValues, build_model

TOKENIZER = SimpleNamespace(pad_token_id=None, bos_token_id=None, eos_token_id=0)
PEAK = """
import resource, sys
from types import SimpleNamespace
from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import override
from diff_transformer.train.initial_model import build_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

tokenizer = SimpleNamespace(pad_token_id=None, bos_token_id=None, eos_token_id=0)
build_model(recipe("debug"), tokenizer)
before = peak()
model = build_model(override(recipe("debug"), sys.argv[1:]), tokenizer)
print((peak() - before) / sum(4 * p.numel() for p in model.parameters()))
"""


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize(
    "settings",
    [
        ["model.attention=softmax", "model.head_norm_init=1.0"],
        ["model.attention=diff"],
        ["model.attention=diff_v2", "model.head_norm_init=1.0"],
        ["model.attention=dint", "model.tie_word_embeddings=false"],
        ["model.hidden_act=poly_norm", "model.embedding_initializer_range=1.0"],
    ],
    ids=" ".join,
)
def test_the_start_is_that_of_copying_from_the_whole_baseline(settings, seed):
    config = override(recipe("debug"), [*settings, f"train.seed={seed}"])
    model = build_model(config, TOKENIZER)
    after = torch.get_rng_state()

    torch.manual_seed(seed)
    special = {name: getattr(TOKENIZER, name) for name in vars(TOKENIZER)}
    made = DiffTransformerConfig(**{**special, **config.model})
    baseline = DiffTransformerForCausalLM(matched_baseline(made))
    expected = baseline if made.attention == "softmax" else DiffTransformerForCausalLM(made)
    with torch.no_grad():
        own = dict(expected.named_parameters())
        for name, value in baseline.named_parameters():
            if own[name].shape == value.shape:
                own[name].copy_(value)

    assert torch.equal(after, torch.get_rng_state())
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_trained_is_what_was_asked_for(name):
    config = recipe("debug")
    config.model = side_model(config, name) | {"head_norm_init": 0.1}
    model = build_model(config, TOKENIZER)
    expected = DiffTransformerForCausalLM(DiffTransformerConfig(**config.model))
    assert [(name, value.shape) for name, value in model.named_parameters()] == [
        (name, value.shape) for name, value in expected.named_parameters()
    ]
    for field, value in config.model.items():
        assert getattr(model.config, field) == value


def test_normalised_heads_start_as_the_others_but_for_the_norm():
    config = recipe("debug")
    config.model |= {"attention": "softmax", "head_norm_init": 0.1}
    plain = build_model(config, TOKENIZER).state_dict()
    config.model["softmax_head_norm"] = True
    normalised = build_model(config, TOKENIZER).state_dict()
    own = normalised.keys() - plain.keys()
    assert len(own) == config.model["num_hidden_layers"]
    assert all((normalised[name] == 0.1).all() for name in own)
    assert all(torch.equal(normalised[name], value) for name, value in plain.items())


@pytest.mark.skipif(sys.platform == "win32", reason="resource is of Unix")
def test_building_holds_little_more_than_the_model():
    size = ["hidden_size=1024", "num_attention_heads=16", "num_hidden_layers=4", "vocab_size=512"]
    command = [sys.executable, "-c", PEAK, *(f"model.{setting}" for setting in size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.4  # both models at once: 2.0


def test_a_draw_that_was_changed_or_whose_memory_went_on_is_no_start():
    def model():
        made = torch.nn.Module()
        made.drawn = torch.nn.Parameter(torch.empty(64).normal_())
        made.scaled = torch.nn.Parameter(torch.empty(64).normal_())
        made.scaled.data.mul_(3)
        torch.empty(64).normal_()  # freed: the next tensor may get its memory
        made.ones = torch.nn.Parameter(torch.ones(64))
        return made

    torch.manual_seed(0)
    expected = {name: value.detach().clone() for name, value in model().named_parameters()}
    torch.manual_seed(0)
    initial = InitialValues(model)
    other = model()
    initial.copy_to(other)
    for name, value in other.named_parameters():
        assert torch.equal(value, expected[name]), name
