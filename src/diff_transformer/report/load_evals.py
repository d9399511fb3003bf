"""Read the results of experiments: JSON files as ``diff-transformer eval`` writes them, or folders of them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diff_transformer.report.load import ResultsError

_NEEDED = {"eval": str, "model": str, "metrics": dict}


def load_evals(source: Any) -> list[dict]:
    """The results as dictionaries, in the order given; a folder counts as its ``.json`` files that hold one, sorted.

    Args:
        source: a ``Result`` or its dictionary, a path, or a list of these.

    Raises:
        ResultsError: where there is no such file, a file holds no result, or a folder holds none.
    """
    if isinstance(source, str | Path):
        return _from_path(Path(source))
    if isinstance(source, dict) or not isinstance(source, Iterable):
        return [_checked(source.to_dict() if hasattr(source, "to_dict") else source, "the result given")]
    found = [result for item in source for result in load_evals(item)]
    if not found:
        raise ResultsError("no result given; give the JSON files that `diff-transformer eval` writes, or their folder")
    return found


def is_eval(value: object) -> bool:
    """Whether this is the dictionary of one result."""
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in _NEEDED.items())


def _from_path(path: Path) -> list[dict]:
    if not path.is_dir():
        return [_checked(_read(path), str(path))]
    found: list[dict] = []
    for file in sorted(path.rglob("*.json")):
        try:
            value = _read(file)
        except ResultsError:
            continue
        if isinstance(value, dict) and is_eval(value):
            found.append(value)
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


def _checked(value: object, where: str) -> dict:
    if isinstance(value, dict) and is_eval(value):
        return value
    if isinstance(value, dict) and "schema" in value:
        raise ResultsError(f"{where} is the results of a comparison; write its own report with that file alone")
    found = f"keys {sorted(map(str, value))[:6]}" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise ResultsError(f'{where} has {found}; a result has "eval", "model" and "metrics": see `diff-transformer eval`')
