"""The speed goals on a GPU and whether the records meet them: Markdown for docs/performance.md and the script's end.

The operator's are for causal bf16 attention at a length of 4096 as a user gets it (backend "triton"), the models' for
the pair that is not compiled.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from speed_tables import CUDNN, header, line

LENGTH = 4096
Records = dict[str, list[dict]]  # rows by stage


class Goal(NamedTuple):
    """A goal; ``measure`` returns None if nothing was measured."""

    what: str
    bound: float
    at_most: bool
    measure: Callable[[Records], float | None]

    def held(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def timed(records: Records, width: int) -> list[dict]:
    """Timed rows at the goals' length."""
    wanted = {"length": LENGTH, "width": width, "causal": True, "dtype": "bfloat16"}
    rows = records.get("attention", [])
    return [row for row in rows if "both_ms" in row and all(row.get(name) == value for name, value in wanted.items())]


def ours(records: Records, width: int) -> dict:
    """The row of the Triton backend, {} if it was not timed."""
    return next((row for row in timed(records, width) if row["backend"] == "triton"), {})


def over_default(width: int, kind: str) -> Callable[[Records], float | None]:
    return lambda records: ours(records, width).get(f"{kind}_ratio")


def over_cudnn(width: int, kind: str) -> Callable[[Records], float | None]:
    """Time over that of cuDNN's kernel, which may also be SDPA's own choice."""

    def measure(records: Records) -> float | None:
        row = ours(records, width)
        chosen = {r["backend"]: r.get("sdpa") for r in timed(records, width)}.get("softmax")
        return row.get(f"{kind}_ratio") if chosen == "cudnn" else row.get("ratios", {}).get(CUDNN, {}).get(kind)

    return measure


def ahead_of_rivals(width: int) -> Callable[[Records], float | None]:
    """Time of the fastest FlashDiffAttn over ours, forward + backward."""

    def measure(records: Records) -> float | None:
        rivals = [row["both_ms"] for row in timed(records, width) if row["role"] == "rival"]
        row = ours(records, width)
        return min(rivals) / row["both_ms"] if rivals and row else None

    return measure


def of_models(stage: str, field: str, **wanted) -> Callable[[Records], float | None]:
    """The worst DIFF / Transformer ratio of the pair."""

    def measure(records: Records) -> float | None:
        rows = [row for row in records.get(stage, []) if row.get("side") == "diff" and not row.get("compiled")]
        rows = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
        return min((row[field] for row in rows), default=None)

    return measure


GOALS = [
    *(
        Goal(f"operator, d {d}: forward + backward over SDPA's default", bound, True, over_default(d, "both"))
        for d, bound in ((128, 1.15), (64, 1.0))
    ),
    *(
        Goal(f"operator, d {d}: {kind} over cuDNN", bound, True, over_cudnn(d, kind))
        for kind, bounds in (("forward", (1.6, 1.25)), ("backward", (1.5, 1.05)))
        for d, bound in zip((128, 64), bounds, strict=True)
    ),
    *(
        Goal(f"operator, d {d}: times as fast as the fastest FlashDiffAttn", 1.2, False, ahead_of_rivals(d))
        for d in (128, 64)
    ),
    *(
        Goal(
            f"3B at {length}: {name}, DIFF / Transformer",
            bound,
            False,
            of_models("throughput", f"{kind}_ratio", model="3B", length=length),
        )
        for kind, name, bound in (("forward_backward", "forward + backward", 0.98), ("prefill", "prefill", 0.97))
        for length in (2048, 4096)
    ),
    Goal("3B: decoding, DIFF / Transformer", 1.0, False, of_models("decode", "ratio", kind="model", model="3B")),
]


def read(folder: Path) -> Records:
    """Rows of the records in a folder, under the names that the script or benchmarks/results give them."""
    found: Records = {}
    for stage in ("attention", "decode", "throughput"):
        for path in (folder / f"{stage}_gpu.json", folder / f"{stage}.json"):
            if path.exists():
                found[stage] = json.loads(path.read_text()).get("rows", [])
                break
    return found


def goals_table(folder: Path) -> list[str]:
    """One line for each goal: its bound, the measured value, and whether it held."""
    records = read(folder)
    lines = header("goal", "bound", "measured", "")
    for goal in GOALS:
        value = goal.measure(records)
        verdict = "not measured" if value is None else "✓ held" if goal.held(value) else "✗ not held"
        bound = f"{'≤' if goal.at_most else '≥'} {goal.bound:g}"
        lines.append(line(goal.what, bound, "" if value is None else f"{value:.3f}", verdict))
    return lines
