"""A sharded state on the disk: every process writes, hashes and reads back its own part (torch.distributed.checkpoint).

The folder has the format of Fabric's sharded checkpoints: ``__RANK_0.distcp`` with the tensors of a process,
``.metadata`` with their places, ``meta.pt`` with the rest of the state. It loads over any number of processes and with
any strategy, and nothing in it is executed.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from diff_transformer.train.manifest import HashingFile, read_back

_REST = "meta.pt"
_METADATA = "torch.distributed.checkpoint.metadata"
_DESCRIPTIONS = {  # what `.metadata` may hold besides dtypes and plain values
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    ("pathlib", "WindowsPath"), ("pathlib._local", "WindowsPath"), ("collections", "OrderedDict"),
}  # fmt: skip


def make_stager() -> AsyncStager:
    """Copies states into main memory, reusing its buffers (pinned if there is a GPU)."""
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )


class ShardWriter(dcp.FileSystemWriter):
    """Writes the part of this process, with its checksum.

    Args:
        folder: of the shards.
        rest: what of the state is no tensor of the model or the optimizer; rank 0 writes it.
        prepare: called on rank 0 before any process writes.
        publish: called on rank 0 with checksums by name of file, when all processes have written and read back theirs.
    """

    def __init__(
        self,
        folder: Path,
        rest: dict[str, Any],
        *,
        prepare: Callable[[], None],
        publish: Callable[[dict[str, str]], object],
    ):
        super().__init__(folder)
        self._folder, self._rest, self._prepare, self._publish = folder, rest, prepare, publish
        self.fs = self._files = _HashingFiles()

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        self._prepare()
        self._folder.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner) -> Future:
        results = super().write_data(plan, planner).wait()
        checksums = self._files.checksums
        for name, checksum in checksums.items():
            read_back(self._folder / name, checksum)
        done: Future = Future()
        done.set_result([_Hashed(one.index, one.size_in_bytes, one.storage_data, checksums) for one in results])
        return done

    def finish(self, metadata, results) -> None:
        super().finish(metadata, results)
        torch.save(self._rest, self._folder / _REST)
        hashed = [one for of_rank in results for one in of_rank[:1]]
        self._publish({name: checksum for one in hashed for name, checksum in one.checksums.items()})


@dataclass(frozen=True)
class _Hashed(WriteResult):
    """A process's message to rank 0 about a tensor it wrote, with the checksums of its files."""

    checksums: dict[str, str]


class _HashingFiles(FileSystem):
    """Keeps the SHA-256 of each file written, by name."""

    def __init__(self):
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path, mode: str) -> Generator[Any]:
        with super().create_stream(path, mode) as file:
            hashing = HashingFile(file)
            yield hashing
        self.checksums[Path(path).name] = hashing.checksum


def write_shards(
    state: dict[str, Any], writer: ShardWriter, group: dist.ProcessGroup, stager: AsyncStager | None
) -> Callable[[], object]:
    """Write ``state``, objects with a sharded ``state_dict``. Every process calls it.

    Args:
        group: on the CPU, for this alone: training communicates at the same time.
        stager: copies the state first, and a thread writes the copy; None writes when the result is called.

    Returns:
        A function that returns once the state is written, or raises torch's CheckpointException on every process.
    """
    if stager is None:
        return partial(dcp.save, state, storage_writer=writer, process_group=group)
    writing: Any = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=stager)
    return writing.result


def load_shards(folder: Path, state: dict[str, Any]) -> None:
    """Load a sharded state into ``state``: in place into objects with a ``state_dict``, else by key.

    Every process calls it. The objects may be sharded otherwise than those saved, or whole.

    Raises:
        UnpicklingError: for a file that could run code. Nothing of it was executed.
        CheckpointException: (of torch) if the state does not fit, or cannot be read.
    """
    rest = torch.load(folder / _REST, weights_only=True)
    reader = _Reader(folder)
    parts = {key: value for key, value in state.items() if hasattr(value, "state_dict")}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(parts, storage_reader=reader, planner=_Planner(), no_dist=not dist.is_initialized())
    state.update(rest)


class _Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path):
        super().__init__(folder)
        with (folder / ".metadata").open("rb") as file:
            self._metadata = _MetadataUnpickler(file).load()

    def read_metadata(self, *_: Any, **__: Any):
        return self._metadata


class _MetadataUnpickler(Unpickler):
    """Unpickles descriptions of tensors and their places in files, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _DESCRIPTIONS:
            return super().find_class(module, name)
        raise UnpicklingError(f"{module}.{name} is no description of a tensor")


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item, value) -> None:
        torch.load(value, weights_only=True)  # raises UnpicklingError before the line below could run code
        value.seek(0)
        super().load_bytes(read_item, value)
