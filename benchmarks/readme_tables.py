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
from diff_transformer.report.generated import filled, keep
from gpu_goals import goals_table
from speed_tables import (
    attention_gpu_table,
    attention_table,
    compiled_table,
    decode_table,
    others_table,
    speed_table,
    step_table,
    throughput_table,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "comparison.md",
    ROOT / "figures" / "demo" / "README.md",
    ROOT / "figures" / "novels" / "README.md",
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
    "speed": (speed_table, RESULTS),
    "others": (others_table, RESULTS / "others_cpu.json"),
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


def parts(page: Path) -> dict[str, str]:
    """The tables of ``page`` whose JSON exists."""
    named = re.findall(r"^<!-- (\w+) -->$", page.read_text(), re.M)
    return {name: "\n".join(make(path)) for name, (make, path) in TABLES.items() if name in named and path.exists()}


if __name__ == "__main__":
    sys.exit(keep({page: filled(page, parts(page)) for page in PAGES}, check=sys.argv[1:] == ["--check"]))
