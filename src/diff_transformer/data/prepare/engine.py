"""Where the tasks of a preparation run: processes of this machine, Slurm or Ray."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from diff_transformer.checks import require_extra, require_known
from diff_transformer.cluster import connect
from diff_transformer.data.prepare.config import PrepareConfig

ENGINES = ("local", "slurm", "ray")
SHARD_BYTES = 1_024_000_000  # of text, the default with an engine
_OPTIONS = {"address": "ray", "partition": "slurm", "time": "slurm", "dry_run": "slurm"}


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
            ValueError: for an unknown engine, an option of another one, or an address that is not ``HOST:PORT``.
            RuntimeError: for a package or a command that is missing.
            ConnectionError: for an address where no cluster listens.
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
            connect(self.address)

    def _check_slurm(self) -> None:
        if not self.partition or not self.time:
            raise ValueError("--engine slurm needs --partition NAME and --time HH:MM:SS")
        if not self.dry_run and shutil.which("sbatch") is None:
            raise RuntimeError(
                "there is no command sbatch here; run on a login node of the cluster, or only write the scripts "
                "(--dry-run)"
            )
