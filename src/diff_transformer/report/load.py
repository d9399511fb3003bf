"""Read what a page is made of, and say plainly what is wrong when it is not that: one function for a comparison, one
for experiments."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diff_transformer.lab.record import FILE, Record, of_result
from diff_transformer.lab.record import SCHEMA as RECORD_SCHEMA
from diff_transformer.report.models import ResultsError

SCHEMA = 1  # of a results.json
_NEEDED = {"eval": str, "model": str, "metrics": dict}  # of the result of an experiment


def load_results(path: Path | str) -> dict:
    """Read the JSON file that ``compare`` writes. A folder is taken to hold one named ``results.json``.

    Raises:
        ResultsError: when there is no such file, it is not JSON, or not the results of a comparison.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultsError(
            f"there is no file {path}; give the results.json that `diff-transformer compare` writes, or its folder"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path} cannot be read as text: {error}; give a results.json") from None
    try:
        results = json.loads(text)
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path} is not JSON ({error}); give the results.json of a comparison") from None
    return check_results(results, str(path))


def check_results(results: object, where: str = "the results given") -> dict:
    """Return ``results`` when it has this schema and compares one differential attention with softmax."""
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
    """Whether the file, or the folder's results.json, is meant as a comparison and not as the result of an experiment.

    What is neither counts as a comparison, so that ``load_results`` says what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        return (path / "results.json").exists() or not any(path.rglob("*.json"))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not _records(value)


def load_evals(source: Any) -> list[Record]:
    """The records of experiments, in the order given; of a folder all ``.json`` files that hold one, sorted.

    Args:
        source: a ``Result`` or its dictionary, a ``Record``, a path, or a list of these.

    Raises:
        ResultsError: where there is no such file, a file holds no result, or a folder holds none.
    """
    if isinstance(source, Record):
        return [source]
    if isinstance(source, str | Path):
        return _from_path(Path(source))
    if isinstance(source, dict) or not isinstance(source, Iterable):
        return _checked(source.to_dict() if hasattr(source, "to_dict") else source, "the result given")
    found = [record for item in source for record in load_evals(item)]
    if not found:
        raise ResultsError("no result given; give the JSON files that `diff-transformer eval` writes, or their folder")
    return found


def _from_path(path: Path) -> list[Record]:
    if not path.is_dir():
        return _checked(_read(path), str(path))
    found: list[Record] = []
    whole = {file.parent for file in path.rglob(FILE)}  # the record of a run holds its experiments
    for file in sorted(path.rglob("*.json")):
        if file.name != FILE and whole & {*file.parents}:
            continue
        try:
            found += _records(_read(file))
        except ResultsError:
            continue
    if not found:
        raise ResultsError(f"{path} holds no result of an experiment; write some with `diff-transformer eval NAME`")
    return found


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ResultsError(f"there is no file {path}; give a result that `diff-transformer eval` wrote") from None
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} is not JSON ({error}); give a result that `diff-transformer eval` wrote") from None


def _records(value: object) -> list[Record]:
    """The records in a result of an experiment or a file of records; none in anything else."""
    if not isinstance(value, dict):
        return []
    if value.get("schema") == RECORD_SCHEMA:
        try:
            return [Record.from_dict(one) for one in value.get("records", [value])]
        except (TypeError, AttributeError):
            return []
    return [of_result(value)] if all(isinstance(value.get(key), kind) for key, kind in _NEEDED.items()) else []


def _checked(value: object, where: str) -> list[Record]:
    if found := _records(value):
        return found
    if isinstance(value, dict) and "schema" in value:
        raise ResultsError(f"{where} is the results of a comparison; write its own report with that file alone")
    said = f"keys {sorted(map(str, value))[:6]}" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise ResultsError(f'{where} has {said}; a result has "eval", "model" and "metrics": see `diff-transformer eval`')
