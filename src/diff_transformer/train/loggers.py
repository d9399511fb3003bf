"""Weights & Biases and MLflow beside ``metrics.jsonl`` and TensorBoard, through Lightning's own loggers.

Both take their settings from their own environment variables: ``WANDB_MODE``, ``WANDB_PROJECT``;
``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``. The default of the project and the experiment is
``diff-transformer``.
"""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diff_transformer.checks import read_json, require_extra, require_known
from diff_transformer.durable import write_whole

logger = logging.getLogger("diff_transformer")

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}  # name of a logger, which is its extra's too, and what it imports
PROJECT = "diff-transformer"
IDS = "loggers.json"  # in the run's folder: the service's id of the run, by logger


def check_loggers(names: Iterable[str]) -> None:
    """Raise ValueError for an unknown name, RuntimeError for one whose package is not installed."""
    for name in names:
        require_known("logger", name, PACKAGES)
        require_extra(name, f"train.loggers={name}", PACKAGES[name])


class Loggers:
    """The loggers ``names`` of the run in ``folder``. A resumed run goes on with the service's run.

    A service that fails is named in a warning and left out from then on; training goes on, and ``metrics.jsonl`` has
    every number.

    Args:
        settings: the run's configuration, which each service shows beside the run.
    """

    def __init__(self, names: Sequence[str], folder: Path, settings: dict[str, Any]):
        path = folder / IDS
        ids: dict[str, str] = read_json(path) if path.exists() else {}
        self._loggers: dict[str, Any] = {}
        for name in names:
            with _Warned(self, name):
                made = _MAKE[name](folder, ids.get(name))
                made.log_hyperparams(settings)
                self._loggers[name], ids[name] = made, str(made.version if name == "wandb" else made.run_id)
        if self._loggers:
            write_whole(path, json.dumps(ids) + "\n")

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, one in list(self._loggers.items()):
            with _Warned(self, name):
                one.log_metrics(values, step)

    def close(self) -> None:
        for name, one in list(self._loggers.items()):
            with _Warned(self, name):
                one.finalize("success")
                if name == "wandb":
                    one.experiment.finish()

    def drop(self, name: str) -> None:
        self._loggers.pop(name, None)


class _Warned:
    """A block in which an error of the service ``name`` becomes a warning, and the end of its logger."""

    def __init__(self, loggers: Loggers, name: str):
        self.loggers, self.name = loggers, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        logger.warning(
            "%s takes no more metrics of this run (%s: %s); metrics.jsonl has all", self.name, kind.__name__, error
        )
        self.loggers.drop(self.name)
        return True


def _wandb(folder: Path, run: str | None):
    from lightning.pytorch.loggers import WandbLogger

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    return WandbLogger(name=folder.name, project=project, save_dir=folder, id=run or _new_id(), resume="allow")


def _mlflow(folder: Path, run: str | None):
    import mlflow
    from lightning.pytorch.loggers import MLFlowLogger

    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    return MLFlowLogger(experiment, run_name=folder.name, tracking_uri=mlflow.get_tracking_uri(), run_id=run)


def _new_id() -> str:
    import uuid

    return uuid.uuid4().hex[:12]


_MAKE = {"wandb": _wandb, "mlflow": _mlflow}
