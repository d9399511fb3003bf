"""The tasks of ``prepare`` as a pipeline of datatrove: in processes of this machine, on Slurm or on Ray."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.pipeline import filters
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from loguru import logger

from diff_transformer.checks import require_extra, require_known
from diff_transformer.data.prepare import FILTERS, PrepareConfig, reader_of, texts_of, write_task
from diff_transformer.data.tokens import read_plan
from diff_transformer.errors import UserError

LOGS, DUPLICATES, WRITE = "logs", "dedup", "write"
MEMORY_GB = 4  # of a task on a cluster


class Read(PipelineStep):
    """The texts of a task."""

    type, name = "READER", "texts"

    def __init__(self, plan: dict[str, Any]):
        super().__init__()
        self.plan, self.documents, self.left_out = plan, 0, {}

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        reader = reader_of(self.plan, rank)
        for split, text in texts_of(self.plan, rank, reader):
            self.documents += 1
            yield Document(text, f"{rank}/{self.documents}", metadata={"split": split})
        self.left_out = reader.left_out


class Write(PipelineStep):
    """The shards and the record of a task, from what the steps between ``Read`` and this one kept."""

    type, name = "WRITER", "shards"

    def __init__(self, out: Path, plan: dict[str, Any], read: Read):
        super().__init__()
        self.out, self.plan, self.read = out, plan, read

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        left_out: Counter[str] = Counter()

        def texts():
            written = 0
            for document in data:
                written += 1
                yield document.metadata["split"], document.text
            left_out.update(self.read.left_out)
            if self.read.documents > written:
                left_out["filtered"] = self.read.documents - written

        write_task(self.out, self.plan, rank, texts(), left_out)


def stages(out: Path, plan: dict[str, Any]) -> dict[str, tuple[list[PipelineStep], int]]:
    """(pipeline, tasks) of each stage, in order; each needs all of those before it."""
    settings, work = plan["settings"], out / DUPLICATES
    names = [name for group in settings["filters"] for name in FILTERS[group]]

    def read() -> list[PipelineStep]:
        return [Read(plan), *(getattr(filters, name)() for name in names)]

    before, drop, tasks = {}, [], settings["tasks"]
    if settings["dedup"] is not None:
        signatures, buckets, removed = (str(work / name) for name in ("signatures", "buckets", "removed"))
        before = {
            "signatures": ([*read(), MinhashDedupSignature(signatures)], tasks),
            "buckets": ([MinhashDedupBuckets(signatures, buckets)], MinhashConfig().num_buckets),
            "clusters": ([MinhashDedupCluster(buckets, removed)], 1),
        }
        drop = [MinhashDedupFilter(removed)]
    first, *rest = read()
    assert isinstance(first, Read)
    return {**before, WRITE: ([first, *rest, *drop, Write(out, plan, first)], tasks)}


@dataclass(frozen=True)
class Engine:
    """Where the tasks run. Nothing here changes the bytes of the folder."""

    kind: str  # "local", "slurm" or "ray"
    jobs: int | None = None  # tasks at a time; by default one a core here, and all on a cluster
    address: str | None = None  # of a Ray cluster, HOST:PORT; by default RAY_ADDRESS, or the cluster of this machine
    partition: str | None = None  # of Slurm
    time: str | None = None  # of Slurm: limit of a job, HH:MM:SS

    def check(self, config: PrepareConfig) -> None:
        """Check that the engine can run tasks of ``config``; connect to a Ray cluster.

        Raises:
            UserError: for an unknown engine, an option of another one, or a missing package or command.
        """
        require_known("engine", self.kind, ("local", "slurm", "ray"))
        options = {"--address": (self.address, "ray"), "--partition": (self.partition, "slurm")}
        for option, (value, kind) in {**options, "--time": (self.time, "slurm")}.items():
            if value and kind != self.kind:
                raise UserError(f"{option} is an option of --engine {kind}, not of {self.kind}")
        if config.filters or config.dedup:
            require_extra("prepare", "--filters and --dedup", "spacy")
        if self.kind == "slurm" and not (self.partition and self.time):
            raise UserError("--engine slurm needs --partition NAME and --time HH:MM:SS")
        if self.kind == "slurm" and shutil.which("sbatch") is None:
            raise UserError("there is no command sbatch here; run on a login node")
        if self.kind == "ray":
            from diff_transformer.cluster import connect

            connect(self.address)

    def run(self, out: Path, plan: dict[str, Any], todo: Sequence[int]) -> None:
        """Run the tasks ``todo``; with Slurm, submit them.

        Raises:
            UserError: the reason of the first task that failed; on a cluster, where its log is.
        """
        if not todo:
            return
        for task in todo:
            (out / LOGS / WRITE / "completions" / f"{task:05d}").unlink(missing_ok=True)
        logger.disable("datatrove")
        before: Any = None
        for name, (pipeline, tasks) in stages(out, plan).items():
            if self.kind == "local":
                self._run_here(out, name, tasks)
                continue
            before = self._executor(out, name, pipeline, tasks, before)
            if self.kind == "ray" or name == WRITE:  # Slurm's executors submit those that they depend on
                before.run()
            if self.kind == "ray" and before.get_incomplete_ranks():
                raise UserError(f"tasks of {name} have not finished; see {out / LOGS / name}, then --resume")

    def _executor(self, out: Path, name: str, pipeline: list[PipelineStep], tasks: int, before: Any) -> Any:
        shared: dict[str, Any] = {"pipeline": pipeline, "tasks": tasks, "logging_dir": str(out / LOGS / name)}
        shared |= {"workers": self.jobs or -1, "mem_per_cpu_gb": MEMORY_GB}
        if self.kind == "ray":
            return RayPipelineExecutor(**shared)
        return SlurmPipelineExecutor(
            **shared, partition=self.partition, time=self.time, qos=None, depends=before, job_name=f"prepare-{name}",
            env_command=f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH",
        )  # fmt: skip

    def _run_here(self, out: Path, name: str, tasks: int) -> None:
        """Run the unfinished tasks of a stage in processes of this machine; one that is killed is an error."""
        completed = {path.name for path in (out / LOGS / name / "completions").glob("*")}
        todo = [task for task in range(tasks) if f"{task:05d}" not in completed]
        workers = max(1, min(self.jobs or os.cpu_count() or 1, len(todo)))
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin)
        try:
            for future in [pool.submit(_run_task, str(out), name, task) for task in todo]:
                future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process was killed, perhaps because memory ran out; continue with --resume and fewer --jobs"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Set up a process: it ends with its parent, tokenises in one thread, and logs to datatrove's files alone."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _end_with_the_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _run_task(out: str, name: str, task: int) -> None:
    pipeline, tasks = stages(Path(out), read_plan(out))[name]
    executor = LocalPipelineExecutor(pipeline, tasks, workers=1, logging_dir=f"{out}/{LOGS}/{name}")
    executor._run_for_rank(task)  # ``run`` starts a process that outlives this one when it is killed
