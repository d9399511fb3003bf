"""Read results.json, and say plainly what is wrong when it is not one."""

import json
from pathlib import Path

SCHEMA = 1


class ResultsError(ValueError):
    """The file or dictionary given is not the results of a comparison."""


def load_results(path: Path | str) -> dict:
    """Read the JSON file that ``compare`` writes. A folder is taken to hold one named ``results.json``.

    Raises ResultsError, with what to do about it, when there is no such file, when it is not JSON, or when it is not
    the results of a comparison.
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

    What is neither counts as one, so that ``load_results`` says what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        return (path / "results.json").exists() or not any(path.rglob("*.json"))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not (isinstance(value, dict) and {"eval", "model", "metrics"} <= value.keys())
