"""The outcomes that preregistration.md names, from the record beside this file: tables in Markdown, and the figure.

python figures/gate_norm_subtraction/primary.py
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import vl_convert
from scipy.stats import binomtest, bootstrap

from diff_transformer.lab.per_example import GOAL
from diff_transformer.lab.quantities import QUANTITIES
from diff_transformer.lab.rows import read_rows
from diff_transformer.lab.sides import name_of
from diff_transformer.lab.stats import holm

HERE = Path(__file__).resolve().parent
SETTINGS = ("p8_n2", "p8_n4")
CONTRASTS = (  # a side, minus another, and what that tests
    ("gated", "softmax", "the gate alone"),
    ("gate_v2", "gated", "the subtraction under a gate"),
    ("v2_norm", "v2", "the norm under the subtraction"),
    ("gate_v2", "v2", "the gate under the subtraction"),
    ("v2", "v2_added", "the sign"),
)
EQUIVALENT = ("the gate alone", "the norm under the subtraction", "the gate under the subtraction")
MARGIN = 0.1
CUBE = ("softmax", "softmax_norm", "gated", "gated_norm", "v2", "v2_norm", "gate_v2", "gate_v2_norm")


def accuracies(source: Path) -> pd.DataFrame:
    """Accuracy at the end, a row a training seed, a column a side: the mean of both settings. Chance if it diverged."""
    rows = read_rows(source)
    by_setting = []
    for setting in SETTINGS:
        of = rows.only(setting=setting)
        by_setting.append(pd.DataFrame({side: pd.Series(QUANTITIES["recall"].values(of, side)) for side in of.sides}))
        lost = of["about"][lambda frame: frame["key"] == "diverged"]
        for side, seed in zip(lost["side"], lost["seed"], strict=True):
            by_setting[-1].loc[int(seed), side] = 1 / 8
    return sum(by_setting) / len(by_setting)


def reached(source: Path) -> dict[str, tuple[int, int]]:
    """By side, the runs whose accuracy on held-out rows reached ``GOAL`` during training, and all runs."""
    curve = read_rows(source).only(setting=list(SETTINGS))["recall_curve"]
    best = curve.groupby(["side", "setting", "seed"])["accuracy"].max() >= GOAL
    return {side: (int(of.sum()), len(of)) for side, of in best.groupby("side")}


def p_value(differences: np.ndarray) -> float:
    """Two-sided permutation test: the share of all patterns of signs whose mean is as far from 0."""
    count, extreme, size = len(differences), 0, abs(differences.sum()) - 1e-12
    patterns = np.arange(2**count, dtype=np.uint32)
    for part in np.array_split(patterns, max(1, 2**count // 2**16)):
        signs = 1 - 2.0 * ((part[:, None] >> np.arange(count)) & 1)
        extreme += int((abs(signs @ differences) >= size).sum())
    return extreme / 2**count


def interval(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """A BCa bootstrap interval of the mean over seeds; the mean itself where all values are equal."""
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    drawn = bootstrap((values,), np.mean, confidence_level=level, n_resamples=9999, rng=np.random.default_rng(0))
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)


def verdict(name: str, differences: np.ndarray, adjusted: float) -> str:
    low, high = interval(differences)
    if adjusted <= 0.05 and not low <= 0 <= high:
        return "better" if low > 0 else "worse"
    low, high = interval(differences, 0.9)
    return "equivalent" if name in EQUIVALENT and max(-low, high) < MARGIN else "inconclusive"


def contrasts(table: pd.DataFrame) -> str:
    lines = ["| contrast | tests | difference (95 % CI) | p, Holm | verdict |", "|---" * 5 + "|"]
    known = [(side, other, name) for side, other, name in CONTRASTS if {side, other} <= {*table}]
    differences = [(table[side] - table[other]).dropna().to_numpy() for side, other, _ in known]
    adjusted = holm([p_value(of) for of in differences])
    for (side, other, name), of, p in zip(known, differences, adjusted, strict=True):
        low, high = interval(of)
        said = f"{of.mean():+.3f} ({low:+.3f} to {high:+.3f})"
        shown = "< 0.001" if p < 0.001 else f"{p:.3f}"
        cells = (f"{name_of(side)} minus {name_of(other)}", name, said, shown, verdict(name, of, p))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def levels(table: pd.DataFrame, learned: dict[str, tuple[int, int]]) -> str:
    lines = ["| model | accuracy (95 % CI) | runs that reach 0.9 (95 % CI) |", "|---" * 3 + "|"]
    for side in table:
        values = table[side].dropna().to_numpy()
        low, high = interval(values)
        hits, runs = learned[side]
        exact = binomtest(hits, runs).proportion_ci()
        share = f"{hits} of {runs} ({exact.low:.2f} to {exact.high:.2f})"
        lines.append(f"| {name_of(side)} | {values.mean():.3f} ({low:.3f} to {high:.3f}) | {share} |")
    return "\n".join(lines)


def figure(table: pd.DataFrame) -> dict[str, Any]:
    """Accuracy of the eight cells: a panel with and one without the second map, gate and norm on the axis."""
    points = []
    for side in (side for side in CUBE if side in table):
        values = table[side].dropna().to_numpy()
        low, high = interval(values)
        parts = [part for part in ("gate", "norm") if part in side.replace("gated", "gate")]
        points.append({
            "maps": "subtraction" if "v2" in side else "one map", "parts": " + ".join(parts) or "neither",
            "accuracy": values.mean(), "low": low, "high": high,
        })  # fmt: skip
    maps = {"field": "maps", "type": "nominal", "sort": ["one map", "subtraction"], "title": None}
    order = ["neither", "gate", "norm", "gate + norm"]
    x = {"field": "parts", "sort": order, "title": None, "axis": {"labelAngle": 0}}
    shared = {"x": x, "xOffset": maps, "color": maps}
    y = {"type": "quantitative", "title": "accuracy at the end of training", "scale": {"domain": [0, 1]}}
    ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers = [
        {"mark": "rule", "encoding": shared | ends},
        {
            "mark": {"type": "point", "filled": True, "size": 60},
            "encoding": {**shared, "y": {**y, "field": "accuracy"}},
        },
    ]
    return {"data": {"values": points}, "layer": layers, "width": 420, "height": 260}


def main(source: Path = HERE / "measured.jsonl.gz") -> None:
    table = accuracies(source)
    print(contrasts(table), levels(table, reached(source)), sep="\n\n")
    (HERE / "cells.svg").write_text(vl_convert.vegalite_to_svg(figure(table)))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
