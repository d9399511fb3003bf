"""Read the input of a page: a comparison, experiments or training runs. Error messages say what to give instead."""

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diff_transformer.checks import read_json
from diff_transformer.lab.record import Record, RecordError, averaged, files_of, records_of
from diff_transformer.lab.record import read_json as read_record
from diff_transformer.report.charts import Point
from diff_transformer.report.markup import is_number, plural
from diff_transformer.report.models import OF_TRAINING, ResultsError, as_dict, sides_of
from diff_transformer.train.config import RunConfig
from diff_transformer.train.metrics import read_metrics_and_rest

logger = logging.getLogger("diff_transformer")

SCHEMA = 1  # of a results.json
METRICS = "metrics.jsonl"  # of a training run


def load_results(path: Path | str) -> dict:
    """Read the JSON file that ``compare`` writes. A folder is taken to hold one named ``results.json``.

    Raises:
        ResultsError: when there is no such file, it is not JSON, or not the results of a comparison.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    try:
        results = read_json(path, "give the results.json of a comparison", ResultsError)
    except FileNotFoundError:
        raise ResultsError(
            f"there is no file {path}; give the results.json that `diff-transformer compare` writes, or its folder"
        ) from None
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error}; give a results.json") from None
    return check_results(results, str(path))


def check_results(results: object, where: str = "the results given") -> dict:
    """Return ``results`` if it has the current schema and compares one differential attention with softmax."""
    if not isinstance(results, dict) or "schema" not in results:
        found = f"keys {sorted(results)[:6]}" if isinstance(results, dict) else f"a {type(results).__name__}"
        raise ResultsError(
            f'{where} has {found} and no "schema"; a results.json is an object with "schema": {SCHEMA}, '
            f'"claims", "curves", "evals"; write one with `diff-transformer compare`'
        )
    if results["schema"] != SCHEMA:
        raise ResultsError(
            f"{where} has schema {results['schema']!r}; this version reads schema {SCHEMA}: "
            f"write the report with the version of diff-transformer that ran the comparison"
        )
    entries = [e for key in ("curves", "evals", "explorer") for e in results.get(key) or []]
    kinds = sorted({str(e.get("attention")) for e in entries if isinstance(e, dict)} - {"softmax"})
    if len(kinds) > 1:
        raise ResultsError(
            f"{where} holds {', '.join(kinds)}; a report compares one differential attention with softmax: "
            f"write one results.json for each"
        )
    return results


def is_comparison(path: Path | str) -> bool:
    """Whether the folder, or the file, is a comparison and not the result of an experiment.

    A file that is neither counts as a comparison, so that ``load_results`` explains the problem.
    """
    path = Path(path)
    if path.is_dir():
        return any((path / name).exists() for name in ("compare.json", "results.json")) or not any(path.rglob("*.json"))
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return True
    return not _records(value)


def load_evals(source: Any) -> list[Record]:
    """The records of experiments, in the order given; of a folder all ``.json`` files that hold one, sorted.

    Measurements of one model that differ in the data seed alone are one, their mean (``record.averaged``).

    Args:
        source: a ``Result`` or its dictionary, a ``Record``, a path, or a list of these.

    Raises:
        ResultsError: where there is no such file, a file holds no result, or a folder holds none.
    """
    return averaged(_loaded(source))


def _loaded(source: Any) -> list[Record]:
    if isinstance(source, Record):
        return [source]
    if isinstance(source, str | Path):
        return _from_path(Path(source))
    if isinstance(source, dict) or not isinstance(source, Iterable):
        return _checked(source.to_dict() if hasattr(source, "to_dict") else source, "the result given")
    found = [record for item in source for record in _loaded(item)]
    if not found:
        raise ResultsError("no result given; give the JSON files that `diff-transformer eval` writes, or their folder")
    return found


def _from_path(path: Path) -> list[Record]:
    if not path.is_dir():
        return _checked(_read(path), str(path))
    found: list[Record] = []
    for file in files_of(path):
        try:
            found += _records(_read(file))
        except ResultsError as error:
            logger.warning("left out: %s", str(error).partition(";")[0])
    if not found:
        raise ResultsError(f"{path} holds no result of an experiment; write some with `diff-transformer eval NAME`")
    return found


def _read(path: Path) -> object:
    try:
        return read_record(path)
    except RecordError as error:
        raise ResultsError(f"{error}; give a result that `diff-transformer eval` wrote") from None


def _records(value: object) -> list[Record]:
    """The records in a file of records or of results; an empty list for a comparison, and for anything else."""
    if not isinstance(value, dict) or value.get("schema") == SCHEMA:
        return []
    try:
        return [record for record in records_of(value) if isinstance(record.metrics, dict)]
    except RecordError:
        return []


def _checked(value: object, where: str) -> list[Record]:
    if found := _records(value):
        if not any(name not in OF_TRAINING for record in found for name in record.metrics):
            raise ResultsError(
                f"{where} holds training curves and no result of an experiment; see `diff-transformer eval`"
            )
        return found
    if isinstance(value, dict) and "schema" in value:
        raise ResultsError(f"{where} is the results of a comparison; write its own report with that file alone")
    said = f"keys {sorted(map(str, value))[:6]}" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise ResultsError(f'{where} has {said}; a result has "eval", "model" and "metrics": see `diff-transformer eval`')


@dataclass(frozen=True)
class RunLog:
    """One run. ``side``: its colour and mark on the page; ``lines``: the complete lines of ``metrics.jsonl``;
    ``damage``: what could not be read, a sentence each."""

    label: str
    folder: Path
    lines: list[dict]
    config: dict = field(default_factory=dict)
    finished: bool = False
    side: str = ""
    damage: tuple[str, ...] = ()

    def points(self, name: str, key: str | int | None = None) -> list[Point]:
        """(step, value) of a metric, finite values only; ``key`` selects a part or a layer of it."""
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
        """The names of a metric's parts, in order of appearance."""
        return list(dict.fromkeys(key for line in self.lines for key in as_dict(line.get(name))))

    def layers(self, name: str) -> int:
        """The number of layers of a metric by layer."""
        return max((len(line[name]) for line in self.lines if isinstance(line.get(name), list)), default=0)

    @property
    def step(self) -> int:
        return max((line["step"] for line in self.lines), default=0)


