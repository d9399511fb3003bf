"""Secondary measures, on the final models of seed 0 and on the source: longer prompts, other tasks, what was forgotten.

python figures/uptraining_real/evals.py SMOLLM2 runs/real DATA runs/real-evals    # again to go on; then run.py

DATA has the public sets as they are published: trec/, arc/, hellaswag/, books/val.tar.xz.
"""

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from archive import without_places

from diff_transformer.lab.record import load_all
from diff_transformer.lab.sides import SOURCE

RECORD = Path(__file__).resolve().parent / "secondary.json"
SIDES = (SOURCE, "softmax", "wider", "diff_v2", "diff")
_NEEDLES = "needle --corpus {data}/books/val.tar.xz --split all --set cells=[[4,2],[6,2]]"
RUNS = {
    "trec": "many_shot --data {data}/trec --samples 40 --set lengths=[512,1024] --set order_seeds=1",
    "arc": "harness --data {data}/arc/ARC-Easy-Test.jsonl --samples 200",
    "hellaswag": "harness --data {data}/hellaswag/hellaswag_val_full.txt.bz2 --samples 100",
    "chat": f"{_NEEDLES} --chat-template --length 1024 --samples 2",
    "n2048": f"{_NEEDLES} --length 2048 --samples 2",
    "n4096": f"{_NEEDLES} --length 4096 --samples 1",
}
ROWS = {  # name of a row -> run and metrics, of which it shows the mean
    "TREC, 26 examples (40 questions)": ("trec", ("shots26",)),
    "TREC, 55 examples (40 questions)": ("trec", ("shots55",)),
    "ARC-Easy (200 questions)": ("arc", ("mean_0shot",)),
    "HellaSwag (100 questions)": ("hellaswag", ("mean_0shot",)),
    "needles through the chat template, 1,024 tokens (20 prompts)": ("chat", ("n4_r2", "n6_r2")),
    "needles in 2,048 tokens (20 prompts)": ("n2048", ("n4_r2", "n6_r2")),
    "needles in 4,096 tokens (10 prompts)": ("n4096", ("n4_r2", "n6_r2")),
}


def table(names: dict[str, str]) -> str:
    """A row a measure, a column a model, from the record; "" without one. ``names``: of the sides."""
    if not RECORD.exists():
        return ""
    found = {(one["run"], one["side"]): one["metrics"] for one in json.loads(RECORD.read_text())["results"]}
    lines = ["**One run of each arm** (seed 0), chosen beforehand as secondary; small samples", ""]
    lines += [f"| | {' | '.join(names[side] for side in SIDES)} |", "|---" * (len(SIDES) + 1) + "|"]
    for said, (run, keys) in ROWS.items():
        if all((run, side) in found for side in SIDES):
            means = [sum(found[run, side][key] for key in keys) / len(keys) for side in SIDES]
            lines.append(f"| {said} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)


def main(source: str, study: str, data: str, out: str) -> None:
    results = []
    for run, options in RUNS.items():
        for side in SIDES:
            model = source if side == SOURCE else str(Path(study) / "members" / f"{side}-seed0" / "run" / "model")
            path = Path(out) / f"{run}-{side}.json"
            if not path.exists():
                call = ["eval", *options.format(data=data).split(), "--model", model, "--dtype", "bfloat16", "--resume"]
                subprocess.run([sys.executable, "-m", "diff_transformer", *call, "--out", str(path)], check=True)
            for record in load_all(path):
                for name, metrics in record.metrics.items():
                    results.append(
                        {"run": run, "side": side, "metrics": metrics, "provenance": record.provenance[name]}
                    )
    kept = {"commands": {run: f"diff-transformer eval {options}" for run, options in RUNS.items()}, "results": results}
    RECORD.write_text(json.dumps(without_places(kept), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
