"""``Record``: all results of one trained model. Every driver writes records; statistics and pages read them.

``load_records`` reads the records of any files and folders of results, ``load_all`` of one; ``save_all`` writes
several to one file.
``of_result`` makes a record of what an experiment returned. ``grouped`` sorts records by setting, side and seed.

Two seeds must not be mixed up. The *training seed* is ``Record.seed``: another one is another model. A *data seed* is
that of one measurement, the ``seed`` of an experiment's provenance: another one is the same model on other examples.
``averaged`` makes one measurement of those that differ in the data seed alone.

This module imports no driver, so the report may import it. ``legacy`` reads results that are no records.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any

from diff_transformer import checks
from diff_transformer.durable import write_whole
from diff_transformer.errors import UserError
from diff_transformer.lab.legacy import fields_of, result_fields
from diff_transformer.lab.sides import PAIR as PAIR

SCHEMA = 2
FILE = "record.json"  # of a finished run, in its folder
REQUEST = "request.json"  # its ``RunSpec``
# Facts of a provenance that may differ between repeated measurements.
_CIRCUMSTANCES = (
    "seed", "package_version", "commit", "device", "cpu", "threads", "torch", "transformers", "python", "platform",
    "date", "seconds",
)  # fmt: skip


class RecordError(UserError):
    """A file or folder holds no record; the message says what it holds."""


@dataclass(frozen=True)
class Record:
    """One model, trained with one seed, and what was measured on it.

    Attributes:
        setting: what a comparison holds fixed: a recipe, or the setting of a study such as ``"novels"`` or
            ``"sweep/lr0.001"``. Empty if the training is unknown.
        side: what a comparison varies: ``"diff"``, ``"softmax"``, a variant, or a row of Table 6. For a model trained
            elsewhere, its name.
        seed: number of the run among those of its setting and side: the training seed. 0 for a model trained elsewhere.
        config: the run's ``RunConfig`` as a dictionary. Records of the first studies hold only a part.
        metrics: numbers by experiment and name, as ``metrics["needle"]["n2_r1"]``. ``metrics["gradients"]`` has the
            ``median`` and ``largest`` gradient norm and the number of ``spikes``.
        rows: by experiment, one dictionary an example. ``rows["explorer"]`` holds attention maps for the report.
        curves: ``"training"`` (``step``, ``loss``, ``grad_norm``, ``tokens_per_second``), ``"validation"`` (``step``,
            ``loss``), ``"sources"`` (training loss of each source of the mixture at the validation steps) and
            ``"lambda"`` (``step``, ``layers``: a list a step, ``init``: a number a layer). Losses are nats a token.
        provenance: by experiment, where its numbers come from. ``provenance["training"]`` describes the run,
            with its ``seconds``.
        diverged: the step and loss at which training diverged, or None.
    """

    setting: str
    side: str
    seed: int
    config: dict = field(default_factory=dict)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, list[dict]] = field(default_factory=dict)
    curves: dict[str, dict] = field(default_factory=dict)
    provenance: dict[str, dict] = field(default_factory=dict)
    diverged: str | None = None

    @property
    def identity(self) -> tuple[str, str, int]:
        return self.setting, self.side, self.seed

    def data_seed(self, experiment: str) -> int | None:
        """The seed of the examples on which ``experiment`` measured the model; None if it is not known."""
        seed = (self.provenance.get(experiment) or {}).get("seed")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @property
    def attention(self) -> str | None:
        """The model's ``attention`` field, or None if it is unknown."""
        said = [self.config.get("model", {}), *self.provenance.values()]
        return next((about["attention"] for about in said if isinstance(about.get("attention"), str)), None)

    @property
    def model(self) -> tuple[str, str] | None:
        """Path and fingerprint of the weights of the model that was measured, or None if they are unknown."""
        said = (about for about in self.provenance.values() if "weights" in about)
        return next(((about["path"], about["weights"]) for about in said), None)

    def may_be(self, other: "Record") -> bool:
        """True unless the two records are of different models."""
        return self.identity == other.identity and (None in (self.model, other.model) or self.model == other.model)

    @property
    def final_loss(self) -> float:
        """The last validation loss of training, in nats a token."""
        return self.curves["validation"]["loss"][-1]

    @property
    def steps(self) -> int:
        return self.config["train"]["steps"]

    @property
    def lr(self) -> float:
        return self.config["optim"]["lr"]

    @property
    def tokens_per_step(self) -> int:
        return self.config["train"]["batch_size"] * self.config["data"]["length"]

    def to_dict(self) -> dict:
        return {"schema": SCHEMA, **asdict(self)}

    def save(self, path: Path) -> None:
        """Write the record as JSON atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def from_dict(cls, values: dict) -> "Record":
        """The inverse of ``to_dict``."""
        return cls(**{key: value for key, value in values.items() if key != "schema"})


Cells = dict[str, dict[str, dict[int, Record]]]  # setting -> side -> seed -> record


def grouped(records: Iterable[Record]) -> Cells:
    """The records by setting, side and seed, in the given order."""
    cells: Cells = {}
    for record in records:
        cells.setdefault(record.setting, {}).setdefault(record.side, {})[record.seed] = record
    return cells


def merged(records: Iterable[Record]) -> list[Record]:
    """Merge records of one model if no experiment is in both. All others stay separate."""
    made: list[Record] = []
    for record in records:
        for place, other in enumerate(made):
            if other.may_be(record) and not _overlap(other, record):
                made[place] = replace(
                    other,
                    config=other.config or record.config,
                    metrics=other.metrics | record.metrics,
                    rows=other.rows | record.rows,
                    curves=other.curves | record.curves,
                    provenance=other.provenance | record.provenance,
                    diverged=other.diverged or record.diverged,
                )
                break
        else:
            made.append(record)
    return made


def averaged(records: Iterable[Record]) -> list[Record]:
    """The records, with one measurement in place of several of one model that differ in the data seed alone.

    Its metrics are means, its rows those of all. Its provenance is that of the first, with ``data_seeds`` and
    ``repeated``, a sentence that says so.
    """
    made: list[Record] = []
    repeats: dict[tuple[int, str], list[Record]] = {}  # (place, experiment) -> its measurements
    for record in records:
        left = dict.fromkeys(record.metrics)
        for name in record.metrics:
            place = next(
                (i for i, other in enumerate(made) if _repeats(repeats.get((i, name), []), record, name)), None
            )
            if place is not None:
                repeats[place, name].append(record)
                del left[name]
        if not record.metrics or left or record.curves:
            kept = {name: record.metrics[name] for name in left}
            made.append(record if len(left) == len(record.metrics) else replace(record, metrics=kept))
            repeats |= {(len(made) - 1, name): [record] for name in left}
    for (place, name), measured in repeats.items():
        if len(measured) > 1:
            made[place] = _mean_of(made[place], name, measured)
    return made


def _repeats(earlier: list[Record], record: Record, name: str) -> bool:
    """True if ``record`` measures the model of ``earlier`` again with ``name``, on other examples."""
    seeds = [one.data_seed(name) for one in earlier]
    return (
        bool(earlier)
        and earlier[0].may_be(record)
        and earlier[0].attention == record.attention
        and None not in (*seeds, record.data_seed(name))
        and record.data_seed(name) not in seeds
        and _conditions(earlier[0], name) == _conditions(record, name)
        and earlier[0].metrics[name].keys() == record.metrics[name].keys()
    )


def _conditions(record: Record, name: str) -> dict:
    about = record.provenance.get(name) or {}
    return {key: value for key, value in about.items() if key not in _CIRCUMSTANCES}


def _mean_of(home: Record, name: str, measured: list[Record]) -> Record:
    def mean(key: str) -> Any:
        values = [one.metrics[name][key] for one in measured]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        return fmean(values) if numbers else values[0]

    seeds = [one.data_seed(name) for one in measured]
    said = (
        f"{len(seeds)} measurements of one model, with data seeds {', '.join(map(str, seeds))}, are averaged; they are "
        "one training seed"
    )
    return replace(
        home,
        metrics={**home.metrics, name: {key: mean(key) for key in measured[0].metrics[name]}},
        rows={**home.rows, name: [row for one in measured for row in one.rows.get(name) or []]},
        provenance={**home.provenance, name: {**home.provenance[name], "data_seeds": seeds, "repeated": said}},
    )


def _overlap(first: Record, second: Record) -> bool:
    return any(getattr(first, part).keys() & getattr(second, part).keys() for part in ("metrics", "rows", "curves"))


def save_all(records: Iterable[Record], path: Path) -> None:
    """Write several records to one file. What all have alike, as most settings, stands there once, as ``common``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [asdict(record) for record in records]
    common = reduce(_alike, values) if values else {}
    whole = {"schema": SCHEMA, "common": common, "records": [_without(value, common) for value in values]}
    write_whole(path, json.dumps(whole, separators=(",", ":")) + "\n")


