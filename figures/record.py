"""Keep the record of a comparison: its results without examples and attention maps, small enough to commit.

python figures/record.py runs/demo figures/demo
"""

import json
import re
import sys
from pathlib import Path


def trimmed(summary: dict) -> dict:
    """Claims, settings, curves and metrics; no single examples, no maps."""
    kept = {key: value for key, value in summary.items() if key != "explorer"}
    kept["evals"] = [{**entry, "rows": []} for entry in summary["evals"]]
    kept["curves"] = [_thinned(curve) for curve in summary["curves"]]
    return without_places(kept)


def without_places(value):
    """Absolute paths, which mean something on one machine only, shortened to their last part."""
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(?<![\w.])/(?:[\w.\-]+/)+([\w.\-]+)", r"\1", value)
    return value


def _thinned(curve: dict, points: int = 60) -> dict:
    stride = max(1, len(curve["step"]) // points)
    series = ("step", "loss", "grad_norm", "tokens_per_second", "lambda")
    return {key: value[::stride] if key in series else value for key, value in curve.items()}


def main() -> None:
    source, target = Path(sys.argv[1]) / "results.json", Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(trimmed(json.loads(source.read_text())), separators=(",", ":"))
    (target / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
