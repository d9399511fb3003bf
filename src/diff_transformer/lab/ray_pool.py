"""Runs of the pool on the nodes of a Ray cluster. The plan's folder must be on a file system that all nodes share.

Each run is an actor that starts the same worker as ``LocalProcesses``, where the CPUs and GPUs of the run are free. A
run whose node or process died starts again on any node, and resumes from its checkpoint in the shared folder. When the
driver dies, Ray ends its actors, and the workers end with them. Every node needs this package with the extras ``ray``
and ``train``, in the driver's versions of Python and Ray.
"""

import logging
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

from diff_transformer.checks import listed, read_json
from diff_transformer.cluster import connect
from diff_transformer.durable import require_writable
from diff_transformer.errors import UserError
from diff_transformer.lab.processes import INTERRUPTED, LOG, TERMINATED, NodeProcess, reads
from diff_transformer.lab.spec import REQUEST

logger = logging.getLogger("diff_transformer")

RETRIES = 3  # of a run that a dead node or process lost
_ANSWER_SECONDS = 60  # for a node to say whether it did
_WORDS = 30  # of the end of another library's message


class RayTasks:
    """An executor for ``run_pool`` on a Ray cluster. A run takes ``train.threads`` CPUs, or one if that is 0.

    Args:
        folder: of the plan; need not exist yet.
        address: ``HOST:PORT`` of the cluster; "auto" for ``RAY_ADDRESS``, else the cluster of this machine.
        gpus: of each run, a fraction to share one; by default 1 if the cluster has GPUs, else 0.

    Raises:
        RuntimeError: if Ray is not installed.
        ValueError: for a number of GPUs that Ray cannot give, or an address of another form.
        ConnectionError: if there is no cluster at ``address``.
        UserError: if ``folder`` is not writable here, or a node does not see it.
    """

    def __init__(self, folder: Path | str, address: str = "auto", gpus: float | None = None):
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus % 1)):
            raise UserError(f"GPUs per run are {gpus}; give 0, a fraction of 1, or a whole number")
        connect(address)
        check_shared(Path(folder))
        import ray

        self._gpus = gpus if gpus is not None else float("GPU" in ray.cluster_resources())
        self._warned = False

    def start(self, folder: Path) -> "RayWorker":
        config = read_json(folder / REQUEST).get("config", {})
        cpus = config.get("train", {}).get("threads") or 1
        if not self._warned and not any(_holds(node, cpus, self._gpus) for node in _nodes()):
            self._warned = True
            logger.warning(
                "no node has %d CPUs and %g GPUs: a run that needs them waits until one joins", cpus, self._gpus
            )
        return RayWorker(folder, cpus, self._gpus)


class RayWorker:
    """A run on the cluster, with the interface of a process. A lost one starts again, up to ``RETRIES`` times."""

    def __init__(self, folder: Path, cpus: int, gpus: float):
        self._folder, self._cpus, self._gpus = folder.absolute(), cpus, gpus
        self._losses, self._stopping, self._code = 0, False, None
        self._begin()

    def _begin(self) -> None:
        import ray

        actor: Any = ray.remote(NodeProcess)
        placed = actor.options(num_cpus=self._cpus, num_gpus=self._gpus, max_concurrency=2)
        self._actor = placed.remote(self._folder, Path.cwd(), self._gpus)
        self._begun, self._ended = self._actor.begun.remote(), self._actor.wait.remote()

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
            self._end(*_outcome(self._ended))
        return self.wait(timeout) if self._code is None else self._code

    def send_signal(self, sig: int) -> None:
        """Pass a signal on. A run that waits for its turn leaves the queue."""
        import ray

        self._stopping = True
        begun, _ = ray.wait([self._begun], timeout=0)
        if begun:
            self._actor.send_signal.remote(sig)
        else:
            self.kill()

    def kill(self) -> None:
        import ray

        self._stopping = True
        ray.kill(self._actor)

    def _end(self, code: int, reason: str) -> None:
        """Keep the exit code, or start again if the run was lost: ended by what was not asked for."""
        lost = (code < 0 or code in (INTERRUPTED, TERMINATED)) and not self._stopping
        self._losses += lost
        again = lost and self._losses <= RETRIES
        if lost:
            next_ = f"attempt {self._losses + 1} of {RETRIES + 1} follows" if again else "no attempt is left"
            with (self._folder / LOG).open("a") as log:
                log.write(f"lost: {reason}; {next_}\n")
        if again:
            self._begin()
        else:
            self._code = code


def _outcome(ended) -> tuple[int, str]:
    """The exit code of an attempt, and the reason if it was lost."""
    import ray

    try:
        code = ray.get(ended)
    except ray.exceptions.RayError as error:
        return -signal.SIGKILL, " ".join(str(error).split())
    return code, f"the process ended with code {code}"


# ---- the nodes


def check_shared(folder: Path) -> None:
    """Check that every node sees ``folder``: each reads a file that this process writes beside it, and removes.

    Raises:
        UserError: naming the nodes that do not read it.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    require_writable(folder)
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    token = secrets.token_hex(8)
    path = there / f".shared-{token}"
    look: Any = ray.remote(reads)
    try:
        path.write_text(token)
        asked = {
            look.options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(path, token): node["NodeManagerHostname"]
            for node in _nodes()
        }
        ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS)
        excuses = [f"node {name} {said}" for answer, name in asked.items() if (said := _excuse(answer))]
    finally:
        path.unlink(missing_ok=True)
    if excuses:
        said = f"every node must see {there}: {listed(excuses)}"
        raise UserError(f"{said}; give an --out on a file system that all nodes share")


def _excuse(answer) -> str:
    """Why a node cannot run what the folder asks for; empty if it can."""
    import ray

    try:
        return "" if ray.get(answer, timeout=0) else "does not see it"
    except ray.exceptions.GetTimeoutError:
        return f"did not answer within {_ANSWER_SECONDS} seconds"
    except ray.exceptions.RayError as error:
        return f"failed to look: {' '.join(str(error).split()[-_WORDS:])}"


def _nodes() -> list[dict]:
    """The living nodes that have a CPU."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _holds(node: dict, cpus: int, gpus: float) -> bool:
    return node["Resources"].get("CPU", 0) >= cpus and node["Resources"].get("GPU", 0) >= gpus
