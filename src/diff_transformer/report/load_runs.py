"""Read training runs, finished or not: the folder that ``train`` writes, with ``metrics.jsonl`` and ``config.json``."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from diff_transformer.report.charts import Point
from diff_transformer.report.load import ResultsError
from diff_transformer.report.markup import is_number
from diff_transformer.report.models import as_dict, sides_of
from diff_transformer.train.metrics import read_metrics

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunLog:
    """One run. ``side``: its colour and mark on the page; ``lines``: of ``metrics.jsonl``, as far as they are whole."""

    label: str
    folder: Path
    lines: list[dict]
    config: dict = field(default_factory=dict)
    finished: bool = False
    side: str = ""

    def points(self, name: str, key: str | int | None = None) -> list[Point]:
        """(step, value) of a metric where it is a finite number; ``key`` picks a part or a layer of it."""
        found = []
        for line in self.lines:
            value = line.get(name)
            if isinstance(key, str):
                value = as_dict(value).get(key)
            elif key is not None:
                value = value[key] if isinstance(value, list) and key < len(value) else None
            if isinstance(value, int | float) and is_number(value):
                found.append((float(line["step"]), float(value)))
        return found

    def keys(self, name: str) -> list[str]:
        """The parts that a metric of parts has, in the order they came."""
        return list(dict.fromkeys(key for line in self.lines for key in as_dict(line.get(name))))

    def layers(self, name: str) -> int:
        """How many layers a metric by layer has."""
        return max((len(line[name]) for line in self.lines if isinstance(line.get(name), list)), default=0)

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)


def is_run(path: Path | str) -> bool:
    """Whether this is the folder of a training run, a folder with one in ``run``, or a run's ``metrics.jsonl``."""
    return _home(Path(path)) is not None


def load_runs(paths: list[Path | str]) -> list[RunLog]:
    """The runs at ``paths``, each with a name and a colour of its own.

    Raises:
        ResultsError: for a path that is no run.
    """
    folders = []
    for path in paths:
        home = _home(Path(path))
        if home is None:
            raise ResultsError(f"{path} is no run: there is no {METRICS}; give the folders that `train` wrote")
        folders.append(home)
    folders = list(dict.fromkeys(folders))
    configs = [_config(folder) for folder in folders]
    kinds = [as_dict(config.get("model")).get("attention") for config in configs]
    return [
        RunLog(label, folder, read_metrics(folder / METRICS), config, (folder / "model").is_dir(), side)
        for label, folder, config, side in zip(_labels(folders), folders, configs, sides_of(kinds), strict=True)
    ]


def _home(path: Path) -> Path | None:
    for folder in (path.parent if path.name == METRICS else path, path / "run"):
        if (folder / METRICS).is_file():
            return folder.resolve()
    return None


def _config(folder: Path) -> dict:
    try:
        return as_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _labels(folders: list[Path]) -> list[str]:
    """The end of each path, with as many parts as make them differ; the name "run" says nothing."""
    names = [
        folder.parts[1:-1] if folder.name == "run" and len(folder.parts) > 2 else folder.parts[1:] for folder in folders
    ]
    depth = 1
    while depth < 8 and len({name[-depth:] for name in names}) < len({*names}):
        depth += 1
    labels = ["/".join(name[-depth:]) for name in names]
    return [label if labels.count(label) == 1 else str(folder) for label, folder in zip(labels, folders, strict=True)]
