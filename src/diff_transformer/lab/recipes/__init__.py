"""Recipes: functions that return the full configuration of a run. Each docstring has command, hardware and result."""

from collections.abc import Callable
from dataclasses import replace

from diff_transformer.checks import require_known
from diff_transformer.lab.recipes import desk, one_gpu, paper
from diff_transformer.train.config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "debug": desk.debug,
    "demo": desk.demo,
    "novels": desk.novels,
    "one_gpu": one_gpu.one_gpu,
    "uptrain": desk.uptrain,
    **paper.recipes(),
}


def recipe(name: str) -> RunConfig:
    """The configuration of the recipe called ``name``.

    Raises:
        ValueError: for a name that is not in ``RECIPES``.
    """
    require_known("recipe", name, RECIPES)
    return RECIPES[name]()


def shortened(config: RunConfig) -> RunConfig:
    """``config`` with at most 100 steps and the measurements of ``debug``: all of a comparison, but no finding."""
    train = replace(config.train, steps=min(100, config.train.steps), checkpoint_every=50, validate_every=50)
    optim = replace(config.optim, warmup_steps=min(10, config.optim.warmup_steps))
    return replace(config, train=train, optim=optim, evaluation=desk.debug().evaluation)
