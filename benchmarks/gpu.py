"""All measurements on a GPU, in one call of at most ten minutes: correctness, operator, decoding, throughput.

python benchmarks/gpu.py                   # JSON into the folder $OUT, or runs/gpu; from source, nothing installed
python benchmarks/gpu.py --stages decode   # some stages only
python benchmarks/gpu.py --cache FILE      # with kernels that gpu_cache.py compiled elsewhere
python benchmarks/gpu.py --dry             # every stage on the CPU at tiny sizes
python benchmarks/gpu_records.py FOLDER    # put the records into benchmarks/results

Each stage is a subprocess with its share of the remaining time, so that an exception or device error in one stage
cannot affect the next. Records are written row by row, so a stopped stage keeps its rows. stages.json says how each
stage ended.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import gpu_cache
import gpu_records
from gpu_cache import SWITCH

ROOT = Path(__file__).resolve().parent.parent
SHARES = {  # of the time
    "hopper": 20, "correctness": 36, "attention": 34, "decode": 10, "decode_compiled": 14, "throughput": 16,
    "attention_fp32": 3,
}  # fmt: skip
UNFINISHED = 3  # exit code of a stage that ended well with something left to do
ENDS = {0: "done", UNFINISHED: "unfinished"}
SOFT = 0.85  # of a stage's time, after which it begins nothing new; at the whole of it it is stopped


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=560, help="for all stages together")
    parser.add_argument("--stages", help="which, with commas between them; all by default")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="an archive of gpu_cache.py")
    given = parser.parse_args(arguments)
    stages = given.stages.split(",") if given.stages else list(SHARES)
    unknown = [stage for stage in stages if stage not in SHARES]
    if unknown:
        parser.error(f"no stage {unknown[0]!r}; there are: {', '.join(SHARES)}")
    folder = Path(os.environ.get("OUT") or ROOT / "runs" / "gpu").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    own = [str(ROOT / "src"), str(ROOT / "tests" / "helpers")]
    sys.path[:0] = own
    os.environ["PYTHONPATH"] = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.setdefault(SWITCH, "1")  # also with a Triton that no record is of
    print(preflight(given.cache), flush=True)
    return run_stages(stages, given.seconds, given.dry, folder)


def preflight(cache: Path | None) -> str:
    """Unpack the compiled kernels, if there are any; one line on whether Triton will find them, one on the GPU."""
    said = "kernels are compiled here"
    if cache is not None:
        with tarfile.open(cache) as archive:
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.4 and newer
            archive.extractall("/")
        os.environ["TRITON_CACHE_DIR"] = str(gpu_cache.FOLDER)
        made, here = gpu_cache.KEY.read_text(), gpu_cache.key()
        said = f"compiled kernels of {cache.name}: " + (
            "their keys are those of this Triton" if made == here else f"NOT found, made by {made}, here is {here}"
        )
    return f"== {said}; {clocks() or 'no nvidia-smi'}"


def clocks() -> str:
    """What nvidia-smi says now: driver, clocks in MHz, power in W and temperature in °C."""
    from diff_transformer.bench.record import smi

    return ", ".join(smi().values())


def launch_only_what_passed(folder: Path) -> None:
    """Later stages launch the Hopper kernels if these passed the stage "hopper" in each of their forms."""
    file = folder / "hopper.json"
    record = json.loads(file.read_text()) if file.exists() else {"rows": [], "provenance": {}}
    passed = Counter(row["form"] for row in record["rows"] if row["gate"] == "passed")
    planned = record["provenance"].get("forms", {})
    os.environ[SWITCH] = str(int(bool(planned) and planned == dict(passed)))
    print(f"== {SWITCH}={os.environ[SWITCH]} from here on", flush=True)


def run_stages(stages: list[str], seconds: float, dry: bool, folder: Path) -> int:
    """0 if every stage ended well and finished. Time that one leaves over goes to those after it."""
    if dry:
        # Forked stages then start with everything imported.
        import diff_transformer.model.modeling  # noqa: F401
        import gpu_stages  # noqa: F401
    end = time.monotonic() + seconds
    summary: list[dict] = []
    for i, stage in enumerate(stages):
        left = end - time.monotonic()
        share = SHARES[stage] / sum(SHARES[s] for s in stages[i:])
        if left > 1:
            print(f"== {stage}: {left * share:.0f} s", flush=True)
            outcome = run_stage(stage, left * share, dry, folder)
        else:
            outcome = {"status": "no time left"}
        outcome["clocks"] = clocks()
        print(f"== {stage}: {outcome['status']}, {outcome['clocks']}", flush=True)
        summary.append({"stage": stage, **outcome})
        (folder / "stages.json").write_text(json.dumps(summary, indent=1) + "\n")
        if stage == "hopper" and not dry:
            launch_only_what_passed(folder)
    for line in summary:
        print(f"{line['stage']:16} {line['status']:13} {line.get('seconds', 0):6.1f} s")
    return int(any(line["status"] != "done" for line in summary))


def run_stage(stage: str, budget: float, dry: bool, folder: Path) -> dict:
    """How the stage ended: status "done", "unfinished", "failed" or "stopped", seconds, and what an error said."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        error = Path(scratch, "error")
        # Only a fresh process can use CUDA after another has: on the CPU a fork is as good, and faster.
        context: Any = multiprocessing.get_context("fork" if dry else "spawn")
        process = context.Process(target=stage_process, args=(stage, dry, SOFT * budget, folder, error))
        process.start()
        process.join(budget)
        status = "stopped" if process.is_alive() else ENDS.get(process.exitcode, "failed")
        _kill(process)
        said = error.read_text()[-2000:] if error.exists() else ""
    if status == "failed":
        said = said or f"exit code {process.exitcode}"
        print(said, flush=True)
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "error": said}


def _kill(process: Any) -> None:
    """The stage, if it still runs, and what it started and left, pytest for one."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        process.kill()
    process.join()


def stage_process(stage: str, dry: bool, seconds: float, folder: Path, error: Path) -> None:
    """Runs in a process group of its own."""
    os.setsid()
    os.chdir(ROOT)
    try:
        from gpu_stages import STAGES

        STAGES[stage](dry, seconds, folder / f"{stage}.json")
    except gpu_records.Unfinished as reason:
        error.write_text(str(reason))
        os._exit(UNFINISHED)
    except BaseException:
        error.write_text(traceback.format_exc())
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
