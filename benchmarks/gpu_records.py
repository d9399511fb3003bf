"""Copies the records of gpu.py to benchmarks/results, the source of the tables.

python benchmarks/gpu_records.py runs/gpu-1 runs/gpu-2    # of each stage that of the last folder; then the tables
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Of benchmarks/results, and the stages whose records it holds.
INSTALLED = {
    "attention_gpu": ("attention",),
    "attention_gpu_fp32": ("attention_fp32",),
    "decode_gpu": ("decode", "decode_compiled"),
    "throughput_gpu": ("throughput",),
    "hopper_gpu": ("hopper",),
    "correctness_gpu": ("correctness",),
}


class Unfinished(Exception):
    """A stage ended without error, but has settings left to measure."""


def install(folders: list[Path], results: Path = RESULTS) -> list[str]:
    """Copy the folders' records into ``results``, and return the names of the files."""
    written = []
    for name, stages in INSTALLED.items():
        latest = [[path for folder in folders if (path := folder / f"{stage}.json").exists()][-1:] for stage in stages]
        records = [json.loads(path.read_text()) for paths in latest for path in paths]
        if records:
            rows = [row for record in records for row in record["rows"]]
            (results / f"{name}.json").write_text(json.dumps({**records[0], "rows": rows}, indent=1) + "\n")
            written.append(f"{name}.json")
    return written


def main(arguments: list[str]) -> int:
    written = install([Path(argument) for argument in arguments])
    print("\n".join(written) or "no record there")
    if written:
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "speed_tables.py")], check=True)
    return int(not written)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