def _alike(a: dict, b: dict) -> dict:
    """The items that two dictionaries share, at any depth."""
    nested = {key: _alike(a[key], b[key]) for key in a if isinstance(a[key], dict) and isinstance(b.get(key), dict)}
    return {key: nested.get(key, a[key]) for key in a if key in b and (a[key] == b[key] or nested.get(key))}


def _without(value: dict, common: dict) -> dict:
    """The items that ``_with`` adds to ``common`` to get ``value``."""
    return {
        key: _without(of, common[key]) if isinstance(of, dict) and key in common else of
        for key, of in value.items()
        if key not in common or of != common[key]
    }


def _with(value: dict, common: dict) -> dict:
    """``common`` and ``value`` in one; ``value`` is right where both have a key."""
    both = {key: _with(value[key], of) for key, of in common.items() if isinstance(of, dict) and key in value}
    return {**common, **value, **both}


def load_records(*sources: Path | str) -> list[Record]:
    """The records of files and folders of results: of ``eval``, ``train``, ``compare`` and studies.

    Args:
        sources: JSON files or folders.

    Returns:
        A record for each trained model. Measurements of one model in several sources are in one record; those that
        differ in the data seed alone are averaged.

    Raises:
        RecordError: if a source does not exist, is not JSON or holds no record.
    """
    return averaged(merged(record for source in sources for record in _read(Path(source))))


