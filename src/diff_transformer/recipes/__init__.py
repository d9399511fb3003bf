"""Recipes: functions that return the full configuration of a run. Their docstrings say what to expect of them."""

import difflib
from collections.abc import Callable

from diff_transformer.recipes import desk, one_gpu, paper, uptrain
from diff_transformer.train.config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "debug": desk.debug,
    "demo": desk.demo,
    "desk": desk.desk,
    "novels": desk.novels,
    "one_gpu": one_gpu.one_gpu,
    "one_gpu_16k": one_gpu.one_gpu_16k,
    "uptrain": uptrain.uptrain,
    **paper.recipes(),
}


def recipe(name: str) -> RunConfig:
    """The configuration of the recipe called ``name``.

    Raises:
        ValueError: for a name that is not in ``RECIPES``.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no recipe {name!r}{hint}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]()
