"""Where the tasks of a preparation run: processes of this machine, Slurm or Ray."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from dataclasses import dataclass

from diff_transformer.checks import first_line, require_extra, require_known
from diff_transformer.data.prepare.config import PrepareConfig

ENGINES = ("local", "slurm", "ray")
SHARD_BYTES = 1_024_000_000  # of text, the default with an engine
_OPTIONS = {"address": "ray", "partition": "slurm", "time": "slurm", "dry_run": "slurm"}
_CONNECT_SECONDS = 5


@dataclass(frozen=True)
class Engine:
    """Where tasks run. Nothing here changes the bytes of the folder."""

    kind: str  # "local", "slurm" or "ray"
    address: str | None = None  # of a Ray cluster, HOST:PORT; by default that of RAY_ADDRESS, or of this machine
    partition: str | None = None  # of Slurm
    time: str | None = None  # of Slurm: limit of a job, HH:MM:SS
    dry_run: bool = False  # with Slurm: write the scripts of the jobs, and submit none

    def check(self, config: PrepareConfig) -> None:
        """Check that the engine can run tasks of ``config``; connect to a Ray cluster.

        Raises:
            ValueError: for an unknown engine or an option of another one.
            RuntimeError: for a package or a command that is missing, or an address where no cluster listens.
        """
        require_known("engine", self.kind, ENGINES)
        for option, kind in _OPTIONS.items():
            if getattr(self, option) and kind != self.kind:
                name = option.replace("_", "-")
                raise ValueError(f"--{name} is an option of --engine {kind}, not of {self.kind}; leave it out")
        words = ("spacy",) if config.filters or config.dedup else ()
        require_extra("datatrove", "--engine", "datatrove", "dill", *words)
        if self.kind == "slurm":
            self._check_slurm()
        elif self.kind == "ray":
            require_extra("ray", "--engine ray", "ray")
            self._connect()

    def _check_slurm(self) -> None:
        if not self.partition or not self.time:
            raise ValueError("--engine slurm needs --partition NAME and --time HH:MM:SS")
        if not self.dry_run and shutil.which("sbatch") is None:
            raise RuntimeError(
                "there is no command sbatch here; run on a login node of the cluster, or only write the scripts "
                "(--dry-run)"
            )

    def _connect(self) -> None:
        import ray

        address = self.address or os.environ.get("RAY_ADDRESS") or "auto"
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if address != "auto":  # Ray itself tries for a minute
                socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
            ray.init(address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"no Ray cluster answers at {address} ({first_line(error)}); give --address HOST:PORT of a running "
                "one, or start one with `ray start --head`"
            ) from None
