"""Pipelines of datatrove for a preparation, and the executors that run them."""

from __future__ import annotations

import os
import shlex
import sys
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dill
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.slurm import launch_slurm_job
from datatrove.pipeline import filters
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from loguru import logger

from diff_transformer.data.prepare.config import FILTERS, PrepareConfig
from diff_transformer.data.prepare.engine import Engine
from diff_transformer.data.prepare.folder import DUPLICATES, LAST_STAGE, LOGS, WORKING
from diff_transformer.data.prepare.readers import Tally
from diff_transformer.data.prepare.sources import TextSource
from diff_transformer.data.prepare.steps import ReadTexts, WriteShards
from diff_transformer.data.prepare.workers import Task, begin_worker, in_processes

MEMORY_GB = 4  # of a task on a cluster
_MAX_ARRAY = 1001  # tasks of a job array


@dataclass(frozen=True)
class Stage:
    """A pipeline that runs as a whole before the next one."""

    name: str
    pipeline: list[PipelineStep]
    tasks: int


def run_stages(
    config: PrepareConfig, out: Path, parts: Sequence[TextSource], task: Task, engine: Engine, jobs: int | None
) -> None:
    """Run the pipelines of ``config`` on ``engine``; on Slurm, submit them, or write their scripts into logs/.

    Raises:
        RuntimeError: if a process of the local engine was killed.
        Exception: of a task that failed.
    """
    logger.disable("datatrove")
    try:
        executors: list[Any] = []
        for stage in stages(config, out, parts, task):
            executors.append(_executor(stage, out, engine, jobs, executors[-1] if executors else None))
            if engine.kind != "slurm":
                executors[-1].run()
                if executors[-1].get_incomplete_ranks():
                    raise RuntimeError(f"not all tasks finished; see {out / LOGS / stage.name}, then --resume")
        if engine.kind == "slurm":
            executors[-1].finish = shlex.join(
                [sys.executable, "-m", "diff_transformer", "prepare", "--out", str(out), "--resume"]
            )
            for executor in executors if engine.dry_run else ():
                executor.write_scripts()
            if not engine.dry_run:
                executors[-1].run()
    finally:
        logger.enable("datatrove")


def stages(config: PrepareConfig, out: Path, parts: Sequence[TextSource], task: Task) -> list[Stage]:
    """The pipelines that make the shards of ``config`` in ``out``."""
    whole = bool(config.filters or config.dedup)

    def read(tally: Tally) -> list[PipelineStep]:
        names = [name for group in config.filters for name in FILTERS[group]]
        return [ReadTexts(out, parts, config, tally, whole=whole), *(getattr(filters, name)() for name in names)]

    tally, found = Tally(), out / DUPLICATES
    write = WriteShards(out, task, config.shard_bytes, tally, whole=whole)
    if config.dedup is None:
        return [Stage(LAST_STAGE, [*read(tally), write], config.tasks)]
    signatures, buckets, removed = (str(found / name) for name in (*WORKING, "removed"))
    return [
        Stage("signatures", [*read(Tally()), MinhashDedupSignature(signatures)], config.tasks),
        Stage("buckets", [MinhashDedupBuckets(signatures, buckets)], MinhashConfig().num_buckets),
        Stage("clusters", [MinhashDedupCluster(buckets, removed)], 1),
        Stage(LAST_STAGE, [*read(tally), MinhashDedupFilter(removed), write], config.tasks),
    ]


def _executor(stage: Stage, out: Path, engine: Engine, jobs: int | None, previous: Any) -> Any:
    shared: dict[str, Any] = {
        "pipeline": stage.pipeline,
        "tasks": stage.tasks,
        "workers": -1 if jobs is None else jobs,
        "logging_dir": str(out / LOGS / stage.name),
    }
    if engine.kind == "local":
        return _Local(**shared)
    shared["mem_per_cpu_gb"] = MEMORY_GB
    if engine.kind == "ray":
        return RayPipelineExecutor(**shared)
    shared |= {"partition": engine.partition, "time": engine.time, "qos": None, "depends": previous}
    return _Slurm(
        **shared,
        job_name=f"prepare-{stage.name}",
        env_command=f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH",
        max_array_size=_MAX_ARRAY,
    )


class _Local(LocalPipelineExecutor):
    """As datatrove's, but a process that is killed is an error, and no process survives this one."""

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        workers = min(self.workers, len(ranks)) if self.workers > 0 else len(ranks)
        if ranks:
            deque(in_processes(_run_rank, ranks, workers, _begin, dill.dumps(self)), maxlen=0)


_mine: Any = None  # the executor of this worker process


def _begin(executor: bytes) -> None:
    global _mine
    begin_worker()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (where datatrove logs, besides its files)
    _mine = dill.loads(executor)


def _run_rank(rank: int) -> None:
    deepcopy(_mine)._run_for_rank(rank)  # a copy: steps count


class _Slurm(SlurmPipelineExecutor):
    """As datatrove's; a last job writes the manifest, in place of the statistics of all tasks."""

    finish = ""  # command of the last job

    def launch_merge_stats(self) -> None:
        if self.finish:
            launch_slurm_job(self._last_script(), self.job_id_retriever)

    def write_scripts(self) -> None:
        """Write the scripts of the jobs into the folder of the logs."""
        run = f"srun  -l -n 1 launch_pickled_pipeline {self.logging_dir.resolve_paths('executor.pik')}"
        jobs = min(len(self.get_incomplete_ranks()), self.max_array_size)
        scripts = {"launch_script.slurm": self.get_launch_file_contents(self.get_sbatch_args(jobs), run)}
        if self.finish:
            self.job_id = "JOB"
            scripts["last_script.slurm"] = self._last_script()
        for name, script in scripts.items():
            with self.logging_dir.open(name, "w") as file:
                file.write(script)

    def _last_script(self) -> str:
        arguments = self.get_sbatch_args()
        del arguments["array"]
        arguments |= {"job-name": "prepare-manifest", "dependency": f"afterany:{self.job_id}"}
        return self.get_launch_file_contents(arguments, self.finish)
