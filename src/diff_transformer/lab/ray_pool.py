"""Runs of the pool on the nodes of a Ray cluster. The plan's folder must be on a file system that all nodes share.

Each run is a Ray task that starts the same worker as on this machine, where the run's CPUs and GPUs are free. A run
whose node or process died starts again on any node, and resumes from its checkpoint in the shared folder. Every node
needs this package with the extras ``ray`` and ``train``, in the driver's versions of Python and Ray.
"""

import logging
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from diff_transformer.checks import first_line, read_json, require_extra
from diff_transformer.durable import require_writable
from diff_transformer.errors import UserError
from diff_transformer.lab.processes import INTERRUPTED, LOG, TERMINATED, start_worker
from diff_transformer.lab.rows import REQUEST

RETRIES = 3  # of a run that a dead node or process lost


class Lost(RuntimeError):
    """A worker was killed, not asked to stop; Ray starts it again."""


class RayTasks:
    """An executor for ``run_pool`` on the Ray cluster at ``RAY_ADDRESS``, or on that of this machine. A run takes
    ``train.threads`` CPUs, or one if that is 0.

    Args:
        folder: of the plan; need not exist yet.
        gpus: of each run, a fraction to share one; by default 1 if the cluster has GPUs, else 0.

    Raises:
        UserError: if Ray is not installed, there is no cluster, ``folder`` is not writable, or for a number of GPUs
            that Ray cannot give.
    """

    def __init__(self, folder: Path | str, gpus: float | None = None):
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus % 1)):
            raise UserError(f"GPUs per run are {gpus}; give 0, a fraction of 1, or a whole number")
        require_extra("ray", "--engine ray", "ray")
        require_writable(Path(folder))
        import ray

        handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces
        try:
            ray.init("auto", ignore_reinit_error=True, log_to_driver=False, logging_level=logging.CRITICAL)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"no Ray cluster ({first_line(error)}); start one with `ray start --head`, or set RAY_ADDRESS to "
                "HOST:PORT of its head"
            ) from None
        finally:
            with suppress(ValueError):  # in another thread than the main one
                signal.signal(signal.SIGTERM, handler)
        self._gpus = gpus if gpus is not None else float("GPU" in ray.cluster_resources())

    def start(self, folder: Path) -> "RayWorker":
        config = read_json(folder / REQUEST).get("config", {})
        return RayWorker(folder, config.get("train", {}).get("threads") or 1, self._gpus)


class RayWorker:
    """A run on the cluster, with the interface of ``subprocess.Popen``."""

    def __init__(self, folder: Path, cpus: int, gpus: float):
        import ray

        task: Any = ray.remote(_execute)
        placed = task.options(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, retry_exceptions=[Lost])
        self._folder, self._code = folder, None
        self._ended = placed.remote(folder.absolute(), Path.cwd(), gpus)

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        import ray

        if self._code is None:
            ended, _ = ray.wait([self._ended], timeout=timeout)
            if not ended:
                raise subprocess.TimeoutExpired("the run", timeout or 0)
            try:
                self._code = ray.get(self._ended)
            except ray.exceptions.TaskCancelledError:
                self._code = TERMINATED
            except ray.exceptions.RayError as error:
                with (self._folder / LOG).open("a") as log:
                    log.write(f"{' '.join(str(error).split())}\n")
                self._code = -signal.SIGKILL
        return self._code

    def send_signal(self, sig: int) -> None:
        """Ask the run to save and stop; one that waits for its turn leaves the queue."""
        import ray

        ray.cancel(self._ended)


def _execute(folder: Path, working: Path, gpus: float) -> int:
    """Run the worker of ``folder`` on this node and return its exit code.

    Args:
        working: the driver's directory, for relative paths in the configuration; skipped if the node lacks it.

    Raises:
        UserError: if this node does not see ``folder``.
        Lost: if the worker was killed.
    """
    if not (folder / REQUEST).exists():
        raise UserError(f"node {os.uname().nodename} does not see {folder}; give an --out that all nodes share")
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if working.is_dir():
        os.chdir(working)
    worker = start_worker(folder)
    try:
        while (code := worker.poll()) is None:
            time.sleep(0.2)  # Ray does not interrupt a wait
    except KeyboardInterrupt:  # the driver asks the run to stop
        worker.send_signal(signal.SIGTERM)
        return worker.wait()
    if code < 0 or code in (INTERRUPTED, TERMINATED):
        raise Lost(f"the worker of {folder} ended with code {code} on {os.uname().nodename}")
    return code
