"""Keep what a comparison or a study found in a form small enough to commit: no examples, no attention maps.

python figures/archive.py runs/demo figures/demo
"""

import json
import re
import sys
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path

from diff_transformer.lab.record import FILE, Cells, Record, finished, grouped, load_all, save_all

POINTS = 60  # of a curve
# Metrics that some table shows, by experiment.
SHOWN = {
    "associative_recall": r"validation|ar_hit|others|ar_hit_share",
    "needle": r"chance|n\d+_r\d+(_len\d+)?(_depth\d+)?",
    "allocation": r"(answer|noise)(_mean_map|_depth\d+)?|best_head_answer",
    "outliers": r"(logits|hidden)_(top\d+|median)",
    "quantization": r"(accuracy|loss)_\d+bit(_change)?|chance",
    "long_nll": r"nll\d+|books",
    "many_shot": r"chance|shots\d+|(random|alternate)_(mean|best|worst|margin)",
    "recall": r".*",
    "gradients": r".*",
    "model": r".*",
}


def cells_of(source: Path) -> Cells:
    """The records of a study by setting, side and seed: of its folder, or of a folder with its ``measured.json``."""
    kept = source / "measured.json"
    return grouped(record for record in load_all(kept if kept.exists() else source) if record.setting)


def keep_study(
    source: Path,
    path: Path,
    *,
    curves: Container[str] | None = None,
    rows: Callable[[Record], dict] = lambda record: {},
) -> None:
    """Write the finished runs of the study in ``source`` to ``path``, as small as ``committed`` makes them.

    Args:
        curves: the names of those to keep; all if None.
        rows: what to keep of a record's rows.
    """
    records = (replace(committed(record), rows=rows(record)) for record in load_all(source) if record.setting)
    if curves is not None:
        records = (replace(r, curves={name: of for name, of in r.curves.items() if name in curves}) for r in records)
    save_all(records, path)


def restore(cells: Cells, out: Path) -> None:
    """Write each recorded run as a study leaves it, so that the study trains only what is missing.

    A run that is there already stays as it is.
    """
    for setting, sides in cells.items():
        for side, records in sides.items():
            for seed, record in records.items():
                folder = out / setting / f"{side}-seed{seed}"
                if not finished(folder):
                    record.save(folder / FILE)


def committed(record: Record) -> Record:
    """A record without examples, with the metrics that tables show, thin curves and no absolute paths."""
    metrics = {
        name: {key: _short(value) for key, value in values.items() if re.fullmatch(SHOWN[name], key)}
        for name, values in record.metrics.items()
        if name in SHOWN
    }
    curves = dict(record.curves)
    for name in ("training", "lambda"):
        if name in curves:
            stride = max(1, len(curves[name]["step"]) // POINTS)
            curves[name] = {key: values if key == "init" else values[::stride] for key, values in curves[name].items()}
    curves = {name: {key: _short(values) for key, values in curve.items()} for name, curve in curves.items()}
    about = {"training": record.provenance.get("training", {})}
    small = replace(record, metrics=metrics, rows={}, curves=curves, provenance=about)
    return Record.from_dict(without_places(small.to_dict()))


def _short(value):
    """Numbers with five significant digits; whole numbers as they are."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def trimmed(summary: dict) -> dict:
    """The ``results.json`` of a comparison with claims, settings, curves and metrics alone."""
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


def _thinned(curve: dict) -> dict:
    stride = max(1, len(curve["step"]) // POINTS)
    series = ("step", "loss", "grad_norm", "tokens_per_second", "lambda")
    return {key: value[::stride] if key in series else value for key, value in curve.items()}


def main() -> None:
    source, target = Path(sys.argv[1]) / "results.json", Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    text = json.dumps(trimmed(json.loads(source.read_text())), separators=(",", ":"))
    (target / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
