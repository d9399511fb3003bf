"""Starting the processes of a run from the command line; torchrun does it."""

import os
import sys
from pathlib import Path

from diff_transformer.train.config import ParallelConfig, RunConfig


def is_first() -> bool:
    """Whether this is rank 0 of what torchrun started, or a process alone: the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def torchrun_options(parallel: ParallelConfig) -> list[str]:
    """torchrun's options for the processes that ``parallel`` asks for."""
    machines = max(1, parallel.num_nodes)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500", f"--nnodes={machines}"]
    return [*(["--standalone"] if machines == 1 else rendezvous), f"--nproc-per-node={max(1, parallel.devices)}"]


def start_processes(config: RunConfig, folder: Path, *, resume: bool = False) -> None:
    """Where a run wants several processes on this machine and torchrun has not started them, become torchrun, with the
    same command line for each. Returns otherwise.

    What each of them would refuse is refused here, once.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: as ``train``, for a configuration that does not fit together or
            the processes, and a folder that cannot be the run's.
    """
    import torch.distributed

    parallel = config.train.parallel
    if parallel.devices <= 1 or parallel.num_nodes > 1 or torch.distributed.is_torchelastic_launched():
        return
    from diff_transformer.train.materials import check_model
    from diff_transformer.train.parallelize import check_processes
    from diff_transformer.train.run_folder import check_run_folder

    config.validate()
    check_run_folder(folder, resume=resume)
    check_model(config)
    check_processes(config, parallel.devices)
    sys.stdout.flush()
    module = ["-m", "torch.distributed.run", *torchrun_options(parallel), "-m", "diff_transformer", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *module])
