"""The processes of a run: whether they fit its configuration, and how the command line starts them with torchrun."""

import os
import sys
from pathlib import Path

from diff_transformer.errors import UserError
from diff_transformer.train.config import ParallelConfig, RunConfig

SHARDED_PRECISIONS = ("32-true", "bf16-mixed")


def torchrun_options(parallel: ParallelConfig) -> list[str]:
    """torchrun's options for the processes that ``parallel`` asks for."""
    machines = max(1, parallel.num_nodes)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500", f"--nnodes={machines}"]
    return [*(["--standalone"] if machines == 1 else rendezvous), f"--nproc-per-node={max(1, parallel.devices)}"]


def start_processes(config: RunConfig, folder: Path, *, resume: bool = False) -> None:
    """Replace this process by torchrun with the same command line, if a run wants several processes on this machine.

    Return otherwise, or if torchrun has started this process. Errors that every process would raise are raised here,
    once.

    Raises:
        ValueError, FileNotFoundError, FileExistsError: as ``train``, for a configuration that is not consistent or does
            not fit the number of processes, and for a folder that cannot be the run's.
    """
    import torch.distributed

    parallel = config.train.parallel
    if parallel.devices <= 1 or parallel.num_nodes > 1 or torch.distributed.is_torchelastic_launched():
        return
    from diff_transformer.train.initial_model import check_model
    from diff_transformer.train.run_folder import check_run_folder

    config.validate()
    check_run_folder(folder, resume=resume)
    check_model(config)
    check_processes(config, parallel.devices)
    sys.stdout.flush()
    module = ["-m", "torch.distributed.run", *torchrun_options(parallel), "-m", "diff_transformer", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *module])


def started_processes(parallel: ParallelConfig) -> tuple[int, int]:
    """The number of processes on this machine, and of machines, as started.

    Raises:
        ValueError: if the configuration asks for other numbers.
    """
    import torch.distributed

    asked = {"devices": parallel.devices, "num_nodes": parallel.num_nodes}
    if not torch.distributed.is_torchelastic_launched():
        wanted = max(1, parallel.devices) * max(1, parallel.num_nodes)
        if wanted > 1:
            raise UserError(
                f"train.parallel asks for {wanted} processes, this is one alone; start them with: "
                f"torchrun {' '.join(torchrun_options(parallel))} -m diff_transformer train ..."
            )
        return 1, 1
    here, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    there = {"devices": here, "num_nodes": world // here}
    for name, count in asked.items():
        if count not in (0, there[name]):
            raise UserError(
                f"train.parallel.{name} is {count}, but torchrun started {there[name]}; give {there[name]}, or 0 for "
                f"whatever it starts"
            )
    return here, world // here


def check_processes(config: RunConfig, world: int) -> str:
    """The strategy with which ``world`` processes train ``config``: "single", "ddp" or "fsdp".

    Raises:
        ValueError: if the processes do not divide the batch, or the strategy does not allow this number of processes or
            this precision.
    """
    name = _strategy(config.train.parallel, world)
    parallel = config.train.parallel
    parts = world // (parallel.tensor_parallel * parallel.context_parallel) * config.train.accumulate
    if config.train.batch_size % parts:
        raise UserError(
            f"train.batch_size {config.train.batch_size} is not divisible by {parts}: "
            f"{parts // config.train.accumulate} processes with rows of their own, train.accumulate "
            f"{config.train.accumulate}; give a multiple of {parts}"
        )
    if name == "fsdp" and config.train.precision not in SHARDED_PRECISIONS:
        raise UserError(
            f"train.precision is {config.train.precision!r}; with parallel.strategy 'fsdp' accepted: "
            f"{', '.join(map(repr, SHARDED_PRECISIONS))}"
        )
    if parallel.sharded_checkpoints and name != "fsdp":
        raise UserError(
            f"train.parallel.sharded_checkpoints needs strategy 'fsdp', and {world} processes here take {name!r}, "
            "under which every process has the whole model; set train.parallel.strategy=fsdp"
        )
    return name


def _strategy(parallel: ParallelConfig, world: int) -> str:
    ways = parallel.tensor_parallel
    group = ways * parallel.context_parallel
    if world % group:
        raise UserError(
            f"train.parallel.tensor_parallel is {ways} and context_parallel {parallel.context_parallel}: groups "
            f"of {group}, which do not divide the {world} processes; start "
            f"{group * -(-world // group)}, or give other sizes"
        )
    if parallel.strategy == "single" and world > 1:
        raise UserError(f"train.parallel.strategy is 'single', but there are {world} processes; give 'ddp' or 'fsdp'")
    if parallel.strategy in ("single", "ddp") and ways > 1:
        raise UserError(
            f"train.parallel.strategy is {parallel.strategy!r}, which excludes tensor_parallel={ways}; give 'fsdp'"
        )
    if world // ways % parallel.replicas:
        raise UserError(
            f"train.parallel.replicas is {parallel.replicas}, which does not divide {world // ways}, the processes "
            f"beside tensor parallel; give a number that does"
        )
    if parallel.strategy == "fsdp" or (parallel.strategy == "auto" and max(ways, parallel.replicas) > 1):
        return "fsdp"
    return "single" if world == 1 else "ddp"
