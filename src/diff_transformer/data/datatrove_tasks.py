"""The tasks of ``prepare`` as pipelines of datatrove, with its filters and deduplication: here, on Slurm or on Ray."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diff_transformer.checks import first_line, require_extra, require_known
from diff_transformer.cluster import connect
from diff_transformer.data.prepare import FILTERS, PrepareConfig, reader_of, texts_of, write_task
from diff_transformer.data.prepared_folder import TASKS
from diff_transformer.errors import UserError

if TYPE_CHECKING:
    from datatrove.pipeline.base import PipelineStep

ENGINES = ("local", "slurm", "ray")
LOGS, DUPLICATES, WRITE = "logs", "dedup", "write"
MEMORY_GB = 4  # of a task on a cluster
_OPTIONS = {"address": "ray", "partition": "slurm", "time": "slurm", "dry_run": "slurm"}


@dataclass(frozen=True)
class Engine:
    """Where the tasks run. Nothing here changes the bytes of the folder."""

    kind: str  # "local", "slurm" or "ray"
    jobs: int | None = None  # tasks at a time; by default one a core here, and all on a cluster
    address: str | None = None  # of a Ray cluster, HOST:PORT; by default RAY_ADDRESS, or the cluster of this machine
    partition: str | None = None  # of Slurm
    time: str | None = None  # of Slurm: limit of a job, HH:MM:SS
    dry_run: bool = False  # with Slurm: write the scripts of the jobs, and submit none

    def check(self, config: PrepareConfig) -> None:
        """Check that the engine can run tasks of ``config``; connect to a Ray cluster.

        Raises:
            ValueError: an unknown engine, or an option of another one. RuntimeError: a missing package or command.
            ConnectionError: no cluster listens at the address.
        """
        require_known("engine", self.kind, ENGINES)
        for option, kind in _OPTIONS.items():
            if getattr(self, option) and kind != self.kind:
                raise UserError(f"--{option.replace('_', '-')} is an option of --engine {kind}, not of {self.kind}")
        require_extra("datatrove", "--engine", "datatrove", "dill", *(("spacy",) if config.filters else ()))
        if self.kind == "slurm" and not (self.partition and self.time):
            raise UserError("--engine slurm needs --partition NAME and --time HH:MM:SS")
        if self.kind == "slurm" and not self.dry_run and shutil.which("sbatch") is None:
            raise UserError("there is no command sbatch here; run on a login node, or write scripts (--dry-run)")
        if self.kind == "ray":
            connect(self.address)

    def run(self, out: Path, plan: dict[str, Any], todo: Sequence[int]) -> bool:
        """Run the unfinished tasks. True if Slurm runs them later.

        Raises:
            ValueError: the first task that failed, with its reason.
        """
        from loguru import logger

        if not todo:
            return False
        for rank in todo:
            (out / LOGS / WRITE / "completions" / f"{rank:05d}").unlink(missing_ok=True)
        (out / TASKS).mkdir(exist_ok=True)
        logger.disable("datatrove")
        executors: list[Any] = []
        for name, pipeline, tasks in stages(out, plan):
            executors.append(self._executor(out, name, pipeline, tasks, executors[-1] if executors else None))
            if self.kind == "local":
                self._run_here(executors[-1])
            elif self.kind == "ray":
                executors[-1].run()
            if self.kind != "slurm":
                _raise_failure(out, plan)
                if executors[-1].get_incomplete_ranks():
                    raise UserError(f"tasks of {name} have not finished; see {out / LOGS / name}, then --resume")
        if self.kind == "slurm":
            command = [sys.executable, "-m", "diff_transformer", "prepare", "--out", str(out), "--resume"]
            submit(executors, shlex.join(command), self.dry_run)
        return self.kind == "slurm"

    def _executor(self, out: Path, name: str, pipeline: list[PipelineStep], tasks: int, previous: Any) -> Any:
        from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor

        shared: dict[str, Any] = {"pipeline": pipeline, "tasks": tasks, "logging_dir": str(out / LOGS / name)}
        shared["workers"] = self.jobs or (os.cpu_count() if self.kind == "local" else -1)
        if self.kind == "local":
            return LocalPipelineExecutor(**shared)
        if self.kind == "ray":
            return RayPipelineExecutor(**shared, mem_per_cpu_gb=MEMORY_GB)
        return SlurmPipelineExecutor(
            **shared, mem_per_cpu_gb=MEMORY_GB, partition=self.partition, time=self.time, qos=None, depends=previous,
            job_name=f"prepare-{name}", env_command=f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH",
        )  # fmt: skip

    def _run_here(self, executor: Any) -> None:
        """Run the tasks of an executor in processes of this machine; one that is killed is an error."""
        import dill

        ranks, packed = executor.get_incomplete_ranks(), dill.dumps(executor)
        workers = max(1, min(executor.workers, len(ranks)))
        try:
            with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (packed,)) as pool:
                for future in [pool.submit(_run_rank, rank) for rank in ranks]:
                    future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process was killed, perhaps because memory ran out; continue with --resume and fewer --jobs"
            ) from error


_mine: Any = None  # the executor of this worker process


def _begin(executor: bytes) -> None:
    global _mine
    import dill

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (datatrove logs there, and to its files)
    _mine = dill.loads(executor)


def _end_with_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_rank(rank: int) -> None:
    with suppress(Exception):  # ``_Reported`` has written the reason
        deepcopy(_mine)._run_for_rank(rank)  # a copy: steps count


def stages(out: Path, plan: dict[str, Any]) -> list[tuple[str, list[PipelineStep], int]]:
    """(name, pipeline, tasks) of each pipeline, in order; each needs all of those before it."""
    from datatrove.pipeline import filters
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig

    settings, work = plan["settings"], out / DUPLICATES
    tasks = settings["tasks"]

    def read(counts: Counter[str]) -> list[PipelineStep]:
        names = [name for group in settings["filters"] for name in FILTERS[group]]
        return [read_step(out, plan, counts), *(getattr(filters, name)() for name in names)]

    counts: Counter[str] = Counter()
    if settings["dedup"] is None:
        return [(WRITE, [*read(counts), write_step(out, plan, counts)], tasks)]
    signatures, buckets, removed = (str(work / name) for name in ("signatures", "buckets", "removed"))
    return [
        ("signatures", [*read(Counter()), MinhashDedupSignature(signatures)], tasks),
        ("buckets", [MinhashDedupBuckets(signatures, buckets)], MinhashConfig().num_buckets),
        ("clusters", [MinhashDedupCluster(buckets, removed)], 1),
        (WRITE, [*read(counts), MinhashDedupFilter(removed), write_step(out, plan, counts)], tasks),
    ]


def read_step(out: Path, plan: dict[str, Any], counts: Counter[str]) -> PipelineStep:
    """The step that reads the texts of a task. ``counts`` gets the number of documents and of those left out."""
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep

    class Read(PipelineStep):
        type, name = "READER", "texts"

        def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
            reader = reader_of(plan, rank)
            counts.clear()
            with _Reported(out, rank):
                for number, (split, text) in enumerate(texts_of(plan, rank, reader)):
                    counts["documents"] += 1
                    yield Document(text, f"{rank}/{number}", metadata={"split": split})
            counts.update(reader.left_out)

    return Read()


def write_step(out: Path, plan: dict[str, Any], counts: Counter[str]) -> PipelineStep:
    """The step that writes the shards of a task."""
    from datatrove.pipeline.base import PipelineStep

    class Write(PipelineStep):
        type, name = "WRITER", "shards"

        def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
            left_out: Counter[str] = Counter()

            def texts():
                written = 0
                for document in data:
                    written += 1
                    yield document.metadata["split"], document.text
                left_out.update(blank=counts["blank"], invalid=counts["invalid"])
                if plan["settings"]["filters"] or plan["settings"]["dedup"]:
                    left_out["filtered"] = counts["documents"] - written

            with _Reported(out, rank):
                write_task(out, plan, rank, texts(), left_out)

    return Write()


class _Reported:
    """Leave the message of an exception in the folder: on a cluster, no exception comes back."""

    def __init__(self, out: Path, rank: int):
        self.path = out / TASKS / f"{rank}.error"

    def __enter__(self) -> None:
        self.path.unlink(missing_ok=True)

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, Exception):
            self.path.write_text(first_line(error))


def _raise_failure(out: Path, plan: dict[str, Any]) -> None:
    failed = sorted((out / TASKS).glob("*.error"), key=lambda path: int(path.stem))
    if failed:
        ranks = ", ".join(path.stem for path in failed)
        reason = failed[0].read_text()
        raise UserError(f"tasks {ranks} of {plan['settings']['tasks']} failed: {reason}. Finished tasks are kept")


def submit(executors: list[Any], finish: str, dry_run: bool) -> None:
    """Submit the pipelines to Slurm, and a last job that runs ``finish``; or write their scripts into the logs."""
    from datatrove.executor.slurm import launch_slurm_job

    last = executors[-1]

    def last_script() -> str:
        arguments = last.get_sbatch_args()
        del arguments["array"]
        arguments |= {"job-name": "prepare-manifest", "dependency": f"afterany:{last.job_id}"}
        return last.get_launch_file_contents(arguments, finish)

    if not dry_run:
        last.launch_merge_stats = lambda: launch_slurm_job(last_script(), last.job_id_retriever)
        last.run()
        return
    for executor in executors:
        run = f"srun  -l -n 1 launch_pickled_pipeline {executor.logging_dir.resolve_paths('executor.pik')}"
        jobs = min(len(executor.get_incomplete_ranks()), executor.max_array_size)
        script = executor.get_launch_file_contents(executor.get_sbatch_args(jobs), run)
        with executor.logging_dir.open("launch_script.slurm", "w") as file:
            file.write(script)
    last.job_id = "JOB"
    with last.logging_dir.open("last_script.slurm", "w") as file:
        file.write(last_script())
