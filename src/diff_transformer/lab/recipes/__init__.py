"""Recipes: functions that return the full configuration of a run. Each docstring has command, hardware and result."""

from collections.abc import Callable

from diff_transformer.checks import require_known
from diff_transformer.lab.recipes import desk, one_gpu, paper
from diff_transformer.train.config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "debug": desk.debug,
    "demo": desk.demo,
    "desk": desk.desk,
    "novels": desk.novels,
    "one_gpu": one_gpu.one_gpu,
    "one_gpu_16k": one_gpu.one_gpu_16k,
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
