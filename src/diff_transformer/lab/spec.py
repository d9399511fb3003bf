"""What a study consists of: cells (one model trained and measured each) in stages, the most telling first."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diff_transformer.train.config import RunConfig

Choices = dict[str, float]  # what an earlier stage decided: the learning rate of each side


@dataclass(frozen=True)
class Cell:
    """One model of a study. ``setting`` is what a comparison holds fixed, ``side`` what it compares (both are parts of
    a path); ``measured``: run the experiments on it after training, or keep its curve alone."""

    setting: str
    side: str
    config: RunConfig
    measured: bool = True

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def key(self) -> str:
        return f"{self.setting}/{self.side}-seed{self.seed}"


@dataclass(frozen=True)
class Study:
    """Cells in order of importance, in two stages: ``sweep`` first; from its final validation losses ``choose`` takes a
    learning rate for each side, with which ``cells`` makes the rest."""

    name: str
    sweep: list[Cell]
    cells: Callable[[Choices], list[Cell]]

    def choose(self, losses: dict[str, float]) -> Choices:
        """For each side the learning rate with the lowest loss.

        Args:
            losses: final validation loss by key of the sweep's cells.

        Raises:
            ValueError: if a cell of the sweep is missing.
        """
        missing = [cell.key for cell in self.sweep if cell.key not in losses]
        if missing:
            raise ValueError(f"the sweep is not finished: {', '.join(missing)} missing")
        best: dict[str, Cell] = {}
        for cell in self.sweep:
            known = best.get(cell.side)
            if known is None or losses[cell.key] < losses[known.key]:
                best[cell.side] = cell
        return {side: cell.config.optim.lr for side, cell in best.items()}


def seeds(setting: str, side: str, config: RunConfig, numbers: range, *, measured: bool = True) -> Iterator[Cell]:
    """The same cell with each seed of ``numbers``."""
    for seed in numbers:
        trained = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        yield Cell(setting, side, trained.validate(), measured)
