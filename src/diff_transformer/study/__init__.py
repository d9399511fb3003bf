"""Many small runs with several seeds, done piece by piece, and what they say together."""

from diff_transformer.recipes.plan import Cell, Study
from diff_transformer.study.run import run_study

__all__ = ["Cell", "Study", "run_study"]