def load_all(source: Path | str) -> list[Record]:
    """The records of a JSON file, or of all JSON files in a folder.

    The folder of a comparison has one record a model; one with a ``results.json`` alone counts as that file.

    Raises:
        RecordError: if there is no such file, or if it is not JSON or holds no record.
    """
    return load_records(source)


def _read(source: Path) -> list[Record]:
    """The records of a file or a folder, each as it was written."""
    if (source / "compare.json").exists() and (source / "members").is_dir():
        return comparison_records(source)
    if source.is_dir() and (source / "results.json").exists():
        source = source / "results.json"
    if not source.is_dir():
        return records_of(read_json(source), source)
    found: list[Record] = []
    for path in files_of(source):
        try:
            found += records_of(read_json(path), path)
        except RecordError:
            if path.name == FILE:
                raise
    if not found:
        raise RecordError(f"{source} holds no record; write some with `diff-transformer compare`, `study` or `eval`")
    return found


def files_of(folder: Path) -> list[Path]:
    """The JSON files below ``folder`` that may hold records, sorted.

    A finished run has one, its record. The folder of ``eval`` has one for each experiment and model; what an experiment
    trained is not among them.
    """
    request = folder / REQUEST
    if request.is_file() and "names" in (checks.read_json(request) or ()):
        return sorted(folder.glob("*/*.json"))
    finished = {path.parent for path in folder.rglob(FILE)}
    return [path for path in sorted(folder.rglob("*.json")) if path.name == FILE or not finished & {*path.parents}]


