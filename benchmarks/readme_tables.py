"""Write the tables of README.md from committed JSON.

python benchmarks/readme_tables.py            # rewrite README.md
python benchmarks/readme_tables.py --check    # exit 1 if README.md differs
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKS = {"held": "✓ held", "did not hold": "✗ did not hold", "undecided": "? undecided"}


def claims_table(path: Path) -> list[str]:
    summary = json.loads(path.read_text())
    lines = ["| claim | paper: Transformer / DIFF | here: Transformer / DIFF | verdict |", "|---|---|---|---|"]
    for claim in summary["claims"]:
        cells = (claim["claim"], claim["paper"], f"{claim['here']}; {claim['detail']}", MARKS[claim["verdict"]])
        lines.append(f"| {' | '.join(cells)} |")
    run, pair = summary["train"], summary["pair"]
    sizes = f"{pair['softmax']['parameters']:,} / {pair['diff']['parameters']:,} parameters"
    tokens = (
        f"{run['tokens'] / 1e6:.1f}M tokens ({run['steps']:,} steps of {run['batch_size']} x {run['sequence_length']})"
    )
    return [*lines, "", f"{sizes}; {tokens}; {summary['seconds'] / 60:.0f} minutes on {summary['provenance']['cpu']}."]


def attention_table(path: Path) -> list[str]:
    record = json.loads(path.read_text())
    sizes = ("batch", "heads", "length", "width")
    kinds = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in ("forward", "both")]
    names = {"float32": "fp32", "bfloat16": "bf16", "forward": "forward", "both": "forward + backward"}
    header = ["backend", "batch, h, N, d", *(f"{names[dtype]} {names[kind]}" for dtype, kind in kinds)]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    table: dict[tuple, dict] = {}
    for row in record["rows"]:
        if row["backend"] in ("blockwise", "sdpa") and row["gate"] == "passed":
            cell = table.setdefault((row["backend"], *(row[size] for size in sizes)), {})
            cell.update({(row["dtype"], kind): row.get(f"{kind}_ratio") for kind in ("forward", "both")})
    for (backend, *shape), ratios in table.items():
        cells = [f"{ratios[kind]:.2f}" if ratios.get(kind) is not None else "" for kind in kinds]
        lines.append(f"| {backend} | {', '.join(map(str, shape))} | {' | '.join(cells)} |")
    source = record["provenance"]
    threads = f"{source['threads']} thread{'s' * (source['threads'] > 1)}"
    return [*lines, "", f"{source['cpu']}, {threads}, PyTorch {source['torch']}."]


TABLES = {
    "demo": (claims_table, ROOT / "figures" / "demo" / "results.json"),
    "novels": (claims_table, ROOT / "figures" / "novels" / "results.json"),
    "attention": (attention_table, ROOT / "benchmarks" / "results" / "attention_cpu.json"),
    "attention_1_thread": (attention_table, ROOT / "benchmarks" / "results" / "attention_cpu_1_thread.json"),
}


def with_tables(text: str) -> str:
    """README's text with each ``<!-- table: NAME -->`` filled from its JSON."""
    for name, (make, path) in TABLES.items():
        if path.exists():
            body = "\n".join(make(path))
            pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text, flags=re.DOTALL)
    return text


def main() -> int:
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = with_tables(before)
    if "--check" in sys.argv[1:]:
        return int(after != before)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
