"""What a run reports at each logged step: a line of JSON, TensorBoard scalars, and alarms."""

import json
import logging
from pathlib import Path

logger = logging.getLogger("diff_transformer")


class MetricsLog:
    """``metrics.jsonl`` and TensorBoard files in a run's folder. Resuming drops the lines after the checkpoint."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(self.path) if line["step"] <= resumed_step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.path.open("a", buffering=1)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1 if resumed_step else None)
        self.alarmed: set[int] = set()

    def write(self, step: int, values: dict):
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            if name == "lambda":
                for layer, weight in enumerate(value):
                    self.board.add_scalar(f"lambda/layer{layer}", weight, step)
                self._watch(step, value)
            else:
                self.board.add_scalar(name, value, step)

    def _watch(self, step: int, lambdas: list[float]):
        for layer, weight in enumerate(lambdas):
            if not 0.0 <= weight <= 1.0 and layer not in self.alarmed:
                self.alarmed.add(layer)
                logger.warning("step %d: lambda of layer %d is %.3f, outside 0 to 1", step, layer, weight)

    def close(self):
        self.file.close()
        self.board.close()


def read_metrics(path: Path) -> list[dict]:
    """The whole lines of a ``metrics.jsonl``; a last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