def comparison_records(folder: Path) -> list[Record]:
    """One record for each model of a comparison of this version, the pair first.

    It has what the small model of its side recalls (``recall/``), and its speed (``throughput.json``).
    """
    timed = folder / "throughput.json"  # not there if the models do not fit into memory together
    speeds = {one.identity[1:]: one for one in records_of(read_json(timed))} if timed.exists() else {}
    made = []
    for run in filter(finished, (folder / "members").glob("*-seed*")):
        record, small = load_run(run), folder / "recall" / run.name
        parts = [("recall", load_run(small))] if finished(small) else []
        speed = speeds.get((record.side, record.seed))
        parts += [] if speed is None else [("throughput", speed)]
        for name, part in parts:
            for kind in ("metrics", "rows", "curves", "provenance"):
                if name in getattr(part, kind):
                    getattr(record, kind)[name] = getattr(part, kind)[name]
            if "explorer" in part.rows:
                record.rows["explorer"] = [*record.rows.get("explorer", []), *part.rows["explorer"]]
        made.append(record)
    variants = folder / "variants.json"
    order = [*PAIR, *(map(str, checks.read_json(variants)) if variants.exists() else ())]
    return sorted(made, key=lambda one: (order.index(one.side) if one.side in order else len(order), one.seed))


def of_result(result: Any, *, setting: str = "", side: str | None = None, seed: int | None = None) -> Record:
    """A record of what an experiment returned: a ``Result``, or its dictionary.

    ``side`` and ``seed``, the training seed, default to those of the training run in the provenance, else to the
    model's name and 0. The seed of the result's own settings, which draws the examples, is the data seed and stays in
    the provenance.
    """
    record = Record(**result_fields(result if isinstance(result, dict) else result.to_dict()))
    given = {"setting": setting or None, "side": side, "seed": seed}
    return replace(record, **{name: value for name, value in given.items() if value is not None})


def run_of(path: str) -> dict[str, Any] | None:
    """The ``RunSpec`` of the training run that wrote the model in the folder ``path``, as a dictionary; None for
    another model."""
    folder = Path(path)
    for place in (folder, *folder.parents[:2]) if path else ():
        if (place / REQUEST).is_file():
            values = checks.read_json(place / REQUEST)
            return values if isinstance(values, dict) and "side" in values else None
    return None


def finished(folder: Path) -> bool:
    """True if the folder of a run holds its record."""
    return (folder / FILE).exists()


def load_run(folder: Path) -> Record:
    """The record of the finished run in ``folder``."""
    (record,) = records_of(read_json(folder / FILE), folder / FILE)
    return record


def read_json(path: Path) -> object:
    """The value of a JSON file; RecordError if there is no such file or it is not JSON."""
    try:
        return checks.read_json(path)
    except FileNotFoundError:
        raise RecordError(f"there is no file {path}") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise RecordError(str(error)) from None


def records_of(value: object, path: Path | None = None) -> list[Record]:
    """The records in a JSON value: the one reader of files.

    Args:
        value: what ``Record.save`` or ``save_all`` wrote, or as for ``legacy.fields_of``.
        path: its file, for messages.

    Raises:
        RecordError: if the value holds no record.
    """
    where = str(path or "the value")
    if not isinstance(value, dict):
        raise RecordError(f"{where} has a {type(value).__name__}, which is not a record")
    try:
        if value.get("schema") == SCHEMA:
            common = value.get("common", {})
            return [Record.from_dict(_with(one, common)) for one in value.get("records", [value])]
        fields = fields_of(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{where} is not a record: {error!r}") from None
    if fields is None:
        raise RecordError(f"{where} has keys {sorted(map(str, value))[:6]}, which is not a record")
    return merged(Record(**one) for one in fields)
