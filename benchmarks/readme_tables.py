"""Write the tables of README.md and docs/ from committed JSON; a table whose JSON does not exist is left as it is.

python benchmarks/readme_tables.py            # rewrite the pages
python benchmarks/readme_tables.py --check    # exit 1 if one differs
"""

import json
import re
import sys
from pathlib import Path

from diff_transformer.report.claims import MARKS, OURS, is_ours, untested, verdict_words
from diff_transformer.report.figure import one_run
from gpu_goals import goals_table
from speed_tables import (
    attention_gpu_table,
    attention_table,
    compiled_table,
    decode_table,
    step_table,
    throughput_table,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "reproduction.md",
    ROOT / "figures" / "table7_throughput" / "README.md",
)


def claims_table(path: Path) -> list[str]:
    summary = json.loads(path.read_text())
    lines = ["| claim | paper: Transformer / DIFF | here: Transformer / DIFF | verdict |", "|---|---|---|---|"]
    for claim in sorted(summary["claims"], key=is_ours):
        here = "; ".join(part for part in (claim["here"], claim["detail"], untested(claim)) if part)
        name = claim["claim"] + (f" ({OURS.lower()})" if is_ours(claim) else "")
        mark = "" if one_run(claim) else f"{MARKS[claim['verdict']][0]} "  # one run decides nothing
        cells = (name, claim["paper"], here, f"{mark}{verdict_words(claim)}")
        lines.append(f"| {' | '.join(cells)} |")
    run, pair = summary["train"], summary["pair"]
    sizes = f"{pair['softmax']['parameters']:,} / {pair['diff']['parameters']:,} parameters"
    tokens = (
        f"{run['tokens'] / 1e6:.1f}M tokens ({run['steps']:,} steps of {run['batch_size']} x {run['sequence_length']})"
    )
    daggers = any("†" in claim["paper"] for claim in summary["claims"])
    note = " † from a third party's transcription of the paper." if daggers else ""
    return [
        *lines,
        "",
        f"{sizes}; {tokens}; {summary['seconds'] / 60:.0f} minutes on {summary['provenance']['cpu']}.{note}",
    ]


TABLES = {
    "demo": (claims_table, ROOT / "figures" / "demo" / "results.json"),
    "novels": (claims_table, ROOT / "figures" / "novels" / "results.json"),
    "attention": (attention_table, RESULTS / "attention_cpu.json"),
    "attention_amx": (attention_table, RESULTS / "attention_amx.json"),
    "attention_avx2": (attention_table, RESULTS / "attention_avx2.json"),
    "compiled": (compiled_table, RESULTS / "compiled.json"),
    "attention_gpu": (attention_gpu_table, RESULTS / "attention_gpu.json"),
    "goals_gpu": (lambda path: goals_table(path.parent), RESULTS / "attention_gpu.json"),
    "decode": (decode_table, RESULTS / "decode_cpu.json"),
    "decode_gpu": (decode_table, RESULTS / "decode_gpu.json"),
    "throughput": (throughput_table, RESULTS / "throughput_cpu.json"),
    "throughput_gpu": (throughput_table, RESULTS / "throughput_gpu.json"),
    "step_gpu": (step_table, RESULTS / "step_gpu.json"),
}


def experiments_table() -> list[str]:
    from diff_transformer.lab.evaluate import EXPERIMENTS

    lines = ["| `eval` | in the paper |", "|---|---|"]
    return [*lines, *(f"| `{name}` | {what} |" for name, what in EXPERIMENTS.items())]


def with_tables(text: str) -> str:
    """README's text with each ``<!-- table: NAME -->`` filled from its JSON, and the list of experiments."""
    listed = "\n".join(experiments_table())
    text = re.sub(
        r"(<!-- experiments -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}{listed}\n{m[2]}", text, flags=re.DOTALL
    )
    for name, (make, path) in TABLES.items():
        if path.exists():
            body = "\n".join(make(path))
            pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
            text = re.sub(pattern, lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text, flags=re.DOTALL)
    return text


def main() -> int:
    stale = []
    for page in PAGES:
        before = page.read_text()
        after = with_tables(before)
        if after != before:
            stale.append(page)
            if "--check" not in sys.argv[1:]:
                page.write_text(after)
    if "--check" in sys.argv[1:]:
        print("\n".join(f"{page.relative_to(ROOT)} differs from the JSON" for page in stale), end="")
        return bool(stale)
    return 0


if __name__ == "__main__":
    sys.exit(main())
