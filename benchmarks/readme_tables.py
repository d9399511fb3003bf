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
    lines = ["| claim | paper | here | verdict |", "|---|---|---|---|"]
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
    return record["readme"] if "readme" in record else []


TABLES = {
    "demo": (claims_table, ROOT / "figures" / "demo" / "results.json"),
    "novels": (claims_table, ROOT / "figures" / "novels" / "results.json"),
    "attention": (attention_table, ROOT / "benchmarks" / "results" / "attention_cpu.json"),
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