def is_run(path: Path | str) -> bool:
    """Whether ``path`` is the folder of a training run, a folder with one in ``run``, or a run's ``metrics.jsonl``."""
    return _home(Path(path)) is not None


def load_runs(paths: list[Path | str]) -> list[RunLog]:
    """The runs at ``paths``, each with a name and a colour of its own.

    Raises:
        ResultsError: for a path that is not a run.
    """
    folders = []
    for path in paths:
        home = _home(Path(path))
        if home is None:
            raise ResultsError(f"{path} is not a run: it has no {METRICS}; give the folders that `train` wrote")
        folders.append(home)
    folders = list(dict.fromkeys(folders))
    configs = [_config(folder) for folder in folders]
    kinds = [as_dict(config.get("model")).get("attention") for config, _ in configs]
    return [
        _run(label, folder, *config, side)
        for label, folder, config, side in zip(_labels(folders), folders, configs, sides_of(kinds), strict=True)
    ]


def _run(label: str, folder: Path, config: dict, damage: tuple[str, ...], side: str) -> RunLog:
    """The run in ``folder``; what is damaged is also logged as a warning."""
    lines, rest = read_metrics_and_rest(folder / METRICS)
    run = RunLog(label, folder, lines, config, (folder / "model").is_dir(), side)
    steps = as_dict(config.get("train")).get("steps")
    path = folder / METRICS
    if rest:
        damage += (f"{path} is damaged: {plural(rest, 'line')} from line {len(lines) + 1} on cannot be read",)
    elif run.finished and isinstance(steps, int) and run.step < steps:
        damage += (f"{path} ends at step {run.step:,}, and the run was finished at step {steps:,}",)
    elif not lines:
        damage += (f"{path} holds no metrics",)
    for sentence in damage:
        logger.warning("%s", sentence)
    return replace(run, damage=damage)


def _home(path: Path) -> Path | None:
    for folder in (path.parent if path.name == METRICS else path, path / "run"):
        if (folder / METRICS).is_file():
            return folder.resolve()
    return None


def _config(folder: Path) -> tuple[dict, tuple[str, ...]]:
    """The configuration of the run in ``folder``, as far as it can be read, and what is wrong with it."""
    path, values = folder / "config.json", {}
    try:
        values = read_json(path)
        with warnings.catch_warnings(action="ignore"):  # of settings that have new names
            RunConfig.from_dict(values)
    except FileNotFoundError:
        return {}, (f"{path} is missing",)
    except OSError as error:
        return {}, (f"{path} cannot be read ({error.strerror})",)
    except (ValueError, AttributeError, TypeError) as error:
        said = str(error).removeprefix(f"{path} ").partition(";")[0]
        return as_dict(values), (f"{path} is damaged ({said})",)
    return values, ()


def _labels(folders: list[Path]) -> list[str]:
    """The last parts of each path, as many as make the names differ; the folder name "run" is skipped."""
    names = [
        folder.parts[1:-1] if folder.name == "run" and len(folder.parts) > 2 else folder.parts[1:] for folder in folders
    ]
    depth = 1
    while depth < 8 and len({name[-depth:] for name in names}) < len({*names}):
        depth += 1
    labels = ["/".join(name[-depth:]) for name in names]
    return [label if labels.count(label) == 1 else str(folder) for label, folder in zip(labels, folders, strict=True)]
