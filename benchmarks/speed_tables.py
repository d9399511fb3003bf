"""Write the tables of docs/performance.md from the benchmarks' records.

python benchmarks/speed_tables.py            # rewrite the page
python benchmarks/speed_tables.py --check    # exit 1 if it differs

Times are shares of the matched softmax attention's: lower is faster. A table follows the comment with its name and ends
at ``<!-- end -->``.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

SHOWN = 4096  # tokens of the operator on a GPU
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PROCESSORS = {
    "attention_zen5": "AMD Zen 5",
    "attention_cpu": "AMD Zen 4",
    "attention_amx": "Intel with AMX",
    "attention_avx2": "AMD without AVX-512",
}
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def rows(results: Path, name: str) -> list[dict]:
    """The rows of a record that passed their gate, [] where there is no record."""
    path = results / f"{name}.json"
    read = json.loads(path.read_text())["rows"] if path.exists() else []
    return [row for row in read if row.get("gate", "passed") in ("passed", "is the baseline")]


def operator_cpu(results: Path) -> list[str]:
    """The range over all shapes of ``blockwise`` on each processor, and of ``sdpa`` on all of them."""
    kinds = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("forward", "both")]
    lines = header("processor, 2 cores", "fp32 forward", "fp32 both", "bf16 forward", "bf16 both")
    records = {on: rows(results, name) for name, on in PROCESSORS.items()}
    every = [row for record in records.values() for row in record]

    def spans(record: list[dict], backend: str) -> list[str]:
        timed = [row for row in record if row["backend"] == backend]
        return [span(row.get(f"{kind}_ratio") for row in timed if row["dtype"] == dtype) for dtype, kind in kinds]

    lines += [line(on, *spans(record, "blockwise")) for on, record in records.items() if record]
    return [*lines, line("`sdpa`, all of them", *spans(every, "sdpa"))]


def operator_gpu(results: Path) -> list[str]:
    """Causal attention of ``SHOWN`` tokens: times over both kernels of softmax attention, and FlashDiffAttn's."""
    columns = "forward", "backward", "both", "both, over FlashAttention-2", "FlashDiffAttn over ours", "TFLOP/s"
    lines = header("width", *columns)
    record = [row for row in rows(results, "attention_gpu") if row["causal"] and row["length"] == SHOWN]
    timed = [row for row in record if row["dtype"] == "bfloat16" and "both_ms" in row]
    for row in (row for row in timed if row["backend"] == "triton"):
        beside = [other for other in timed if other["width"] == row["width"]]
        default = next((other.get("sdpa") for other in beside if other["backend"] == "softmax"), None)
        cudnn = [over(row, "cudnn", default, kind) for kind in ("forward", "backward", "both")]
        rivals = [other["both_ms"] for other in beside if other["backend"].startswith("FlashDiffAttn")]
        ahead = min(rivals) / row["both_ms"] if rivals else None
        cells = [number(cell) for cell in (*cudnn, over(row, "flash", default, "both"), ahead)]
        rates = f"{row['forward_tflops']:.0f}, {row['backward_tflops']:.0f}"
        lines.append(line(str(row["width"]), *cells, rates))
    return lines


def over(row: dict, kernel: str, default: str | None, kind: str) -> float | None:
    """Time over softmax attention's on a kernel of SDPA; ``default``: the kernel that SDPA chose for it."""
    return row[f"{kind}_ratio"] if kernel == default else row["ratios"].get(f"softmax[{kernel}]", {}).get(kind)


def decoding(results: Path) -> list[str]:
    """The operator over a cache: the range over all shapes."""
    lines = header("one token over a cache", "backend", "time over softmax attention's", "of a copy's speed")
    for name, on in {"decode_cpu": "AMD Zen 4, 2 cores", "decode_gpu": "NVIDIA H200"}.items():
        timed = [row for row in rows(results, name) if row["kind"] == "operator" and row["role"] == "backend"]
        for backend, dtype in dict.fromkeys((row["backend"], row["dtype"]) for row in timed if "us" in row):
            some = [row for row in timed if (row["backend"], row["dtype"]) == (backend, dtype) and "us" in row]
            copies = [round(100 * row["copy_share"]) for row in some]
            ratios = span(row["ratio"] for row in some)
            lines.append(line(f"{on}, {DTYPES[dtype]}", f"`{backend}`", ratios, f"{min(copies)} to {max(copies)} %"))
    return lines


def models(results: Path) -> list[str]:
    """Table 7 and decoding: DIFF / Transformer in tokens a second, the range over shapes, beside the paper's."""
    lines = header("model", "on", "training", "paper", "prefill", "paper", "decoding")
    for name, on in {"cpu": "AMD Zen 4", "gpu": "NVIDIA H200"}.items():
        timed = [diff for _, diff in pairs(rows(results, f"throughput_{name}"))]
        decoded = [diff for _, diff in pairs([r for r in rows(results, f"decode_{name}") if r["kind"] == "model"])]
        for title in dict.fromkeys(model(row) for row in (*timed, *decoded)):
            whole = [row for row in timed if model(row) == title]
            cells = [
                span(row.get(f"{kind}_{ratio}") for row in whole)
                for kind in ("forward_backward", "prefill")
                for ratio in ("ratio", "paper_ratio")
            ]
            lines.append(line(title, on, *cells, span(row["ratio"] for row in decoded if model(row) == title)))
    return lines


TABLES = {table.__name__: table for table in (operator_cpu, operator_gpu, decoding, models)}


def pairs(timed: list[dict]) -> list[tuple[dict, dict]]:
    """The Transformer's and DIFF's row of each setting."""
    sides = ([row for row in timed if row["side"] == side] for side in ("softmax", "diff"))
    return list(zip(*sides, strict=True))


def model(row: dict) -> str:
    """Preset, width where it is not the preset's, dtype, whether compiled."""
    width = f", width {row['fields']['hidden_size']}" if "hidden_size" in row["fields"] else ""
    compiled = ", compiled" if row.get("compiled") else ""
    return f"{row['model']}{width}, {DTYPES[row['dtype']]}{compiled}"


def header(*names: str) -> list[str]:
    return [line(*names), "|" + "---|" * len(names)]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def span(values: Iterable[float | None]) -> str:
    """The smallest and the largest of ``values``, or their value where both are equal."""
    known = sorted({number(value) for value in values if value is not None}, key=float)
    return " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""


def filled(page: str, results: Path = RESULTS) -> str:
    """``page`` with its tables made again."""

    def again(table: re.Match) -> str:
        return "\n".join([f"<!-- {table[1]} -->", *TABLES[table[1]](results), "<!-- end -->"])

    return TABLE.sub(again, page)


def main(check: bool) -> int:
    page = PAGE.read_text()
    if check:
        return int(filled(page) != page)
    PAGE.write_text(filled(page))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] == ["--check"]))
