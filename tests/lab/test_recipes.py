"""The paper's recipes against the numbers that the paper prints."""

import pytest

from diff_transformer.checks import differences
from diff_transformer.lab.recipes import RECIPES, recipe
from diff_transformer.lab.worker import more_experiments
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import model_cost
from diff_transformer.train.config import RunConfig
from diff_transformer.train.step import learning_rate


def config_of(run):
    return DiffTransformerConfig(**run.model)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_whole(name):
    run = recipe(name)
    assert RunConfig.from_dict(run.to_dict()) == run
    assert config_of(run).max_position_embeddings >= run.data.length
    more_experiments(run)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reaches_its_rate_and_decays(name):
    run = recipe(name)
    rates = [learning_rate(step, run.train.steps, run.optim) for step in range(run.train.steps)]
    assert max(rates) == run.optim.lr
    assert rates[-1] == pytest.approx(run.optim.final_lr_ratio * run.optim.lr, abs=1e-12)
    assert run.optim.warmup_steps < run.train.steps


def test_3b_is_appendix_c():
    run = recipe("paper_3b")
    config = config_of(run)
    assert (config.hidden_size, config.num_hidden_layers, config.num_diff_heads) == (3072, 28, 12)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (128, 8192, 100_288)
    assert run.train.batch_size * run.data.length == pytest.approx(4e6, rel=0.05)
    assert run.train.steps * run.train.batch_size * run.data.length == pytest.approx(1e12, rel=1e-4)
    optim = run.optim
    assert (optim.lr, optim.betas, optim.weight_decay, optim.warmup_steps) == (3.2e-4, (0.9, 0.95), 0.1, 1000)
    assert optim.lr * optim.final_lr_ratio == pytest.approx(1.28e-5)


@pytest.mark.parametrize(
    ("size", "width", "layers", "heads", "rate"),
    [
        ("830m", 1536, 24, 8, 1.5e-4), ("1p4b", 2048, 24, 8, 1.5e-4), ("2p8b", 2560, 32, 10, 1.5e-4),
        ("6p8b", 4096, 32, 16, 7.5e-5), ("13b", 5120, 40, 20, 7.5e-5),
    ],
)  # fmt: skip
def test_scaling_is_appendix_d(size, width, layers, heads, rate):
    run = recipe(f"scaling_{size}")
    config = config_of(run)
    assert (config.hidden_size, config.num_hidden_layers, config.num_diff_heads) == (width, layers, heads)
    assert (run.data.length, run.train.steps) == (2048, 40_000)
    assert run.train.batch_size * run.data.length == pytest.approx(0.25e6, rel=0.05)
    optim = run.optim
    assert (optim.lr, optim.betas, optim.weight_decay, optim.warmup_steps) == (rate, (0.9, 0.98), 0.05, 375)
    named = float(size.replace("p", ".").rstrip("mb")) * (1e6 if size.endswith("m") else 1e9)
    assert model_cost(config).total_parameters == pytest.approx(named, rel=0.03)


def test_64k_continues_the_3b_model():
    short, long = recipe("paper_3b"), recipe("long_context_64k")
    assert long.model["rope_parameters"]["rope_theta"] == 640_000
    assert (long.data.length, long.optim.lr) == (65_536, 8e-5)
    assert long.train.steps * long.train.batch_size * long.data.length == pytest.approx(1.5e9, rel=0.01)
    changed = {line.split(":")[0] for line in differences(short.model, long.model)}
    assert changed == {"max_position_embeddings", "rope_parameters"}
