"""Who writes checkpoints: this process while training waits, or a thread of it while training goes on."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from diff_transformer.train.checkpoint import on_first_rank, save_checkpoint, write_checkpoint
from diff_transformer.train.snapshot import Snapshots, has_shards


class Saver:
    """Writes the checkpoints of one run, with the same guarantees either way.

    In the background, the state is copied to main memory first (one more copy of it is held there), and a thread
    writes the copy. One checkpoint is written at a time; ``save`` waits for the one before, and raises its error.
    ``wait`` before saying that a state is saved.
    """

    def __init__(self, fabric, folder: Path, *, keep: int = 2, keep_best: bool = True, background: bool = False):
        self._fabric, self._folder = fabric, folder
        self._options: dict[str, Any] = {"keep": keep, "keep_best": keep_best}
        self._snapshots = Snapshots()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if background else None
        self._writing: Future | None = None

    def save(self, step: int, state: dict[str, Any], validation_loss: float | None = None) -> None:
        """Save ``state`` as of ``step``; called by every rank.

        Raises:
            DiskError: if this checkpoint, or the one before it in the background, could not be written.
            ValueError: for a sharded model in the background.
        """
        options: dict[str, Any] = {**self._options, "validation_loss": validation_loss}
        if self._pool is None:
            save_checkpoint(self._fabric, self._folder, step, state, **options)
            return
        if has_shards(state):
            raise ValueError("train.checkpoint_async copies whole tensors, and this model is sharded; set it to false")
        self.wait()
        if self._fabric.is_global_zero:
            world = self._fabric.world_size
            copied = self._snapshots.take(state)
            self._writing = self._pool.submit(write_checkpoint, self._folder, step, copied, world_size=world, **options)

    def wait(self) -> None:
        """Return once what was given to ``save`` is on the disk; called by every rank.

        Raises:
            DiskError: if it could not be written.
        """
        writing, self._writing = self._writing, None
        if self._pool is not None:
            on_first_rank(self._fabric, lambda: None if writing is None else (writing.result(), None)[1])

    def close(self) -> None:
        """End the thread once it has written what it has; errors are left to ``wait``."""
        if self._pool is not None:
            self._pool.shutdown()
