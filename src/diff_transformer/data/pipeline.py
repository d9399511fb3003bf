"""The tasks of ``prepare`` as steps of a datatrove pipeline, for many processes or machines.

``Read`` begins a pipeline and ``Write`` ends it. datatrove's filters and deduplication stand between them, and its
executors run the tasks here, on Slurm or on Ray. ``examples/cluster/prepare.py`` is such a pipeline.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from diff_transformer.data.prepare import reader_of, texts_of, write_task
from diff_transformer.data.tokens import read_plan


class Read(PipelineStep):
    """The texts of a task of the folder ``out``, which ``prepare.begin`` made."""

    type, name = "READER", "texts"

    def __init__(self, out: Path | str):
        super().__init__()
        self.out, self.left_out = str(out), Counter()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        plan = read_plan(self.out)
        reader = reader_of(plan, rank)
        for number, (split, text) in enumerate(texts_of(plan, rank, reader)):
            self.stat_update("documents")
            yield Document(text, f"{rank}/{number}", metadata={"split": split})
        self.left_out.clear()
        self.left_out.update(reader.left_out)


class Write(PipelineStep):
    """The shards and the record of a task, from the documents of ``read`` that the steps between them kept."""

    type, name = "WRITER", "shards"

    def __init__(self, read: Read):
        super().__init__()
        self.read = read

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        texts = ((document.metadata["split"], document.text) for document in data)
        write_task(Path(self.read.out), read_plan(self.read.out), rank, texts, self.read.left_out)
