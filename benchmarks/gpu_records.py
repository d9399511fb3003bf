"""Merges records of several calls of gpu.py and writes them to benchmarks/results, the source of tables and plots.

python benchmarks/gpu_records.py runs/gpu-1 runs/gpu-2    # later folders win; then the tables
python benchmarks/gpu_records.py gpu.json                 # the one file that a user sent

A row is known by what was measured, not by what came out. Records of unlike machines or versions are not mixed.
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
SETTING = (
    "kind", "model", "fields", "compiled", "dtype", "batch", "heads", "kv_heads", "length", "cache", "width", "causal"
)  # fmt: skip
WHO = ("backend", "side", "shape", "form")
VERSIONS = ("gpu", "cuda", "cudnn", "triton")
PACKED = "gpu.json"  # all records of a call, and how its stages ended


class Unfinished(Exception):
    """A stage ended without error, but has settings left to measure."""


def setting(row: dict) -> str:
    """The setting of a row, as text to compare."""
    return json.dumps({name: row[name] for name in SETTING if name in row}, sort_keys=True)


def key(row: dict) -> str:
    return setting(row) + json.dumps({name: row[name] for name in WHO if name in row}, sort_keys=True)


def rows_of(path: Path) -> list[dict]:
    """The rows of a record; [] if there is none."""
    return json.loads(path.read_text()).get("rows", []) if path.exists() else []


def settings_of(rows: list[dict]) -> set[str]:
    return {setting(row) for row in rows}


def merge(records: list[dict]) -> dict:
    """One record of all rows; of a row that is in several, the last. Its provenance is the last record's.

    Raises:
        ValueError: the records are of unlike machines or versions.
    """
    sources = [machine_of(record) for record in records]
    if any(source != sources[0] for source in sources):
        raise ValueError(f"records of unlike machines or versions: {', '.join(map(str, dict.fromkeys(sources)))}")
    rows = {key(row): row for record in records for row in record.get("rows", [])}
    merged = {**records[-1], "rows": list(rows.values())}
    dates = [date for record in records for date in _dates(record)]
    return merged | {"dates": list(dict.fromkeys(dates))}


def machine_of(record: dict) -> tuple:
    source = record.get("provenance", {})
    machine = source.get("machine") or {}
    return (source.get("torch"), *(machine.get(name) for name in VERSIONS))


def _dates(record: dict) -> list[str]:
    return record.get("dates") or [record.get("provenance", {}).get("date", "unknown")]


def merge_files(paths: list[Path], out: Path) -> None:
    """Write the merged record of the existing paths, if there are any."""
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    if records:
        partial = out.with_name(out.name + ".partial")
        partial.write_text(json.dumps(merge(records), indent=1) + "\n")
        partial.replace(out)


def pack(folder: Path, stages: list[dict]) -> None:
    """Write ``gpu.json`` into the folder: all records there, and how their stages ended, the latest end of each."""
    file = folder / PACKED
    ended = json.loads(file.read_text())["stages"] if file.exists() else []
    latest = {line["stage"]: line for line in [*ended, *stages]}
    paths = {path.stem: path for path in sorted(folder.glob("*.json")) if path != file}
    partial = folder / f"{PACKED}.partial"
    records = {stage: json.loads(path.read_text()) for stage, path in paths.items()}
    partial.write_text(json.dumps({"stages": list(latest.values()), "records": records}, indent=1) + "\n")
    partial.replace(file)


def unpack(file: Path, folder: Path) -> Path:
    """The records of a ``gpu.json``, as files in a new folder.

    Raises:
        ValueError: the file is no ``gpu.json``.
    """
    try:
        records = json.loads(file.read_text())["records"]
        stages = [stage for stages in INSTALLED.values() for stage in stages if stage in records]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is no gpu.json of benchmarks/gpu.py ({type(error).__name__}: {error})") from None
    folder.mkdir()
    for stage in stages:
        (folder / f"{stage}.json").write_text(json.dumps(records[stage]))
    return folder


def install(folders: list[Path], results: Path = RESULTS) -> list[str]:
    """Merge the folders' records into ``results``, and return the names of the files."""
    written = []
    for name, stages in INSTALLED.items():
        paths = [folder / f"{stage}.json" for stage in stages for folder in folders]
        if any(path.exists() for path in paths):
            merge_files(paths, results / f"{name}.json")
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
