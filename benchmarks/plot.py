"""Draw the operator's time over softmax attention's by length, a line for each width d, from committed JSON into docs/.

python benchmarks/plot.py            # docs/attention_cpu.svg, docs/attention_amx.svg, docs/attention_gpu.svg
python benchmarks/plot.py --check    # exit 1 if a drawing differs from its JSON, or is missing
"""

import json
import sys
from pathlib import Path

from diff_transformer.report.charts import Line, grid, line_chart
from diff_transformer.report.generated import keep
from diff_transformer.report.render import Chart

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
DRAWINGS = {  # and whose time
    "attention_cpu": ("blockwise",),
    "attention_amx": ("blockwise",),
    "attention_gpu": ("triton",),
}
KINDS = {"forward_ratio": "forward", "backward_ratio": "backward", "both_ratio": "forward + backward"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
STYLES = {16: "s5", 32: "diff", 64: "softmax", 96: "s1", 128: "s2"}  # marks and colours of the report, by width


def panels(record: dict, backends: tuple[str, ...]) -> dict[tuple[str, str], dict[int, list[tuple[int, float]]]]:
    """{(row's name, column's name): {d: [(N, ratio), ...]}}: a row for each dtype, and one more over cuDNN."""
    found: dict[tuple[str, str], dict[int, list[tuple[int, float]]]] = {}
    rows = [r for r in record["rows"] if r["backend"] in backends and r["gate"] == "passed" and r.get("causal", True)]
    for row in rows:
        for field, name in KINDS.items():
            values = {DTYPES[row["dtype"]]: row.get(field)}
            cudnn = row.get("ratios", {}).get("softmax[cudnn]", {})
            values[f"{DTYPES[row['dtype']]} over cuDNN"] = cudnn.get(field.removesuffix("_ratio"))
            for title, value in values.items():
                if value is not None:
                    found.setdefault((title, name), {}).setdefault(row["width"], []).append((row["length"], value))
    return {key: {d: sorted(points) for d, points in sorted(lines.items())} for key, lines in found.items()}


def drawing(record: dict, backends: tuple[str, ...]) -> Chart:
    """A panel for each dtype and pass; the dashed line at 1 is softmax attention."""
    found = panels(record, backends)
    columns = [name for name in KINDS.values() if any(column == name for _, column in found)]
    top = max([1.25, *(1.1 * y for lines in found.values() for points in lines.values() for _, y in points)])
    lengths = sorted({x for lines in found.values() for points in lines.values() for x, _ in points})
    ticks = [(float(n), f"{n // 1024}K" if n % 1024 == 0 else str(n)) for n in lengths]
    shown = []
    for row in sorted({row for row, _ in found}):
        for column in columns:
            lines = [
                Line(f"d = {d}", [(float(n), ratio) for n, ratio in points], STYLES.get(d, "s6"), marks=True, read=True)
                for d, points in found.get((row, column), {}).items()
            ]
            title = f"{row}, {column}"
            label = f"{title}: time of {', '.join(backends)} over softmax attention with twice the heads"
            chart = line_chart(
                label, lines, x_label="length", x_name="N =", x_ticks=ticks, y_range=(0.0, top), guides=[(1.0, "")],
                log_x=True, width=250, height=180,
            )  # fmt: skip
            shown.append((title, chart))
    widths = sorted({d for lines in found.values() for d in lines})
    return grid(shown, {STYLES.get(d, "s6"): f"d = {d}" for d in widths}, len(columns))


def main(arguments: list[str]) -> int:
    made = {
        DOCS / f"{name}.svg": drawing(json.loads(source.read_text()), backends)
        for name, backends in DRAWINGS.items()
        if (source := RESULTS / f"{name}.json").exists()
    }
    return keep(made, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
