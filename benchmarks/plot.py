"""Draw the operator's time over softmax attention's by length, a line for each width d, from committed JSON into docs/.

python benchmarks/plot.py            # docs/attention_cpu.svg, docs/attention_amx.svg, docs/attention_gpu.svg
python benchmarks/plot.py --check    # exit 1 if a drawing differs from its JSON, or is missing
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
DRAWINGS = {  # and whose time
    "attention_cpu": ("blockwise",),
    "attention_amx": ("blockwise",),
    "attention_gpu": ("triton",),
}
KINDS = {"forward_ratio": "forward", "backward_ratio": "backward", "both_ratio": "forward + backward"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
COLORS = {16: "#999999", 32: "#0072b2", 64: "#d55e00", 96: "#009e73", 128: "#cc79a7"}
WIDTH, HEIGHT, LEFT, TOP = 250, 190, 46, 40


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


def drawing(record: dict, backends: tuple[str, ...]) -> str:
    """The SVG."""
    found = panels(record, backends)
    rows = sorted({row for row, _ in found})
    columns = [name for name in KINDS.values() if any(column == name for _, column in found)]
    ratios = [y for lines in found.values() for points in lines.values() for _, y in points]
    lengths = [x for lines in found.values() for points in lines.values() for x, _ in points]
    top = max([1.25, *(1.1 * y for y in ratios)])
    ends = (min(lengths, default=512), max(lengths, default=512))
    body = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            at = (LEFT + j * (WIDTH + LEFT), TOP + i * (HEIGHT + TOP + 20))
            body += panel(f"{row}, {column}", found.get((row, column), {}), at, top, ends)
    width = LEFT + len(columns) * (WIDTH + LEFT)
    height = TOP + len(rows) * (HEIGHT + TOP + 20) + 6
    widths = sorted({d for lines in found.values() for d in lines})
    for i, d in enumerate(widths):
        x, y = LEFT + 76 * i, height - 14
        body.append(f'<path d="M{x} {y - 4}h18" stroke="{color(d)}" stroke-width="2"/>{mark(x + 9, y - 4, d)}')
        body.append(text(x + 24, y, f"d = {d}"))
    style = "<style>text{font:12px system-ui,sans-serif;fill:#777}path{fill:none}</style>"
    open_tag = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    title = f"<title>time of {', '.join(backends)} over softmax attention with twice the heads, by length</title>"
    return f"{open_tag}{title}{style}{''.join(body)}</svg>\n"


def panel(
    title: str, lines: dict[int, list[tuple[int, float]]], at: tuple[int, int], top: float, ends: tuple[int, int]
) -> list[str]:
    """One frame with its axes; the line of 1 is softmax attention."""
    left, above = at
    span = math.log2(ends[1] / ends[0]) or 1.0

    def x(length: int) -> float:
        return round(left + 12 + (WIDTH - 24) * math.log2(length / ends[0]) / span, 1)

    def y(ratio: float) -> float:
        return round(above + HEIGHT * (1 - ratio / top), 1)

    step = 0.25 if top <= 1.6 else 0.5 if top <= 4 else 1.0
    drawn = [text(left + WIDTH / 2, above - 10, title, "middle")]
    for i in range(int(top / step) + 1):
        level = i * step
        width, dash = (1.5, ' stroke-dasharray="5 3"') if level == 1 else (0.5, "")
        drawn.append(f'<path d="M{left} {y(level)}h{WIDTH}" stroke="#8888" stroke-width="{width}"{dash}/>')
        drawn.append(text(left - 6, y(level) + 4, f"{level:g}", "end"))
    for length in sorted({length for points in lines.values() for length, _ in points}):
        name = f"{length // 1024}K" if length % 1024 == 0 else str(length)
        drawn.append(text(x(length), above + HEIGHT + 16, name, "middle"))
    for d, points in lines.items():
        places = [(x(length), y(ratio)) for length, ratio in points]
        line = "L".join(f"{px} {py}" for px, py in places)
        drawn.append(f'<path d="M{line}" stroke="{color(d)}" stroke-width="2"/>')
        drawn += [mark(px, py, d) for px, py in places]
    return drawn


def mark(x: float, y: float, d: int) -> str:
    """Widths differ by shape as well as by colour."""
    shapes = {
        16: "h6v6h-6z", 32: "a3 3 0 1 0 6 0a3 3 0 1 0 -6 0", 64: "l3 -4l3 4l-3 4z", 96: "h6l-3 5z", 128: "l3 -5l3 5z",
    }  # fmt: skip
    return f'<path d="M{round(x - 3, 1)} {y}{shapes.get(d, shapes[16])}" style="fill:{color(d)}"/>'


def color(d: int) -> str:
    return COLORS.get(d, "#666666")


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def main(arguments: list[str]) -> int:
    wrong = []
    for name, backends in DRAWINGS.items():
        source, target = RESULTS / f"{name}.json", DOCS / f"{name}.svg"
        if not source.exists():
            continue
        svg = drawing(json.loads(source.read_text()), backends)
        if "--check" not in arguments:
            target.write_text(svg)
        elif not target.exists() or target.read_text() != svg:
            wrong.append(target.name)
    if wrong:
        print(f"docs/{', docs/'.join(wrong)}: not what the JSON gives; run python benchmarks/plot.py")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
