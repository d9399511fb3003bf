"""Copies the records of gpu.py to benchmarks/results, the source of the tables.

python benchmarks/gpu_records.py runs/gpu-1 runs/gpu-2    # of each stage that of the last folder; then the tables
python benchmarks/gpu_records.py gpu.json                 # the one file that a user sent
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Of benchmarks/results, and the stages whose records it holds.
INSTALLED = {
    "attention_gpu": ("attention",),
    "attention_gpu_fp32": ("attention_fp32",),
    "decode_gpu": ("decode", "decode_compiled"),
    "throughput_gpu": ("throughput",),
    "step_gpu": ("step",),
    "hopper_gpu": ("hopper",),
    "correctness_gpu": ("correctness",),
}
PACKED = "gpu.json"  # all records of a call, and how its stages ended


class Unfinished(Exception):
    """A stage ended without error, but has settings left to measure."""


def pack(folder: Path, stages: list[dict]) -> None:
    """Write ``gpu.json`` into the folder: all records there, and how their stages ended, the latest end of each."""
    file = folder / PACKED
    ended = json.loads(file.read_text())["stages"] if file.exists() else []
    latest = {line["stage"]: line for line in [*ended, *stages]}
    records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path != file}
    partial = folder / f"{PACKED}.partial"
    partial.write_text(json.dumps({"stages": list(latest.values()), "records": records}, indent=1) + "\n")
    partial.replace(file)


def unpack(file: Path, folder: Path) -> Path:
    """The records of a ``gpu.json``, as files in a new folder.

    Raises:
        ValueError: the file is no ``gpu.json``.
    """
    try:
        records = json.loads(file.read_text())["records"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is no gpu.json of benchmarks/gpu.py ({type(error).__name__}: {error})") from None
    folder.mkdir()
    for stage in (stage for stages in INSTALLED.values() for stage in stages if stage in records):
        (folder / f"{stage}.json").write_text(json.dumps(records[stage]))
    return folder


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
    given = [Path(argument) for argument in arguments]
    if not given or not all(path.exists() for path in given):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folders = [path if path.is_dir() else unpack(path, Path(scratch, str(i))) for i, path in enumerate(given)]
        except ValueError as error:
            print(error)
            return 2
        written = install(folders, RESULTS)
    print("\n".join(written) or "no record there")
    if written:
        subprocess.run([sys.executable, str(ROOT / "benchmarks" / "speed_tables.py")], check=True)
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
