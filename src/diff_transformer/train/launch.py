"""Starting the processes of a run from the command line; torchrun does it."""

import os
import sys

from diff_transformer.train.config import ParallelConfig


def is_first() -> bool:
    """Whether this is rank 0 of what torchrun started, or a process alone: the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def torchrun_options(parallel: ParallelConfig) -> list[str]:
    """torchrun's options for the processes that ``parallel`` asks for."""
    machines = max(1, parallel.num_nodes)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500", f"--nnodes={machines}"]
    return [*(["--standalone"] if machines == 1 else rendezvous), f"--nproc-per-node={max(1, parallel.devices)}"]


def start_processes(parallel: ParallelConfig) -> None:
    """Where a run wants several processes on this machine and torchrun has not started them, become torchrun, with the
    same command line for each. Returns otherwise."""
    import torch.distributed

    if parallel.devices <= 1 or parallel.num_nodes > 1 or torch.distributed.is_torchelastic_launched():
        return
    sys.stdout.flush()
    module = ["-m", "torch.distributed.run", *torchrun_options(parallel), "-m", "diff_transformer", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *module])
