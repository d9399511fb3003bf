"""The metrics of a run: lines of JSON, and scalars for TensorBoard and Weights & Biases."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from diff_transformer.checks import require_extra
from diff_transformer.durable import write_whole

DIGEST = "rows"  # key of the first line: which rows the run trains on (``TrainingData.digest``)
FILE = "metrics.jsonl"


class MetricsLog:
    """Writes ``metrics.jsonl`` and TensorBoard files in a run's folder, on the first process alone.

    Args:
        folder: of the run.
        resumed_step: step of the checkpoint; lines after it are dropped, and at 0 all lines.
        wandb: send the scalars to Weights & Biases too.
        settings: the run's configuration, which that service shows.

    Raises:
        UserError: if wandb is wanted and not installed.
    """

    def __init__(self, folder: Path, resumed_step: int, *, wandb: bool = False, settings: dict | None = None):
        from lightning_fabric.loggers import TensorBoardLogger

        self._wandb = start_wandb(folder, settings or {}) if wandb else None
        self.path = folder / FILE
        earlier = [line for line in read_metrics(self.path) if line["step"] <= resumed_step] if resumed_step else []
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in earlier))
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        later = resumed_step + 1 if resumed_step else 0
        self._board = TensorBoardLogger(folder, name="tensorboard", version="", purge_step=later)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write one line: ``step`` and ``values``, which are numbers, lists by layer, or dictionaries by part."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._board.log_metrics(scalars(values), step)

    def close(self) -> None:
        self._file.close()
        self._board.finalize("")
        if self._wandb is not None:
            self._wandb.finish()


def start_wandb(folder: Path, settings: dict[str, Any]) -> Any:
    """Start a run of Weights & Biases that copies the TensorBoard scalars; a resumed run continues its own."""
    require_extra("wandb", "train.wandb=true", "wandb")
    import wandb

    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    project = os.environ.get("WANDB_PROJECT", "diff-transformer")
    return wandb.init(
        project=project, name=folder.name, dir=folder, id=key, resume="allow", config=settings, sync_tensorboard=True
    )


def scalars(values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by name: "loss", "grad_norm_by_part/query", "lambda/layer 0", ..."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{part}": number for part, number in value.items()}
        elif isinstance(value, list):
            flat |= {f"{name}/layer {layer}": number for layer, number in enumerate(value)}
        elif isinstance(value, int | float):
            flat[name] = value
    return flat


def read_metrics(path: Path) -> list[dict]:
    """The lines of a ``metrics.jsonl``, without a last one that is being written or was cut off."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
