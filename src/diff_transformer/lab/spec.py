"""The plan of a comparison: a ``RunSpec`` for each model."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.checks import differences, read_json
from diff_transformer.durable import write_whole
from diff_transformer.errors import UserError
from diff_transformer.lab.rows import REQUEST, finished
from diff_transformer.lab.sides import PAIR
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.heads import MATCHED
from diff_transformer.model.matching import variant, variant_fields
from diff_transformer.train.config import RunConfig

PAIR_EVALS = ("associative_recall", "needle", "allocation", "outliers")  # of every comparison; see ``lab/worker.py``
_LATER = ("throughput_repeats", "recall_steps", "more")  # settings that do not change what a finished run measured
_SIZES = ("num_key_value_heads", "value_head_dim", "intermediate_size")  # of a variant, so that costs are equal


@dataclass(frozen=True)
class RunSpec:
    """One model to train and measure.

    Attributes:
        setting: what a comparison holds fixed; part of a path.
        side: what it varies; part of a path.
        seed: number of the run among those of its setting and side.
        config: of the training run.
        measure: experiments to run on the trained model: names of ``PAIR_EVALS``, of ``config.evaluation.more``,
            ``RECALL`` or ``EXPLORER``. None: the run ends after training, and has no record until it is measured.
        may_diverge: whether a diverged run is a result; if not, it is an error.
    """

    setting: str
    side: str
    seed: int
    config: RunConfig
    measure: tuple[str, ...] | None = ()
    may_diverge: bool = False

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.side}-seed{self.seed}"

    @property
    def identity(self) -> tuple[str, int, str]:
        """Side, training seed and setting, the arguments of ``record.row``."""
        return self.side, self.seed, self.setting

    @property
    def key(self) -> str:
        """Path of the run's folder in a study."""
        return f"{self.setting}/{self.name}"

    def save(self, folder: Path) -> None:
        """Write the spec as ``request.json`` of the run's folder, which is created."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        write_whole(folder / REQUEST, json.dumps({**values, "config": self.config.to_dict()}, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "RunSpec":
        """Read the file of ``save``."""
        values: dict[str, Any] = read_json(folder / REQUEST)
        values["measure"] = None if values["measure"] is None else tuple(values["measure"])
        values["config"] = RunConfig.from_dict(values["config"])
        return cls(**values)


def check_folders(runs: Mapping[Path, RunSpec]) -> None:
    """Check that no folder holds a run that was trained with other settings, or that ended with fewer measurements.

    Raises:
        UserError: if one does, with what differs.
    """
    from diff_transformer.train.run_folder import changes_results

    for folder, spec in runs.items():
        if not (folder / REQUEST).exists():
            continue
        if finished(folder) and (lacks := {*(spec.measure or ())} - {*(RunSpec.load(folder).measure or ())}):
            raise UserError(
                f"{folder} ended without {', '.join(sorted(lacks))}; leave them out, choose another folder, or measure "
                "its model with `diff-transformer eval`"
            )
        there, here = RunConfig.from_dict(read_json(folder / REQUEST)["config"]).to_dict(), spec.config.to_dict()
        different = changes_results(there, here)
        if finished(folder) or (folder / "parts").is_dir():  # what is measured already
            measured = [{k: v for k, v in of["evaluation"].items() if k not in _LATER} for of in (there, here)]
            different += [line for line in differences(*measured, "evaluation.") if line not in different]
        if different:
            lines = "\n  ".join(different)
            raise UserError(
                f"{folder} has another configuration (saved against given):\n  {lines}\nchoose another folder, or give "
                "the settings it has"
            )


def everything(config: RunConfig) -> tuple[str, ...]:
    """The experiments of a comparison of ``config``."""
    return (*PAIR_EVALS, *config.evaluation.more)


def side_model(config: RunConfig, name: str) -> dict[str, Any]:
    """``config.model`` for a side of the pair or a variant, with sizes that keep the cost equal to the pair's.

    Raises:
        ValueError: if the variant does not support the configuration's heads.
    """
    fields = {"attention": name} if name in PAIR else variant_fields(name)
    own = fields["attention"] == config.model.get("attention", "diff")
    shared = {key: value for key, value in config.model.items() if own or key != "core"}
    if not own and shared.get("head_scale") != MATCHED:
        shared.pop("head_scale", None)  # measured for another core
    if name in PAIR:
        return {**shared, **fields}
    base: dict[str, Any] = {**shared, "attention": "softmax"}
    sized = variant(DiffTransformerConfig(**base), name)
    model = {**shared, **fields, **{size: getattr(sized, size) for size in _SIZES}}
    DiffTransformerConfig(**model)
    return model


def require_drawn(config: RunConfig) -> None:
    """Raise ValueError for ``train.initial_model``: models that are compared are drawn from their seeds."""
    if config.train.initial_model is not None:
        raise UserError(
            f"train.initial_model is {config.train.initial_model}, and models that are compared start from random "
            "weights. To go on from a pretrained Transformer: `diff-transformer compare --from MODEL`"
        )
    if not config.model:
        raise UserError(
            f"recipe {config.name!r} sets no model; give one to go on from: `diff-transformer compare --from MODEL`"
        )


def with_seed(config: RunConfig, seed: int, model: Mapping | None = None) -> RunConfig:
    """``config`` with another training seed and, if given, other fields of the model."""
    fields = config.model if model is None else dict(model)
    return dataclasses.replace(config, model=fields, train=dataclasses.replace(config.train, seed=seed))
