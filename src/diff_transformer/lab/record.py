"""``Record``: all results of one trained model, from its rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.lab.quantities import registered
from diff_transformer.lab.results import read_results
from diff_transformer.lab.rows import FILE, MODEL, Rows, read_file


@dataclass(frozen=True)
class Record:
    """All results of one trained model.

    Attributes:
        setting: what a comparison holds fixed: a recipe, or the setting of a study. Empty if the training is unknown.
        side: what a comparison varies: ``"diff"``, ``"softmax"`` or a variant; the name of a model trained elsewhere.
        seed: the training seed's number among the runs of its setting and side.
        rows: its rows.
    """

    setting: str
    side: str
    seed: int
    rows: Rows

    @property
    def config(self) -> dict[str, Any]:
        """The run's ``RunConfig`` as a dictionary; empty for a model trained elsewhere."""
        return self.rows.about("run").get("config", {})

    @property
    def diverged(self) -> str | None:
        """The step and loss at which training diverged, or None."""
        return self.rows.about("run").get("diverged")

    @property
    def metrics(self) -> dict[str, float]:
        """The quantities that were measured, by id (``lab/quantities.py``)."""
        every = {
            quantity.id: quantity.values(self.rows, self.side).get(self.seed) for quantity in registered(self.rows)
        }
        return {name: value for name, value in every.items() if value is not None}


def load_records(*sources: Path | str) -> list[Record]:
    """The records of files and folders of results of ``eval``, ``compare`` and ``study``: one for each trained model.

    Args:
        sources: files of rows (``.jsonl.gz``) or folders.

    Raises:
        UserError: if a source does not exist, or holds no rows.
    """
    return records_of(read_results(*sources))


def records_of(rows: Rows) -> list[Record]:
    """A record for each setting, side and training seed, in this order."""
    models = {key for frame in rows.frames.values() for key in zip(*(frame[name] for name in MODEL), strict=True)}
    order = rows.sides
    keys = sorted((key for key in models if key[1]), key=lambda key: (key[0], order.index(key[1]), key[2]))
    return [
        Record(setting, side, int(seed), rows.only(setting=setting, side=side, seed=seed))
        for setting, side, seed in keys
    ]


def load_run(folder: Path) -> Record:
    """The record of the finished run in ``folder``."""
    (record,) = records_of(Rows(read_file(folder / FILE)))
    return record
