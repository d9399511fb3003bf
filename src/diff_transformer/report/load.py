"""Read the input of a page: a comparison or experiments. Error messages say what to give instead."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diff_transformer.checks import read_json
from diff_transformer.lab.record import Record, RecordError, averaged, files_of, records_of
from diff_transformer.lab.record import read_json as read_record
from diff_transformer.report.models import OF_TRAINING, ResultsError

logger = logging.getLogger("diff_transformer")

SCHEMA = 1  # of a results.json


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
    """True if the folder, or the file, is a comparison and not the result of an experiment.

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
