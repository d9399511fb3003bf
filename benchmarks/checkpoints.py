"""How long checkpoints stop training: two and four processes on this machine (gloo, CPU), FSDP2.

python benchmarks/checkpoints.py                    # some minutes, 2 GB of disk; writes results/checkpoints.json
python benchmarks/checkpoints.py --before OLD/src   # and measures an older version of the package beside it

Then `python docs/tables.py` fills docs/pretraining.md. A run of 24 steps saves at every eighth. The time for which
training stands still is that of rank 0 from the end of a step until the next may begin; the last checkpoint, for which
the end of the run waits, does not count.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from diff_transformer.durable import write_whole
from diff_transformer.evals.provenance import provenance

HERE = Path(__file__).resolve().parents[1] / "src"
OUT = Path(__file__).resolve().parent / "results" / "checkpoints.json"
WAYS = {  # sharded_checkpoints, checkpoint_async
    "gathered by process 0, training waits": (False, False),
    "in parts, training waits": (True, False),
    "in parts, in the background": (True, True),
}
SETTINGS = [
    "model.hidden_size=512", "model.num_hidden_layers=8", "model.num_attention_heads=16", "data.length=128",
    "train.batch_size=8", "train.steps=24", "train.checkpoint_every=8", "train.validate_every=24",
    "train.log_every=24", "train.parallel.strategy=fsdp",
]  # fmt: skip


def work(out: Path, settings: list[str]) -> None:
    """One process of a run; rank 0 writes seconds for which each checkpoint stopped training, and of all steps."""
    import torch

    from diff_transformer.lab.recipes import recipe
    from diff_transformer.train.checkpoint import Saver, latest_checkpoint
    from diff_transformer.train.config import override
    from diff_transformer.train.loop import train
    from diff_transformer.train.state import TrainingState

    torch.set_num_threads(1)
    stopped, ends = [], []
    to_save, save = TrainingState.to_save, Saver.save

    def timed_state(*arguments):
        stopped.append(-time.perf_counter())
        return to_save(*arguments)

    def timed_save(*arguments):
        save(*arguments)
        stopped[-1] += time.perf_counter()

    TrainingState.to_save, Saver.save = timed_state, timed_save
    config = override(recipe("debug"), settings)
    train(config, out, progress=lambda step, values: ends.append(time.perf_counter()))
    torch.distributed.destroy_process_group()
    if os.environ["RANK"] == "0":
        size = sum(path.stat().st_size for path in (latest_checkpoint(out) or out).rglob("*") if path.is_file())
        result = {"stopped": stopped, "seconds": ends[-1] - ends[0], "bytes": size}
        out.with_suffix(".json").write_text(json.dumps(result))


def measured(source: Path, processes: int, way: str, folder: Path) -> dict:
    parts, background = WAYS[way]
    more = {"train.parallel.sharded_checkpoints": parts, "train.checkpoint_async": background}
    settings = [*SETTINGS, *(f"{key}={str(value).lower()}" for key, value in more.items())]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "CUDA_VISIBLE_DEVICES": "",
        "TORCHELASTIC_RUN_ID": "benchmark", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
    }  # fmt: skip
    out = folder / "run"
    command = [sys.executable, __file__, "--work", str(out), *settings]
    started = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{way}, {processes} processes: exit codes {codes}")
    result = json.loads(out.with_suffix(".json").read_text())
    shutil.rmtree(out)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the folder src of another version")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(Path(arguments.work[0]), arguments.work[1:])
        return
    kinds = [("this version", HERE, way) for way in WAYS]
    if arguments.before:
        kinds = [("before", arguments.before.resolve(), way) for way in list(WAYS)[:2]] + kinds
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for processes in (2, 4):
            results: list[list[dict]] = [[] for _ in kinds]
            for _ in range(arguments.repeats):  # in turn, so that a slow minute meets all
                for of_kind, (_, source, way) in zip(results, kinds, strict=True):
                    of_kind.append(measured(source, processes, way, Path(folder)))
            for of_kind, (version, _, way) in zip(results, kinds, strict=True):
                stopped = [seconds for result in of_kind for seconds in result["stopped"][:-1]]
                steps = median(result["seconds"] for result in of_kind)
                about = {"processes": processes, "version": version, "way": way, "bytes": of_kind[0]["bytes"]}
                rows.append({**about, "stopped": median(stopped), "longest": max(stopped), "seconds": steps})
                print(json.dumps(rows[-1]), flush=True)
    write_whole(OUT, json.dumps({"rows": rows, "provenance": provenance(settings=SETTINGS)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
