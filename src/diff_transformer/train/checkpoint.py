"""Checkpoints of a training run, written by torch.distributed.checkpoint (DCP) in the safetensors format.

``RUN/checkpoints/step-00000200/`` holds one safetensors file a process, and ``checkpoint.json`` with the size of every
file. A folder has this name only once all is on the disk; until then it ends in ``.tmp``. There is no pickle. A
checkpoint may be loaded by another number of processes, or under another strategy.

The rows and the random draws of a step are functions of the step, so that nothing of them is saved.
"""

import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from diff_transformer.errors import UserError
from diff_transformer.train.ranks import on_first_rank

logger = logging.getLogger("diff_transformer")

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process alone is one case of several here
NOTE = "checkpoint.json"
UNFINISHED = ".tmp"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of the run in ``folder``, by step."""
    return sorted(path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdigit())


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of the run in ``folder``, or None."""
    return next(reversed(checkpoints(folder)), None)


class Checkpoints:
    """The checkpoints of a run. With several processes, every process calls ``save``, ``wait`` and ``load``.

    Args:
        folder: of the run.
        fabric: of its processes; None for a process alone.
        keep: number of newest checkpoints that stay.
        background: let a thread write a copy of the state in main memory while training goes on.
    """

    def __init__(self, folder: Path, fabric: Any = None, *, keep: int = 2, background: bool = False):
        self.folder, self.fabric, self.keep = folder, fabric, keep
        self.first = fabric is None or fabric.is_global_zero
        # training communicates while a thread writes, so the thread needs a group of its own
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        gpu = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(gpu, False, False, gpu)) if background else None
        self._writing: tuple[int, Any] | None = None

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save the state after ``step`` steps.

        Raises:
            UserError: on every process, if the disk does not take this checkpoint, or the previous one in the
                background. Older checkpoints are intact.
        """
        self.wait()
        state = _tensors(model, get_optimizer_state_dict(model, optimizer))
        writer = _Writer(self, step)
        options: Any = {"storage_writer": writer, "process_group": self._group, "no_dist": self._group is None}
        try:
            if self._stager is not None:
                self._writing = step, dcp.async_save(state, async_stager=self._stager, **options)
            else:
                dcp.save(state, **options)
        except CheckpointException as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Return once the last checkpoint is on the disk; raises as ``save``."""
        (step, writing), self._writing = self._writing or (0, None), None
        try:
            if writing is not None:
                writing.result()
        except CheckpointException as error:
            raise self._failed(step, error) from error

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Load the newest usable checkpoint in place; return its step, or 0 if there is no checkpoint.

        Raises:
            UserError: if all are damaged, or of another model.
        """
        known = reversed(checkpoints(self.folder))
        candidates = on_first_rank(self.fabric, lambda: [(path, _damage(path)) for path in known])  # all take the same
        for path, damage in candidates:
            try:
                if damage is None:
                    return self._load(path, model, optimizer)
            except CheckpointException as error:
                damage = _cause(error)
            if self.first:
                logger.warning("%s is damaged (%s); the checkpoint before it is used", path.name, damage)
        if candidates:
            raise UserError(
                f"all checkpoints in {self.folder / 'checkpoints'} are damaged; restore one of them from a copy, or "
                "start again in another folder"
            )
        return 0

    def _load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        of_optimizer, reader = get_optimizer_state_dict(model, optimizer), HuggingFaceStorageReader(str(path))
        state = _tensors(model, of_optimizer)
        dcp.load(state, storage_reader=reader, process_group=self._group, no_dist=self._group is None)
        set_optimizer_state_dict(model, optimizer, of_optimizer)
        return int(path.name[5:])

    def _failed(self, step: int, error: CheckpointException) -> BaseException:
        """Remove what was written; the error with what is intact and what to do."""
        cause = _cause(error)
        if not isinstance(cause, OSError | SafetensorError):  # safetensors has its own class for errors of the disk
            return cause
        if self.first:
            shutil.rmtree(self.folder / "checkpoints" / f"{_name(step)}{UNFINISHED}", ignore_errors=True)
        last = latest_checkpoint(self.folder)
        return UserError(
            f"the checkpoint of step {step} could not be written: {cause}; "
            f"{f'{last} is intact' if last else 'there is no earlier one'}. Once this is fixed, continue with --resume"
        )


class _Writer(HuggingFaceStorageWriter):
    """Writes to ``step-N.tmp`` and renames it. The two global methods run on rank 0 only, in DCP's order."""

    def __init__(self, owner: Checkpoints, step: int):
        self.owner, self.final = owner, owner.folder / "checkpoints" / _name(step)
        super().__init__(f"{self.final}{UNFINISHED}", save_distributed=True)

    def prepare_local_plan(self, plan):
        return plan  # the folder is made below, when all have a plan: a leftover file would be read as a shard

    def prepare_global_plan(self, plans):
        for unfinished in self.final.parent.glob(f"step-*{UNFINISHED}"):
            shutil.rmtree(unfinished)
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner) -> Future:
        """As inherited, without its two more copies of the state in memory."""
        tensors = {item.index.fqn: planner.resolve_data(item).detach().cpu().contiguous() for item in plan.items}
        places = {item.index.fqn: {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)} for item in plan.items}
        if len(tensors) < len(plan.items):
            raise NotImplementedError("a process has two pieces of one tensor, which a safetensors file cannot hold")
        file = Path(self.path) / f"{plan.storage_data['shard_index']:05d}.safetensors"
        save_file(tensors, file, {CUSTOM_METADATA_KEY: json.dumps(places), "format": "pt"})
        _flush(file)
        done: Future = Future()
        done.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])
        return done

    def finish(self, metadata, results) -> None:
        folder = Path(self.path)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        if len(sizes) < sum(map(bool, results)):
            raise OSError(f"{folder.parent} is not one folder for all machines; give an --out that all of them see")
        note = {"torch": torch.__version__, "bytes": sizes}
        (folder / NOTE).write_text(json.dumps(note))
        _flush(folder / NOTE)
        _flush(folder)
        shutil.rmtree(self.final, ignore_errors=True)  # damaged, or of a run that went back
        folder.rename(self.final)
        _flush(self.final.parent)
        there = checkpoints(self.owner.folder)
        for path in {*there} - {*[path for path in there if _damage(path) is None][-self.owner.keep :]}:
            shutil.rmtree(path.rename(f"{path}{UNFINISHED}"))


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _tensors(model: nn.Module, of_optimizer: dict[str, Any]) -> dict[str, Tensor]:
    """Weights and optimizer state under flat names; a tied weight once. The optimizer's settings are no state."""
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name in once}
    for name, values in of_optimizer["state"].items():
        state |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return state


def _damage(path: Path) -> str | None:
    """The damage of a checkpoint, by the sizes and headers of its files; None if there is none."""
    try:
        sizes = json.loads((path / NOTE).read_text())["bytes"].items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{NOTE} is missing or damaged"
    for name, size in sizes:
        if not (path / name).exists() or (path / name).stat().st_size != size:
            return f"{name} is missing or has another size"
        try:
            with safe_open(path / name, "pt"):  # where DCP would log a traceback
                pass
        except SafetensorError as error:
            return f"{name}: {error}"
    return None


def _cause(error: CheckpointException) -> BaseException:
    """The error of the first process that failed."""
    return next(iter(error.failures.values()))[0]
