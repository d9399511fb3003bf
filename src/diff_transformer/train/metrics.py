"""The metrics of a run: lines of JSON, scalars in groups for TensorBoard and others, and warnings about lambda."""

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from diff_transformer.checks import require_extra
from diff_transformer.durable import explained, write_whole

logger = logging.getLogger("diff_transformer")

DIGEST = "rows"  # key of the first line: which rows the run trains on (``TrainingData.digest``)
GROUPS = {  # key of a line -> name of its TensorBoard scalar, or group of its scalars
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "recall_accuracy": "recall/accuracy",
    "needles_accuracy": "needles/accuracy",
    "loss_by_source": "loss by source",
    "lr": "optimizer/lr",
    "grad_norm": "grad norm/total",
    "grad_norm_by_part": "grad norm",
    "lambda": "lambda",
    "head_norm_gain": "head norm gain",
    "tokens_per_second": "speed/tokens per second",
    "mfu": "speed/mfu",
    "checkpoint_seconds": "speed/checkpoint seconds",
    "memory_bytes": "memory/bytes",
    "peak_memory_bytes": "memory/peak bytes",
}


class MetricsLog:
    """Writes ``metrics.jsonl`` and TensorBoard files in a run's folder.

    Args:
        folder: of the run.
        resumed_step: step of the checkpoint; lines after it are dropped, and at 0 all lines.
        active: False on every rank but the first, which then writes nothing.
        wandb: send the scalars to Weights & Biases too.
        settings: the run's configuration, which that service shows.
    """

    def __init__(
        self,
        folder: Path,
        resumed_step: int,
        *,
        active: bool = True,
        wandb: bool = False,
        settings: dict[str, Any] | None = None,
    ):
        self.path, self._file, self._board, self._wandb = folder / "metrics.jsonl", None, None, None
        self._alarmed: set[int] = set()
        if not active:
            return
        if wandb:
            self._wandb = start_wandb(folder, settings or {})
        from torch.utils.tensorboard import SummaryWriter

        kept = [line for line in read_metrics(self.path) if line["step"] <= resumed_step] if resumed_step else []
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        for line in kept:
            self._alarmed.update(_outside(line.get("lambda", [])))
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write one line: ``step`` and ``values``, which are numbers, lists by layer, or dictionaries by part.

        Raises:
            DiskError: if the write fails.
        """
        if self._file is None or self._board is None:
            return
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise explained(error, self.path.parent, 1000, f"{self.path.name} at step {step}") from error
        for name, value in scalars(values):
            self._board.add_scalar(name, value, step)
        self._watch(step, values.get("lambda", []))

    def note(self, step: int, text: str) -> None:
        """Write a line with a note about ``step``, for people."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, "note": text}) + "\n")

    def flush(self) -> None:
        """Flush the lines to the disk; call this before a checkpoint is written."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _watch(self, step: int, lambdas: list[float]) -> None:
        for layer in _outside(lambdas):
            if layer not in self._alarmed:
                self._alarmed.add(layer)
                logger.warning("step %d: lambda of layer %d is %.3f, outside 0 to 1", step, layer, lambdas[layer])


def start_wandb(folder: Path, settings: dict[str, Any]) -> Any:
    """Start a run of Weights & Biases that copies the TensorBoard scalars; a resumed run continues its own.

    Raises:
        RuntimeError: wandb is not installed.
    """
    require_extra("wandb", "train.wandb=true", "wandb")
    import wandb

    key = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    project = os.environ.get("WANDB_PROJECT", "diff-transformer")
    return wandb.init(
        project=project, name=folder.name, dir=folder, id=key, resume="allow", config=settings, sync_tensorboard=True
    )


def scalars(values: dict[str, Any]) -> list[tuple[str, float]]:
    """The TensorBoard scalars of a line, with group names: ("grad norm/query", 0.3), ("lambda/layer 0", 0.2), ..."""
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        group = GROUPS.get(name, name)
        if isinstance(value, dict):
            found += [(f"{group}/{part.replace('_', ' ')}", one) for part, one in value.items()]
        elif isinstance(value, list):
            found += [(f"{group}/layer {layer}", one) for layer, one in enumerate(value)]
        elif isinstance(value, int | float):
            found.append((group, value))
    return found


def read_metrics(path: Path) -> list[dict]:
    """The lines of a ``metrics.jsonl`` up to the first damaged one, which a crash may leave."""
    return read_metrics_and_rest(path)[0]


def read_metrics_and_rest(path: Path) -> tuple[list[dict], int]:
    """The lines of a ``metrics.jsonl`` up to the first damaged one, and the number of lines from there on.

    A last line without its end, which is being written or was when the process was killed, does not count.
    """
    if not path.exists():
        return [], 0
    lines: list[dict] = []
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for number, text in enumerate(texts):
        if not _is_line(text, lines):
            rest = len(texts) - number
            return lines, rest - (rest == 1 and not text.endswith("\n"))
        lines.append(json.loads(text))
    return lines, 0


def _is_line(text: str, before: list[dict]) -> bool:
    """True if this is a line of metrics, not of an earlier step than the one before it, and of whole characters."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return False
    step = line.get("step") if isinstance(line, dict) else None
    return isinstance(step, int) and "\ufffd" not in text and step >= (before[-1]["step"] if before else 0)


def _outside(lambdas: list[float]) -> list[int]:
    return [layer for layer, value in enumerate(lambdas) if not 0.0 <= value <= 1.0]
