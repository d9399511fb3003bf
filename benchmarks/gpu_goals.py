"""The speed goals on a GPU and whether the records meet them, as a table that gpu.py prints at its end.

The operator's are for causal bf16 attention at a length of 4096 as a user gets it (backend "triton"), the models' for
the pair that is not compiled.
"""

import json
from pathlib import Path

from speed_tables import CUDNN, header, line

OPERATOR = {"length": 4096, "causal": True, "dtype": "bfloat16"}
Records = dict[str, list[dict]]  # rows by stage


def operator(records: Records, width: int) -> tuple[dict, list[dict]]:
    """The timed row of the Triton backend, {} if there is none; and all timed rows beside it."""
    wanted = {**OPERATOR, "width": width}
    rows = [r for r in records.get("attention", []) if "both_ms" in r and wanted.items() <= r.items()]
    return next((row for row in rows if row["backend"] == "triton"), {}), rows


def over_default(records: Records, width: int, kind: str) -> float | None:
    """Time over that of the kernel that SDPA chooses."""
    return operator(records, width)[0].get(f"{kind}_ratio")


def over_cudnn(records: Records, width: int, kind: str) -> float | None:
    """Time over that of cuDNN's kernel, which may also be SDPA's own choice."""
    row, rows = operator(records, width)
    if any(r["backend"] == "softmax" and r.get("sdpa") == "cudnn" for r in rows):
        return row.get(f"{kind}_ratio")
    return row.get("ratios", {}).get(CUDNN, {}).get(kind)


def ahead_of_rivals(records: Records, width: int) -> float | None:
    """Time of the fastest FlashDiffAttn over ours, forward + backward."""
    row, rows = operator(records, width)
    rivals = [r["both_ms"] for r in rows if r["role"] == "rival"]
    return min(rivals) / row["both_ms"] if rivals and row else None


def throughput(records: Records, field: str, length: int) -> float | None:
    """The DIFF / Transformer ratio of the 3B pair at a length."""
    return _worst(records.get("throughput", []), field, length=length)


def decoding(records: Records) -> float | None:
    """The worst DIFF / Transformer ratio of the 3B pair's generation."""
    return _worst(records.get("decode", []), "ratio", kind="model")


def _worst(rows: list[dict], field: str, **wanted) -> float | None:
    wanted |= {"side": "diff", "model": "3B"}
    ratios = [row[field] for row in rows if not row.get("compiled") and wanted.items() <= row.items()]
    return min(ratios, default=None)


# What, the bound, whether it is the most, a function of the records (None: nothing was measured), and its arguments.
GOALS = [
    *(
        (f"operator, d {d}: forward + backward over SDPA's default", bound, True, over_default, (d, "both"))
        for d, bound in ((128, 1.15), (64, 1.0))
    ),
    *(
        (f"operator, d {d}: {kind} over cuDNN", bound, True, over_cudnn, (d, kind))
        for kind, bounds in (("forward", (1.6, 1.25)), ("backward", (1.5, 1.05)))
        for d, bound in zip((128, 64), bounds, strict=True)
    ),
    *(
        (f"operator, d {d}: times as fast as the fastest FlashDiffAttn", 1.2, False, ahead_of_rivals, (d,))
        for d in (128, 64)
    ),
    *(
        (f"3B at {length}: {name}, DIFF / Transformer", bound, False, throughput, (f"{kind}_ratio", length))
        for kind, name, bound in (("forward_backward", "forward + backward", 0.98), ("prefill", "prefill", 0.97))
        for length in (2048, 4096)
    ),
    ("3B: decoding, DIFF / Transformer", 1.0, False, decoding, ()),
]


def goals_table(folder: Path) -> list[str]:
    """One line for each goal: its bound, the measured value, and whether it held."""
    records: Records = {}
    for stage in ("attention", "decode", "throughput"):  # under the names of the script or of benchmarks/results
        paths = (folder / f"{stage}_gpu.json", folder / f"{stage}.json")
        path = next((path for path in paths if path.exists()), None)
        records[stage] = json.loads(path.read_text()).get("rows", []) if path else []
    lines = header("goal", "bound", "measured", "")
    for what, bound, at_most, measure, arguments in GOALS:
        value = measure(records, *arguments)
        held = value is not None and (value <= bound if at_most else value >= bound)
        verdict = "not measured" if value is None else "✓ held" if held else "✗ not held"
        limit = f"{'≤' if at_most else '≥'} {bound:g}"
        lines.append(line(what, limit, "" if value is None else f"{value:.3f}", verdict))
    return lines
