"""Tables of finished training runs: model, size, tokens, loss. From CSV, from JSON, and from folders of comparisons."""

import csv
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.errors import UserError
from diff_transformer.lab.record import FILE, Record, load_all

COLUMNS = ("model", "parameters", "tokens", "loss")
# Names of the paper's two models in tables.
ALIASES = {"transformer": "softmax", "baseline": "softmax", "differential": "diff", "diff transformer": "diff"}
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_COUNT = re.compile(r"\s*([\d_,.]+(?:e[+-]?\d+)?)\s*([KMBT]?)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """One point of a training run: ``loss`` in nats per token after ``tokens`` of training.

    ``part``: "final" for a finished run; "curve" for an earlier point, before the end of the learning-rate decay.
    ``pair``: a name of the training that both models of a pair share; "" if the table has none."""

    model: str
    parameters: float
    tokens: float
    loss: float
    part: str = "final"
    pair: str = ""

    def to_dict(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "pair"}


def read_runs(paths: Iterable[Path | str]) -> list[Run]:
    """The runs of several tables.

    A ``.csv`` has a header with at least ``model, parameters, tokens, loss``. A ``.json`` holds a list of objects with
    these keys, or the results of a comparison. A folder stands for all comparisons below it and for the finished models
    of studies, without their sweeps of learning rates. Counts may be written as 6.8B.

    Raises:
        FileNotFoundError: for a missing path.
        ValueError: for a file that is not such a table (the message names the line or column), or an empty folder.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"no table of runs at {path}; give a .csv, a .json or a folder of comparisons")
        if path.is_dir():
            runs += _from_folder(path)
        elif path.suffix.lower() == ".csv":
            runs += _from_csv(path)
        else:
            runs += _from_json(path)
    return runs


def _from_folder(path: Path) -> list[Run]:
    comparisons = sorted(path.rglob("results.json"))
    homes = {file.parent for file in comparisons}
    unfinished = sorted({file.parent for file in path.rglob("compare.json")} - homes)
    homes |= {*unfinished}
    studies = [
        folder
        for folder in sorted({file.parent for file in path.rglob(FILE)})
        if "sweep" not in folder.relative_to(path).parts and not homes & {*folder.parents}
    ]
    if not comparisons and not unfinished and not studies:
        raise UserError(
            f"{path} holds no results.json of a comparison and no record of a study's run; give a folder of them, or a "
            "table (.csv, .json)"
        )
    found = [run for file in comparisons for run in _from_json(file)]
    return found + [run for folder in [*unfinished, *studies] for run in _from_study(folder)]


def canonical(model: str) -> str:
    """``diff`` or ``softmax`` for any common name of the paper's two models; other names unchanged."""
    plain = model.strip().lower()
    return ALIASES.get(plain, plain if plain in ("diff", "softmax") else model.strip())


def _from_csv(path: Path) -> list[Run]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = {(name or "").strip().lower(): name for name in reader.fieldnames or []}
        _require(names, f"{path}")
        return [
            _run({key: line[names[key]] for key in COLUMNS}, f"{path}, line {reader.line_num}")
            for line in reader
            if any((value or "").strip() for value in line.values() if isinstance(value, str))
        ]


def _from_json(path: Path) -> list[Run]:
    values = read_json(path, "give a table of runs")
    if isinstance(values, dict) and "schema" in values and "pair" in values:
        return _from_comparison(values, path)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise UserError(f"{path} is not a table of runs; give a list of objects with {', '.join(COLUMNS)}")
    for number, value in enumerate(values, 1):
        _require(value, f"{path}, entry {number}")
    return [_run(value, f"{path}, entry {number}") for number, value in enumerate(values, 1)]


def _from_comparison(results: dict, path: Path) -> list[Run]:
    """Final losses, on the rows of the evaluation, and the losses during training, on the validation rows."""
    runs: list[Run] = []
    try:
        train = results["train"]
        step = train["batch_size"] * train["sequence_length"]
        warm = train["config"]["optim"]["warmup_steps"]
        sizes = {side: results["pair"][side]["parameters"] for side in results["pair"]}
        for entry in results["evals"]:
            if entry["eval"] in ("loss", "associative_recall") and "validation" in entry["metrics"]:
                side = entry["attention"]
                runs.append(Run(side, sizes[side], train["tokens"], entry["metrics"]["validation"]))
        for curve in results["curves"]:
            side = curve["attention"]
            for at, loss in zip(curve["validation_step"], curve["validation_loss"], strict=True):
                if at > warm:
                    runs.append(Run(side, sizes[side], at * step, loss, "curve", f"{path} {curve.get('seed')}"))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not hold the results of a comparison: {error!r} is missing or has the wrong type"
        ) from None
    return runs


def _from_study(folder: Path) -> list[Run]:
    """A finished run of a study, by the name of its side."""
    try:
        return [
            run
            for record in load_all(folder)
            for run in runs_of_record(record, canonical(record.side), f"{folder.parent} {record.seed}")
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder} does not hold the record of a study's run: {error!r}") from None


def runs_of_record(record: Record, model: str, pair: str = "") -> list[Run]:
    """The finished run of a record and the earlier points of its curve, including those of the warm-up; no run that
    diverged."""
    if record.diverged:
        return []
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.cost import count_parameters

    size = sum(count_parameters(DiffTransformerConfig(**record.config["model"])).values())
    curve = record.curves["validation"]
    pairs = zip(curve["step"], curve["loss"], strict=True)
    points = [(step * record.tokens_per_step, loss) for step, loss in pairs if step]
    final = Run(model, size, *points[-1], pair=pair)
    return [final, *(Run(model, size, *point, "curve", pair) for point in points)]


def _require(names, where: str) -> None:
    missing = [key for key in COLUMNS if key not in names]
    if missing:
        raise UserError(f"{where} has no {', '.join(missing)}; needed: {', '.join(COLUMNS)}")


def _run(values: dict, where: str) -> Run:
    parameters, tokens, loss = (_count(values[key], key, where) for key in ("parameters", "tokens", "loss"))
    if not str(values["model"] or "").strip():
        raise UserError(f"{where}: model is empty; name the model of each run")
    return Run(canonical(str(values["model"])), parameters, tokens, loss)


def _count(value: object, key: str, where: str) -> float:
    found = _COUNT.fullmatch(str(value))
    try:
        number = float(found[1].replace(",", "").replace("_", "")) * _UNITS[found[2].upper()] if found else -1.0
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise UserError(f"{where}: {key} is {value!r}; give a positive number, for example 3.06 or 6.8B")
    return number
